"""Real FP8 in a graph: the simulation's bits, fused units, and a reason for every layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.module_steps import captured_forward, matmuls_of, steps_of
from lightning_unitscale.matmuls import matmul_formats as fp8
from lightning_unitscale.matmuls.matmul_formats import FP8Linears
from lightning_unitscale.matmuls.measurement import Unrepresentable
from lightning_unitscale.transforms import (
    fp8_linears,
    lossless_unit_scale,
    simulate_format,
)
from tests.helpers import assert_same_bits, run

# Forms has a layer that FP8 cannot take.
pytestmark = pytest.mark.filterwarnings("ignore:.*(run outside|no matmul runs in) :UserWarning")


class Forms(nn.Module):
    """Eligible layers in every form, and matmuls that are not, between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32, bias=False)
        self.turned = nn.Parameter(0.1 * torch.randn(32, 48))
        self.added = nn.Parameter(torch.randn(48))
        self.last = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(F.gelu(self.first(x))).relu_()
        h = torch.addmm(self.added, h.view(-1, 32), self.turned)
        h = (h @ h.t()).softmax(-1) @ h
        h = h @ self.turned.t() @ self.turned
        return self.last(h).square().mean()


_FP8 = ["first.linear", "second.linear", "addmm", "linear_1", "matmul_1"]
_KEPT = ["linear", "matmul", "last.linear"]


def _forms() -> tuple[Forms, Tensor]:
    torch.manual_seed(0)
    # 15 tokens: the weights' gradients are summed over a number that is no multiple of 16.
    return Forms(), (0.01 * torch.randn(3, 5, 32)).requires_grad_()


def _pass_of(module: nn.Module) -> FP8Linears:
    return next(one for one in matmuls_of(module).formats if isinstance(one, FP8Linears))


def _captured(module: nn.Module) -> nn.Module:
    return captured_forward(module, "test")[0]


@pytest.mark.parametrize("order", ["units first", "units last"])
@pytest.mark.parametrize("gradient", ["E4M3FN", "E5M2"])
def test_fp8_matches_simulation_bit_for_bit(order: str, gradient: Any) -> None:
    """Sums of FP8 matmuls in FP32 are sums of FP8 matmuls in FP32, if the order is the same."""
    module, x = _forms()
    units = lossless_unit_scale(module, x)
    simulated = simulate_format(units, "E4M3FN", gradient, include=_FP8)
    if order == "units first":
        real = fp8_linears(units, gradient_format=gradient)
    else:
        real = lossless_unit_scale(fp8_linears(module, gradient_format=gradient), x)
    for _ in range(2):  # layers are met as a whole from the second step on
        found, expected = run(real, x), run(simulated, x)
        assert_same_bits(found, expected)
    assert not torch.equal(found["output"], run(module, x)["output"])


def test_simulation_applies_to_matmuls_outside_fp8() -> None:
    module, x = _forms()
    units = lossless_unit_scale(module, x)
    whole: Any = ("E4M3FN", "E4M3FN")
    expected = run(simulate_format(fp8_linears(units), *whole, exclude=_FP8), x)
    assert not torch.equal(run(fp8_linears(units), x)["output"], expected["output"])
    for both in (
        simulate_format(fp8_linears(units), *whole),
        fp8_linears(simulate_format(units, *whole)),
        lossless_unit_scale(fp8_linears(simulate_format(module, *whole)), x),
    ):
        assert_same_bits(run(both, x), expected)


def test_every_decision_is_reported() -> None:
    module, x = _forms()
    fp8 = fp8_linears(lossless_unit_scale(module, x), exclude=["second", "addmm"])
    fp8(x)
    decisions = _pass_of(fp8).decisions
    assert decisions == {
        "first.linear": None,
        "second.linear": "name excluded",
        "addmm": "name excluded",
        "linear": "not a linear layer",
        "matmul": "not a linear layer",
        "linear_1": None,
        "matmul_1": None,
        "last.linear": "its 10 output features are not a multiple of 16, and padding would not pay",
    }
    text = fp8.explain()
    assert "3 of 8 matmuls in FP8 with constant scales" in text
    for name in (*_FP8, *_KEPT):
        assert f"\n{name} " in text


