"""Matmuls in block formats: blocks along the sum, in each computation and mode."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_unitscale import Simulate, UnitScaleCallback
from lightning_unitscale.capture.module_steps import captured_forward
from lightning_unitscale.formats.round_numbers import rounded_blocks
from lightning_unitscale.matmuls import rounding
from lightning_unitscale.matmuls.block_rounding import UNIT_SCALE, hadamard
from lightning_unitscale.quantize import quantize, quantize_blocks
from lightning_unitscale.transforms import lossless_unit_scale, simulate_format
from tests.callbacks.runs import QUIET
from tests.helpers import assert_same_bits, run
from tests.zoo import MATMULS

Blocks = Callable[..., Tensor]


def _blocks(format: str, **options: Any) -> Blocks:
    return lambda tensor, axis, **more: quantize_blocks(tensor, format, axis, **options, **more)


def _linear() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    return nn.Linear(40, 24, bias=False), torch.randn(20, 40), torch.randn(20, 24)


def _gradients(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(g)
    weight = next(module.parameters())
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("format", ["MXFP8", "MXFP6_E3M2", "MXFP4", "NVFP4"])
def test_blocks_run_along_reduction_of_each_computation(format: str) -> None:
    layer, x, g = _linear()
    w, q = layer.weight.detach(), _blocks(format)
    y, dx, dw = _gradients(simulate_format(layer, format, format), x, g)
    assert torch.equal(y, q(x, -1) @ q(w, -1).T)
    assert torch.equal(dx, q(g, -1) @ q(w, 0))
    assert torch.equal(dw, q(g, 0).T @ q(x, 0))


def test_square_weights_hadamard_and_stochastic_rounding() -> None:
    layer, x, g = _linear()
    w, q = layer.weight.detach(), _blocks("NVFP4")
    options: dict[str, Any] = {"square_weights": True, "hadamard": True}
    y, dx, dw = _gradients(simulate_format(layer, "NVFP4", "NVFP4", **options), x, g)
    squares = q(w, -1, square=True)
    assert torch.equal(y, q(x, -1) @ squares.T) and torch.equal(dx, q(g, -1) @ squares)
    expected = q(hadamard(g, 0, 0), 0).T @ q(hadamard(x, 0, 0), 0)
    assert torch.equal(dw, expected)
    # Alone, the transform changes nothing but rounding errors.
    assert torch.allclose(hadamard(g, 0, 0).T @ hadamard(x, 0, 0), g.T @ x, atol=1e-4)
    assert not torch.allclose(hadamard(g, 0, 0), g)
    module = simulate_format(layer, "NVFP4", "NVFP4", gradient_rounding="stochastic")
    first, second = (_gradients(module, x, g) for _ in range(2))
    assert torch.equal(first[0], q(x, -1) @ q(w, -1).T) and not torch.equal(first[1], second[1])


def _along_rows(format: str | None) -> Blocks:
    if format == "E4M3":
        return lambda tensor: quantize(tensor, format)
    return lambda tensor: tensor if format is None else quantize_blocks(tensor, format, 0)


@pytest.mark.parametrize("formats", [(None, "NVFP4"), ("NVFP4", None), ("E4M3", "NVFP4")], ids=str)
def test_hadamard_applies_to_both_operands(formats: Any) -> None:
    layer, x, g = _linear()
    _, dx, dw = _gradients(simulate_format(layer, *formats, hadamard=True), x, g)
    of_input, of_gradient = (_along_rows(format) for format in formats)
    assert torch.equal(dw, of_gradient(hadamard(g, 0, 0)).T @ of_input(hadamard(x, 0, 0)))
    assert (dw - g.T @ x).norm() < 0.15 * (g.T @ x).norm()
    assert torch.equal(dx, _gradients(simulate_format(layer, *formats), x, g)[1])


def test_weight_is_known_if_forward_matmul_is_exempt() -> None:
    layer, x, g = _linear()
    options: dict[str, Any] = {"square_weights": True, "hadamard": True}
    made = [
        _gradients(simulate_format(layer, "NVFP4", "NVFP4", exempt=exempt, **options), x, g)
        for exempt in ((), [("*", "forward"), ("another", "input_gradient")])
    ]
    assert torch.equal(made[1][0], layer(x)) and not torch.equal(made[0][0], layer(x))
    assert torch.equal(made[0][1], made[1][1]) and torch.equal(made[0][2], made[1][2])


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_blocks_run_along_channels_or_positions(
    transposed: bool,
) -> None:
    torch.manual_seed(2)
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(34, 17, 3, bias=False)
    x, q = torch.randn(3, 34, 6, 7), _blocks("MXFP4")
    w, function = layer.weight.detach(), F.conv_transpose2d if transposed else F.conv2d
    y = function(q(x, 1), q(w, 0 if transposed else 1))
    g = torch.randn_like(y)
    found = _gradients(simulate_format(layer, "MXFP4", "MXFP4"), x, g)
    assert torch.equal(found[0], y)

    def gradients(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        return torch.autograd.grad(function(x, w), (x, w), g)

    along_output = q(w, 1 if transposed else 0)
    assert torch.allclose(found[1], gradients(x, along_output, q(g, 1))[0], atol=1e-5)
    others = (0, 2, 3)
    assert torch.allclose(found[2], gradients(q(x, others), w, q(g, others))[1], atol=1e-5)


class _Reductions(TorchDispatchMode):
    """Records the results of reductions that have one element, of large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_calls += 1
        largest = max((a.numel() for a in args if isinstance(a, Tensor)), default=0)
        is_one = isinstance(result, Tensor) and result.numel() == 1 and largest > 16
        if is_one and "new_full" not in str(func):  # a constant
            self.found.append(str(func))
        return result


