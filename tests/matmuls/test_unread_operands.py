"""Operands that a call does not read may contain anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.matmuls import execute, kernels
from lightning_unitscale.matmuls.compiled_graphs import GRAPHS
from lightning_unitscale.matmuls.compiled_runs import CompiledMatmul
from lightning_unitscale.matmuls.measurement import Extent
from tests.callbacks.runs import QUIET
from tests.capture.test_operators import CONVOLUTION, GARBAGE, MASKS, randn
from tests.helpers import assert_same_bits

_ATEN = torch.ops.aten


@contextmanager
def _touched(tensors: list[Tensor]) -> Iterator[list[str]]:
    """Within this context it is listed when one of the tensors is copied or measured."""
    pointers = {tensor.data_ptr() for tensor in tensors}
    found: list[str] = []

    def watched(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any) -> Any:
            if tensor.data_ptr() in pointers:
                found.append(what)
            return function(tensor, *args)

        return call

    before = kernels.run_again

    def run_again(again: execute.Again, args: Any) -> Any:
        for at, _, is_gradient, factor in again.scaled:
            # The other ones are copied by the functions below.
            if factor is not None and not is_gradient and args[at].data_ptr() in pointers:
                found.append("copied")
        return before(again, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "scaled_copy", watched("copied", execute.scaled_copy))
        patch.setattr(execute, "shared_copy", watched("copied", execute.shared_copy))
        patch.setattr(kernels, "run_again", run_again)
        patch.setattr(Extent, "of", staticmethod(watched("measured", Extent.of)))
        yield found


class _Training(pl.LightningModule):
    """Calls a function of its layers, in a step of six."""

    def __init__(self, net: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.net, self.rows = net, rows
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(list(self.rows.split(2)), batch_size=None)


def _trained(
    make: Callable[[], nn.Module], rows: Tensor, **options: Any
) -> tuple[Any, UnitScaleCallback]:
    """Losses and parameters after a run in units, and its callback."""
    torch.manual_seed(1)
    callback = UnitScaleCallback(recalibrate=2, **options)
    module = _Training(make(), rows)
    pl.Trainer(callbacks=[callback], max_steps=6, max_epochs=-1, **QUIET).fit(module)
    return (module.losses, list(module.parameters())), callback


def _plain(make: Callable[[], nn.Module], rows: Tensor) -> Any:
    torch.manual_seed(1)
    module = _Training(make(), rows)
    pl.Trainer(max_steps=6, max_epochs=-1, **QUIET).fit(module)
    return module.losses, list(module.parameters())


class _Asked(torch.autograd.Function):
    """A convolution with some of its gradients, and garbage in the unread operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mask: Any, garbage: float
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mask, ctx.garbage = mask, garbage
        return F.conv2d(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_input, of_weight, _ = ctx.mask
        unread = [] if of_weight else [x := torch.full_like(x, ctx.garbage)]
        unread += [] if of_input else [weight := torch.full_like(weight, ctx.garbage)]
        arguments = (gradients[0], x, weight, *CONVOLUTION)
        with _touched(unread) as found:
            results = _ATEN.convolution_backward(*arguments, list(ctx.mask))
        assert not found
        asked = [r if wanted else None for r, wanted in zip(results, ctx.mask, strict=True)]
        return *asked, None, None


class _Masked(nn.Module):
    def __init__(self, mask: tuple[bool, ...], garbage: float) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 4, 3)
        self.mask, self.garbage = mask, garbage

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.conv.weight, self.conv.bias
        y = _Asked.apply(self.first(x), weight, bias, self.mask, self.garbage)
        return y.square().mean()  # type: ignore[no-any-return]


@pytest.mark.slow_cases(5)
@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}], ids=["units", "simulated"])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_convolution_gradients_ignore_unread_operands(
    mask: tuple[bool, ...], options: Any
) -> None:
    rows = 1e-3 * randn(12, 1, 6, 6)
    found = {
        garbage: _trained(lambda value=garbage: _Masked(mask, value), rows, **options)
        for garbage in GARBAGE
    }
    (expected, callback), *others = found.values()
    for run, other in others:
        assert_same_bits(run, expected)
        assert other.explain() == callback.explain()
    if not options:
        assert_same_bits(expected, _plain(lambda: _Masked(mask, 1.0), rows))
        assert callback.coverage.fraction_of_flops("units") == 1.0
    backward = [mask[0] or mask[1], mask[0]]
    # Both forward matmuls; that of the first layer, whose input needs no gradient, and this one.
    assert callback.coverage.num_matmuls == 2 + sum(backward)


class _PerSample(nn.Module):
    """Gradients of each sample, as differential privacy takes them."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        def loss(params: Any, row: Tensor) -> Tensor:
            return functional_call(self.net, params, (row[None],)).square().mean()

        gradients = vmap(grad(loss), (None, 0))(dict(self.net.named_parameters()), x)
        return sum(gradient.square().sum() for gradient in gradients.values())


_CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 3)), (2, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3)), (2, 7, 7)),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.Tanh(), nn.Conv3d(4, 2, 2)),
        (2, 4, 4, 4),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3), nn.Tanh(), nn.ConvTranspose2d(4, 2, 3)),
        (2, 4, 4),
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4)
        ),
        (2, 7, 7),
    ),
    "strided": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, bias=False), nn.Conv2d(4, 4, 2)),
        (2, 8, 8),
    ),
}


@contextmanager
def _filled_with_nan() -> Iterator[None]:
    """Within this context memory that nothing has written is NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow_cases(5)