@pytest.mark.parametrize("scaling", ["constant", "dynamic"])
def test_gradients_out_of_range_need_units_or_dynamic_scales(scaling: Any) -> None:
    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return 1e-7 * self.layer(x).square().sum()

    torch.manual_seed(0)
    module, x = Faint(), torch.randn(8, 32)
    (expected,) = (run(module, x)["parameters"]["layer.weight"],)
    found = run(fp8_linears(module, scaling=scaling), x)["parameters"]["layer.weight"]
    with_units = fp8_linears(lossless_unit_scale(module, x), scaling=scaling)
    near = run(with_units, x)["parameters"]["layer.weight"]
    assert (near - expected).norm() < 0.1 * expected.norm()
    if scaling == "dynamic":
        assert (found - expected).norm() < 0.1 * expected.norm()
    else:
        assert not found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_have_autocast_dtype(dtype: torch.dtype) -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    torch.manual_seed(0)
    module, x = Typed(), torch.randn(8, 32, requires_grad=True)
    with torch.autocast("cpu", dtype):
        fp8 = fp8_linears(lossless_unit_scale(module, x))
        y = fp8(x)
    y.float().square().sum().backward()
    assert y.dtype == dtype and x.grad is not None and x.grad.dtype == torch.float32
    exact = module(x)
    assert (y - exact).norm() < 0.06 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_modules_in_16_bits(dtype: torch.dtype) -> None:
    module, x = _forms()
    module, x = module.to(dtype), x.detach().to(dtype).requires_grad_()
    found = run(fp8_linears(lossless_unit_scale(module, x)), x)
    plain = run(module, x)
    assert_near = torch.testing.assert_close
    assert_near(found["output"], plain["output"], rtol=0.05, atol=0.0)
    assert {one.dtype for one in found["parameters"].values()} == {dtype}


@pytest.mark.parametrize("executor", ["aot_eager", "inductor"])
def test_every_executor_matches_eager(executor: Any) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).square().mean()

    torch.manual_seed(0)
    module, x = Small(), torch.randn(7, 32, requires_grad=True)
    fp8 = _captured(fp8_linears(lossless_unit_scale(module, x)))
    eager = run(fp8, x)
    steps = steps_of(fp8)
    assert steps is not None
    steps.use_executor(executor)
    found = run(fp8, x)
    assert_close = torch.testing.assert_close
    assert_close(found, eager, rtol=2e-6 if executor == "inductor" else 0.0, atol=0.0)


def test_checkpointed_layers_match_plain_layers() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            inside = self.two(F.gelu(self.one(x)))
            return inside.square().mean()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    module, x = Outer(), torch.randn(6, 32, requires_grad=True)
    plain = copy.deepcopy(module)
    plain.forward = plain.inner.forward  # type: ignore[method-assign]
    units = lossless_unit_scale(module, x)
    found = run(fp8_linears(units), x)
    without = run(fp8_linears(lossless_unit_scale(module.inner, x)), x)
    assert found["output"] != run(module, x)["output"]
    assert_same_bits(found["output"], without["output"])
    assert_same_bits(list(found["parameters"].values()), list(without["parameters"].values()))


def _case(function: Callable[..., Tensor], *shapes: tuple[int, ...], **options: Any) -> Any:
    class Case(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shapes[0], **options))

        def forward(self, *inputs: Tensor) -> Tensor:
            return function(self.weight, *inputs)

    return Case(), [torch.randn(one, **options) for one in shapes[1:]]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (_case(lambda w, x: F.linear(x, w), (16, 32), (4, 32)), None),
        (_case(lambda w, x: F.linear(x, w), (16, 32), (32,)), None),
        (_case(lambda w, x: F.linear(x, w * 2), (16, 32), (4, 32)), None),
        (_case(lambda w, x: x @ w, (32, 16), (2, 4, 32)), None),
        (_case(lambda w, x: torch.mm(x, w.t()), (16, 32), (4, 32)), None),
        (_case(lambda w, x: x.matmul(w.view(32, 16)), (16, 32), (4, 32)), None),
        (_case(lambda w, x: torch.addmm(x, x, w, beta=1), (32, 32), (4, 32)), None),
        (_case(lambda w, x: torch.addmm(x, x, w, beta=2), (32, 32), (4, 32)), "it has beta=2"),
        (_case(lambda w, x: F.linear(x, w), (32,), (4, 32)), "not a linear layer"),
        (
            _case(lambda w, x: F.linear(x, w), (16, 24), (4, 24)),
            "its 24 input features are not a multiple of 16, and padding would not pay",
        ),
        (_case(lambda w, x: F.linear(x, w), (1024, 129), (2, 129)), None),
        (_case(lambda w, x: F.linear(x, w), (129, 1024), (2, 1024)), None),
        (
            _case(lambda w, x: F.linear(x, w), (1023, 129), (2, 129)),
            "its 129 input features are not a multiple of 16, and padding would not pay",
        ),
        (
            _case(lambda w, x: F.linear(x, w), (10, 1024), (2, 1024)),
            "its 10 output features are not a multiple of 16, and padding would not pay",
        ),
        (
            _case(lambda w, x: F.linear(x, w), (16, 32), (4, 32), dtype=torch.float64),
            "made of torch.float64",
        ),
        (_case(lambda w, x: w @ x, (16, 32), (32, 16)), "not a linear layer"),
        (_case(lambda w, x: x @ x.mT + w, (16, 16), (16, 32)), "not a linear layer"),
        (_case(lambda w, x: x @ w, (2, 32, 16), (2, 4, 32)), "not a linear layer"),
        (
            _case(lambda w, x: torch.einsum("bi,io->bo", x, w), (32, 16), (4, 32)),
            "not a linear layer",
        ),
        (
            _case(lambda w, x: F.conv1d(x, w), (16, 16, 1), (2, 16, 16)),
            "not a linear layer",
        ),
    ],
)
def test_eligible_layers_and_reasons(case: Any, reason: str | None) -> None:
    module, inputs = case
    fp8 = fp8_linears(module)
    warned: AbstractContextManager[Any] = nullcontext()
    if reason is not None:
        text = rf"no matmul runs in FP8: the step itself \({reason}\)"
        warned = pytest.warns(UserWarning, match=text)
    with warned:
        found = fp8(*inputs)
    assert list(_pass_of(fp8).decisions.values()) == [reason]
    exact = module(*inputs)
    assert found.dtype == exact.dtype
    if reason is None:
        assert 0 < (found - exact).norm() < 0.1 * exact.norm()
    else:
        assert_same_bits(found, exact)