def test_unit_replaces_tensor_scale_of_nvfp4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, x, g = _linear()
    x = x * 300.0
    plain = simulate_format(layer, "NVFP4", "NVFP4")
    scaled = lossless_unit_scale(plain, x)
    unit = 2.0 ** scaled.gauge().pairs["linear:input"].log2_sigma
    own = 2.0 ** scaled.gauge().pairs["linear:weight"].log2_sigma
    y, _, _ = _gradients(scaled, x, g)  # which measures the gradient's unit
    q = _blocks("NVFP4", tensor_scale=UNIT_SCALE)
    w = layer.weight.detach()
    assert torch.equal(y, (q(x / unit, -1) @ q(w / own, -1).T) * (unit * own))
    assert not torch.equal(y, _gradients(plain, x, g)[0])
    # A mode does not see what a kernel runs, so it is entered within.
    for module, count in ((scaled, 0), (plain, 6)):
        mode = _Reductions()

        def counted(*args: Any, mode: _Reductions = mode) -> Tensor:
            with mode:
                return rounded_blocks(*args)

        monkeypatch.setattr(rounding, "rounded_blocks", counted)
        _gradients(module, x, g)
        assert mode.num_calls > 20 and len(mode.found) == count, mode.found


@pytest.mark.parametrize("name", MATMULS)
def test_every_operator_is_rounded_with_small_gradient_error(name: str) -> None:
    module, inputs = MATMULS[name]()
    # MXFP8 with E4M3 elements loses at most 1/16 of an element.
    expected, found = run(module, *inputs), run(simulate_format(module, "MXFP8", "MXFP8"), *inputs)
    assert expected.keys() == found.keys() if isinstance(expected, dict) else True
    largest = max(one.norm() for one in _tensors(expected))
    for one, other in zip(_tensors(expected), _tensors(found), strict=True):
        # Some gradients are zero but for rounding errors.
        difference = (one - other).norm() / one.norm().clamp(min=0.05 * largest)
        assert difference < 0.3, difference


def _tensors(found: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(found)
    return [one.double() for one in leaves if isinstance(one, Tensor) and one.is_floating_point()]


def test_captured_steps_match_eager_bit_for_bit() -> None:
    torch.manual_seed(3)
    module, x = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 40)), torch.randn(5, 40)
    options: dict[str, Any] = {"square_weights": True, "hadamard": True}
    eager = run(simulate_format(module, "NVFP4", "MXFP8", **options), x)
    captured, _ = captured_forward(module, "a test")
    assert_same_bits(eager, run(simulate_format(captured, "NVFP4", "MXFP8", **options), x))


class _Step(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(32, 32)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_callback_sets_formats_by_direction() -> None:
    def formats(**options: Any) -> list[str]:
        made = Simulate(**options).rounding_pass()
        which = [(False, False), (True, False), (True, True)]
        return [str(made.format_of(is_backward=b, is_gradient=g)) for b, g in which]

    assert formats(forward="NVFP4") == ["NVFP4", "None", "None"]
    assert formats(backward="mxfp8") == ["None", "MXFP8_E4M3", "MXFP8_E4M3"]
    assert formats(forward="NVFP4", backward="MXFP8") == ["NVFP4", "MXFP8_E4M3", "MXFP8_E4M3"]
    assert formats(format=("NVFP4", "E5M2")) == ["NVFP4", "NVFP4", "E5M2"]
    with pytest.raises(ValueError, match=r"^format='MXFP8': forward= and backward= already set"):
        Simulate("MXFP8", forward="NVFP4")
    with pytest.raises(ValueError, match=r"^hadamard=True: only block formats have this option"):
        Simulate("E4M3FN", hadamard=True)


def test_callback_simulates_block_formats() -> None:
    losses = {}
    for name, simulate in {"mxfp8": "mxfp8", "nvfp4": Simulate(forward="NVFP4")}.items():
        callback = UnitScaleCallback(simulate=simulate)
        trainer = Trainer(max_steps=3, callbacks=[callback], **QUIET)
        data = torch.utils.data.DataLoader([torch.randn(4, 32) for _ in range(3)])
        trainer.fit(_Step(), data)
        losses[name] = callback.explain()
    assert "Operands rounded to MXFP8_E4M3, gradients to MXFP8_E4M3" in losses["mxfp8"]
    assert "operands of backward matmuls to None" in losses["nvfp4"]
    assert math.log2(UNIT_SCALE) == -3
