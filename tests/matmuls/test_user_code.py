"""Matmuls in the user's own autograd functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import assert_same_run, both, run, unit_scale_of


class Bodies(Regression):
    """Matmuls of no layer's own, two of them in the body of a checkpoint, or in none."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__(norm=False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def body(h: Tensor) -> Tensor:
            q = (h @ self.first.weight @ self.first.weight.T).view(1, 1, -1, 8)
            return h + F.scaled_dot_product_attention(q, q, q)[0, 0]

        h = self.first(x)
        if self.reentrant is None:
            return self.second(body(h))
        return self.second(checkpoint(body, h, use_reentrant=self.reentrant))


class Amplified(torch.autograd.Function):
    """A matmul whose backward pass writes into its gradient between two matmuls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight.T
        return of_x, x.T @ gradient.mul_(3.0)


class Amplifying(Regression):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return 0.01 * self.second(Amplified.apply(h, self.first.weight @ self.first.weight.T))


class Repeated(Regression):
    """Runs a backward pass twice, and writes into the vector that it starts from in between."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        vector = torch.full_like(h, 1e-3)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(h, self.first.weight, vector, retain_graph=True)
            vector.mul_(1.0 + gradient.norm())
        return self.second(h) * vector.sum()


@pytest.mark.parametrize("model", [Amplifying, Repeated])
def test_gradient_overwritten_between_matmuls(model: type[Regression]) -> None:
    assert_same_run(lambda: model(norm=False), lambda: [UnitScaleCallback()])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputation_has_same_matmul_names(reentrant: bool) -> None:
    def lossless() -> list[Any]:
        return [UnitScaleCallback()]

    _, callbacks = assert_same_run(lambda: Bodies(reentrant), lossless)
    _, expected = assert_same_run(lambda: Bodies(None), lossless)
    gauge, other = unit_scale_of(callbacks).gauge, unit_scale_of(expected).gauge
    assert set(gauge) == set(other)
    for name, pair in gauge.items():
        # Weights differ in their last bits: a checkpoint draws and adds in its own order.
        assert abs(pair.log2_sigma - other.pair(name).log2_sigma) <= 1


class Heard(TorchFunctionMode):
    """Lists the functions of torch that it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Hearing(Regression):
    """A mode of the user's around a layer that TorchScript runs."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.traced = torch.jit.trace(torch.nn.Linear(6, 6), torch.ones(4, 6))
        self.heard: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        with Heard() as heard:
            x = self.traced(x)
        self.heard += heard.names
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning")
def test_user_torch_function_mode_sees_no_scaling() -> None:
    heard = [run(Hearing, callbacks).module.heard for callbacks in ([], [UnitScaleCallback()])]
    assert heard[0] == heard[1]


class OwnAttention(torch.autograd.Function):
    """A matmul with an attention in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        h = gradient.view(1, 1, *gradient.shape)
        return F.scaled_dot_product_attention(h, h, h)[0, 0] @ weight.T, x.T @ gradient


class Attending(Regression):
    def __init__(self) -> None:
        super().__init__(norm=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(OwnAttention.apply(h, self.first.weight @ self.first.weight.T))


def test_custom_backward_with_other_matmuls() -> None:
    assert_same_run(Attending, lambda: [UnitScaleCallback()])


class Written(torch.autograd.Function):
    """A linear layer that writes its matmuls into tensors of its own, or adds them there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, empty: Any, added: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.empty, ctx.added = empty, added
        return torch.mm(x, weight.T, out=empty(len(x), len(weight), dtype=x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = (ctx.empty(*one.shape, dtype=one.dtype) for one in (x, weight))
        torch.bmm(gradient[None], weight[None], out=of_x[None])
        of_weight.fill_(ctx.added)
        for part, rows in zip(x.chunk(2), gradient.T.chunk(2, dim=1), strict=True):
            torch.addmm(of_weight, rows, part, beta=0.5, out=of_weight)
            of_weight.addmm_(rows, part, alpha=0.5)
        return of_x, of_weight, None, None


class Writing(Regression):
    def __init__(self, empty: Any) -> None:
        super().__init__(norm=False)
        self.empty = empty
        self.middle = torch.nn.Parameter(torch.randn(5, 8))
        self.second = torch.nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Written.apply(self.first(x), self.middle, self.empty, 1e-4))


# BLAS adds up in another order where a result lies in memory in another way.
@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "empty",
    [
        torch.empty,
        lambda rows, columns, **of: torch.empty(rows + 1, columns + 3, **of)[:rows, :columns],
        lambda rows, columns, **of: torch.empty(columns, rows, **of).T,
    ],
    ids=["row by row", "with gaps", "column by column"],
)
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_matmuls_with_out_argument_are_scaled(empty: Any, precision: Any) -> None:
    _, callbacks = assert_same_run(lambda: Writing(empty), both, precision=precision)
    coverage = unit_scale_of(callbacks).coverage
    assert coverage.num_in_units == coverage.num_matmuls == 11, coverage.table()


class Adding(Writing):
    """Adds nothing to numbers so small that they vanish in the units of what is added."""

    def forward(self, x: Tensor) -> Tensor:
        h = Written.apply(self.first(x) * 2.0**40, self.middle, self.empty, 2.0**-1020)
        return self.second(h * 2.0**40 * torch.tensor([0.0, 1, 1, 1, 1], dtype=h.dtype))


@pytest.mark.filterwarnings("ignore:.*elements that would be below 2")
def test_out_of_range_addends_are_unscaled() -> None:
    _, callbacks = assert_same_run(
        lambda: Adding(torch.empty), lambda: [UnitScaleCallback()], precision="64-true", max_steps=2
    )
    (reason,) = unit_scale_of(callbacks).coverage.reasons
    assert "elements that would be below" in reason


def test_out_argument_is_not_measured() -> None:
    def empty(rows: int, columns: int, **options: Any) -> Tensor:
        return torch.full((rows + 1, columns), torch.nan, **options)[:rows]

    monitor = ScaleMonitor(every_n_steps=1)
    run(lambda: Writing(empty), [monitor])
    assert monitor.snapshots
    assert monitor.alerts == ()


def test_matmuls_with_out_argument_are_rounded() -> None:
    rounding = UnitScaleCallback(simulate="fp8")
    run(lambda: Writing(torch.empty), [rounding])
    assert rounding.coverage.fraction_of_flops("format") == 1
    real = UnitScaleCallback(precision="fp8")
    with pytest.warns(UserWarning, match="no matmul runs in FP8: .*first .its 6 input features"):
        run(lambda: Writing(torch.empty), [real])
    assert real.coverage.num_matmuls == 11


class Masked(Regression):
    """Attention whose mask, of negative infinities, is added by the matmul itself."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.attention = torch.nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(len(x))
        return super().forward(self.attention(x, x, x, attn_mask=mask)[0])


def test_matmul_with_infinite_mask_is_scaled() -> None:
    _, callbacks = assert_same_run(Masked, lambda: [UnitScaleCallback()])
    coverage = unit_scale_of(callbacks).coverage
    assert coverage.num_in_units == coverage.num_matmuls > 10, coverage.table()