def test_matmuls_excluded_later_apply_at_next_rewrite() -> None:
    module, x = _forms()
    fp8 = fp8_linears(module, gradient_format="E5M2")
    fp8(x)
    one = _pass_of(fp8)
    unrepresentable = Unrepresentable({"addmm": "too wide"}, {"first.linear": "too uneven"})
    # With E5M2 for all of them, no gradient is in a finer format that it might leave.
    assert one.leave_out(unrepresentable) == Unrepresentable({"addmm": "too wide"})
    assert one.leave_out(unrepresentable) == Unrepresentable()
    one.decisions.clear()
    fp8(x)
    assert one.decisions["addmm"] == "too wide" and one.decisions["first.linear"] is None
    assert _pass_of(copy.deepcopy(fp8)).unfit == Unrepresentable({"addmm": "too wide"})


def test_wide_range_gradients_use_e5m2() -> None:
    module, x = _forms()
    units = lossless_unit_scale(module, x)
    fp8 = fp8_linears(units)
    fine = run(fp8, x)
    one = _pass_of(fp8)
    assert one.leave_out(Unrepresentable({}, {"addmm": "too uneven"})).gradients
    copied = _pass_of(copy.deepcopy(fp8))
    assert copied.unfit == one.unfit and copied.gradient_format == "E4M3FN"
    mixed = run(fp8, x)
    text = fp8.explain()
    assert "constant scales, gradients in E5M2: too uneven" in text
    assert text.count("constant scales, gradients in E4M3FN") == 4
    coarse = run(fp8_linears(units, gradient_format="E5M2"), x)
    exact = run(module, x)["parameters"]

    def error(found: Any, name: str) -> float:
        return float((found["parameters"][name] - exact[name]).norm() / exact[name].norm())

    names = [name for name in exact if "weight" in name and "last" not in name]
    errors = [(error(fine, name), error(coarse, name)) for name in names]
    assert all(one < other for one, other in errors), errors
    assert any(error(fine, name) < error(mixed, name) < error(coarse, name) for name in names)


def test_device_without_fp8_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = _forms()
    monkeypatch.setattr(fp8, "why_no_fp8", lambda device: "too old")
    with pytest.raises(RuntimeError, match=r"first.linear on cpu: too old. Expected a GPU of"):
        fp8_linears(module)(x)
    # Where no layer would run in FP8, none is missing it.
    with pytest.warns(UserWarning, match="no matmul runs in FP8: .*name excluded"):
        fp8_linears(module, exclude="*")(x)


def test_bad_fp8_settings_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"scaling='static': unknown scaling. Expected 'constant'"):
        fp8_linears(nn.Linear(16, 16), scaling="static")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"exclude=\[3\]: 3 is not a pattern"):
        fp8_linears(nn.Linear(16, 16), exclude=[3])  # type: ignore[list-item]


def test_fp8_saves_half_of_autocast_bytes() -> None:
    """Bytes that autograd holds after a forward pass, of all tensors but single numbers."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 256)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum()  # whose gradient needs nothing to be kept

    torch.manual_seed(0)
    module, x = Loss(), torch.randn(64, 128, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim():
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    sizes = []
    with torch.autocast("cpu", torch.bfloat16):
        for one in (module, fp8_linears(lossless_unit_scale(module, x))):
            one(x).backward()  # after which all units are known
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = one(x)
            sizes.append(sum(kept.values()))
            del result
    assert sizes[0] == 2 * (64 * 128 + 256 * 128)
    assert 0 < sizes[1] <= 0.55 * sizes[0]