@pytest.mark.parametrize("name", _CONVOLUTIONS)
@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}], ids=["units", "simulated"])
def test_per_sample_gradients_ignore_uninitialized_memory(name: str, options: Any) -> None:
    make, shape = _CONVOLUTIONS[name]
    rows = randn(12, *shape)
    run, callback = _trained(lambda: _PerSample(make), rows, **options)
    with _filled_with_nan():
        assert torch.empty(3).isnan().all()
        filled, other = _trained(lambda: _PerSample(make), rows, **options)
    assert_same_bits(filled, run)
    assert other.explain() == callback.explain()
    assert callback.coverage.fraction_of_flops("units", "format") == 1.0
    if not options:
        assert_same_bits(run, _plain(lambda: _PerSample(make), rows))


class _First(nn.Module):
    """A convolution whose input needs no gradient, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("recalibrate", [None, 1])
def test_first_layer_weight_is_copied_once(recalibrate: Any) -> None:
    torch.manual_seed(1)
    module = _Training(_First(), 1e-2 * randn(12, 2, 8, 8))
    callback = UnitScaleCallback(recalibrate=recalibrate)
    net: Any = module.net
    trainer = pl.Trainer(callbacks=[callback], max_steps=6, max_epochs=-1, **QUIET)
    with _touched([net.first.weight]) as of_first, _touched([net.second.weight]) as of_second:
        trainer.fit(module)
    # In the first step there are no units yet.
    assert of_first.count("copied") == 5
    assert of_second.count("copied") == 10
    assert of_first.count("measured") == of_second.count("measured") == (6 if recalibrate else 1)


class _Added(nn.Module):
    """Matmuls that are added to nothing: their addend is memory that was not written."""

    def __init__(self, garbage: float, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.garbage, self.how = garbage, how

    def forward(self, x: Tensor) -> Tensor:
        h, w = self.a(x), self.b.weight
        nothing = torch.full((2, 6), self.garbage)
        if self.how == "addmm":
            y = torch.addmm(nothing, h, w, beta=0)
        elif self.how == "addmm_":
            y = nothing.addmm_(h, w, beta=0.0, alpha=0.5)
        elif self.how == "baddbmm":
            y = torch.baddbmm(nothing[None], h[None], w[None], beta=0.0, alpha=2.0)[0]
        elif self.how == "addbmm":
            y = torch.addbmm(nothing, h[None], w[None], beta=0)
        elif self.how == "addmv":
            y = torch.addmv(nothing[:, 0], h, w[0], beta=0)
        else:
            with torch.no_grad():
                torch.addmm(nothing, x, w, beta=0, out=nothing)
            y = h + nothing
        return self.b(y).square().mean() if y.dim() == 2 else y.square().mean()


@pytest.mark.slow_cases(5)
@pytest.mark.parametrize("how", ["addmm", "addmm_", "baddbmm", "addbmm", "addmv", "out"])
@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}], ids=["units", "simulated"])
def test_addends_times_zero_are_not_read(how: str, options: Any) -> None:
    rows = 1e-2 * randn(12, 6)
    runs = [_trained(lambda v=value: _Added(v, how), rows, **options) for value in GARBAGE]
    for run, callback in runs:
        assert_same_bits(run, runs[0][0])
        assert callback.explain() == runs[0][1].explain()
        assert callback.coverage.fraction_of_flops("units", "format") == 1.0
    if not options:
        assert_same_bits(runs[0][0], _plain(lambda: _Added(math.nan, how), rows))


class _Empty(nn.Module):
    """Multiplies an empty matrix by memory that was not written, first of all."""

    def __init__(self, garbage: float) -> None:
        super().__init__()
        self.a, self.garbage = nn.Linear(6, 6), garbage

    def forward(self, x: Tensor) -> Tensor:
        empty = self.a(x[:0]) @ torch.full((6, 3), self.garbage)
        nothing = torch.empty(2, 0) @ torch.empty(0, 6)
        return (self.a(x) @ self.a.weight + nothing).square().mean() + empty.sum()


def test_empty_matrices_do_not_affect_units() -> None:
    rows = 1e-2 * randn(12, 6)
    runs = [_trained(lambda v=value: _Empty(v), rows) for value in GARBAGE]
    for run, callback in runs:
        assert_same_bits(run, runs[0][0])
        assert callback.explain() == runs[0][1].explain()
    assert_same_bits(runs[0][0], _plain(lambda: _Empty(math.nan), rows))


@pytest.mark.slow  # Inductor compiles C++
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("options", [{}, {"simulate": "fp8"}], ids=["units", "simulated"])
@pytest.mark.parametrize("name", ["first", "addmm", "per sample"])
def test_compiled_unread_operands(name: str, options: Any) -> None:
    def make(garbage: float = 1.0) -> nn.Module:
        net = {
            "first": _First,
            "addmm": lambda: _Added(garbage, "addmm"),
            "per sample": lambda: _PerSample(_CONVOLUTIONS["conv2d"][0]),
        }[name]()
        net.compile()
        return net  # type: ignore[no-any-return]

    shape = {"first": (2, 8, 8), "addmm": (6,), "per sample": (2, 7, 7)}[name]
    rows = 1e-2 * randn(12, *shape)
    run, callback = _trained(make, rows, **options)
    if name == "addmm":
        filled, other = _trained(lambda: make(math.nan), rows, **options)
        assert_same_bits(filled, run)
        assert other.explain() == callback.explain()
    assert callback.coverage.fraction_of_flops("units", "format") == 1.0
    if name == "first" and not options:
        matmuls = [
            p for graph in GRAPHS.values() for p in graph.matmuls if isinstance(p, CompiledMatmul)
        ]
        of_first = [
            matmul for matmul in matmuls if matmul.matmul_names.path.startswith("net.first")
        ]
        assert (None, 0) in {matmul.sources for matmul in of_first}
        assert all(matmul.sources != (None, 0, 1) for matmul in of_first)
    if not options:
        assert_same_bits(run, _plain(make, rows))
