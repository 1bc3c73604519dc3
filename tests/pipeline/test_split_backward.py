"""The two halves of a backward pass: same bits, and no additional operation."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.pipeline import SplitPoint, pipeline
from lightning_unitscale.pipeline.split_backward import (
    backward_inputs,
    backward_weights,
    is_separable,
)
from tests.helpers import IS_TORCH_2_11, CalledOperators

# A stage: its outputs from its parameters and from what it received.
Stage = Callable[[dict[str, Tensor], Tensor], Sequence[Tensor]]
WIDTH = 4


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.mT, x.mT @ gradients[0]


def _layers(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    x = F.layer_norm(F.linear(x, p["a"], p["bias"]).tanh(), (WIDTH,), p["gain"])
    return (F.linear(x + F.linear(F.gelu(x), p["b"]), p["c"]),)


def _read_three_times(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    for _ in range(3):
        x = (x @ p["a"]).tanh()
    return (x @ p["b"],)


def _tied_layer(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    for _ in range(3):
        x = F.linear(x, p["a"], p["bias"]).tanh()
    return (F.linear(x, p["b"], p["bias"]),)


def _gru(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    gates = [torch.cat([p["a"], p["b"], p["c"]]), torch.cat([p["c"], p["b"], p["a"]])]
    biases = [p["bias"].repeat(3), p["gain"].repeat(3)]
    state = x.new_zeros(1, x.shape[0], WIDTH)
    flat = [*gates, *biases]
    y, last = torch.gru(x, state, flat, True, 1, 0.0, True, False, True)
    return y, last


def _several_results(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    left, middle, right = (x @ torch.cat([p["a"], p["b"], p["c"]], dim=1)).split(WIDTH, -1)
    variance, mean = torch.var_mean(left, dim=-1, keepdim=True)
    attention = F.scaled_dot_product_attention(left * variance, middle + mean, right)
    values, _ = attention.topk(2, dim=-1)
    return attention * p["gain"], values, right


def _lstm(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    weights = [torch.cat([p[name]] * 4) for name in ("a", "b")]
    biases = [p[name].repeat(4) for name in ("bias", "gain")]
    state = (x.new_zeros(1, x.shape[0], WIDTH), x.new_ones(1, x.shape[0], WIDTH))
    y, *last = torch.lstm(x, state, [*weights, *biases], True, 1, 0.0, True, False, True)
    return y @ p["c"], *last


def _learned_queries(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    query = F.linear(p["a"], p["b"]).expand(2, 1, WIDTH, WIDTH)
    x = F.linear(x, p["c"]).unsqueeze(1)
    return (F.scaled_dot_product_attention(query, x, x),)


def _unused_results(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    first, _, _ = (x @ torch.cat([p["a"], p["b"], p["c"]], dim=1)).chunk(3, -1)
    return (first,)


def _weights_by_themselves(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    return x @ p["a"], p["b"] @ p["bias"], x * p["gain"], p["gain"].square()


def _decay(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    loss = F.linear(F.linear(x, p["a"]).relu(), p["b"], p["bias"]).square().mean()
    return (loss + 0.1 * p["b"].square().sum() + p["c"].abs().mean(),)


def _computed_weights(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    weight = p["a"] / p["a"].norm() * p["gain"]
    x = F.linear(x, weight).tanh()
    return (F.linear(F.linear(x, p["b"].to(torch.bfloat16).float()), weight), weight.sum())


def _autocast(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            x = F.linear(F.linear(x, p["a"]).tanh(), p["b"], p["bias"])
        return (F.linear(x, p["c"]).float(),)


def _written_in_place(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    y = F.linear(x, p["a"]).clone()
    y[..., :2] = F.linear(x, p["b"])[..., 2:]
    y[..., 3] = p["bias"][3]
    y.add_(p["gain"]).relu_()
    return (y @ p["c"],)


def _functions(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    x = _Matmul.apply(x.flatten(0, 1), p["a"])
    return (F.linear(_Matmul.apply(x.tanh(), p["b"] * p["gain"]), p["c"], p["bias"]),)


def _relayed(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
    return x.clone(), x.clone(), F.linear(x, p["a"]).detach(), F.linear(x.detach(), p["b"])


STAGES: dict[str, Stage] = {
    stage.__name__.strip("_"): stage
    for stage in (
        _layers, _read_three_times, _tied_layer, _gru, _lstm, _learned_queries, _several_results,
        _unused_results, _weights_by_themselves, _decay, _computed_weights, _autocast,
        _written_in_place, _functions, _relayed,
    )
}  # fmt: skip


class _Count(CalledOperators):
    """Counts the operators that run."""

    @property
    def matmuls(self) -> int:
        """Matmuls, and fused kernels that contain some."""
        fused = ("attention_for_cpu_backward", "rnn_layer_backward")
        return sum(name in {"mm", "addmm", "bmm"} or name.endswith(fused) for name in self.names)


class _Run:
    """A stage's outputs, ready for their backward pass.

    Args:
        stage: The stage.
        asks: Whether a gradient of what it receives is asked for.
    """

    def __init__(self, stage: Stage, *, asks: bool = True) -> None:
        torch.manual_seed(3)
        names = {"a": 2, "b": 2, "c": 2, "bias": 1, "gain": 1, "unused": 1}
        self.parameters: dict[str, Tensor] = {
            name: nn.Parameter(torch.randn((WIDTH,) * ndim)) for name, ndim in names.items()
        }
        self.received = torch.randn(2, 3, WIDTH).requires_grad_(asks)
        self.outputs = [output.clone() for output in stage(self.parameters, self.received)]
        self.gradients = [torch.randn_like(output) for output in self.outputs]

    def whole(self) -> dict[str, Tensor | None]:
        pairs = zip(self.outputs, self.gradients, strict=True)
        outputs, gradients = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
        torch.autograd.backward(outputs, gradients)
        return self._found(self.received.grad)

    def halves(self) -> dict[str, Tensor | None]:
        (handed,), waiting = backward_inputs(self.outputs, self.gradients, [self.received])
        backward_weights(waiting)
        return self._found(handed)

    def _found(self, handed: Tensor | None) -> dict[str, Tensor | None]:
        return {name: each.grad for name, each in self.parameters.items()} | {"received": handed}


def _assert_same_bits(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, gradient in expected.items():
        other = found[name]
        assert (other is None) == (gradient is None), name
        assert other is None or gradient is None or torch.equal(other, gradient), name


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("name", STAGES)
def test_split_gradients_are_bit_identical(name: str, asks: bool) -> None:
    expected = _Run(STAGES[name], asks=asks).whole()
    assert any(gradient is not None for gradient in expected.values())
    _assert_same_bits(_Run(STAGES[name], asks=asks).halves(), expected)


@pytest.mark.parametrize("name", STAGES)
def test_no_matmul_is_computed_twice(name: str) -> None:
    with _Count() as whole:
        run = _Run(STAGES[name])
        whole.operators.clear()
        run.whole()
    with _Count() as halves:
        run = _Run(STAGES[name])
        halves.operators.clear()
        run.halves()
    assert halves.matmuls == whole.matmuls


def test_matmuls_for_weights_are_in_the_second_half() -> None:
    with _Count() as first:
        run = _Run(_layers)
        first.operators.clear()
        handed, waiting = backward_inputs(run.outputs, run.gradients, [run.received])
    assert handed[0] is not None
    assert [parameter.grad for parameter in run.parameters.values()] == [None] * 6
    with _Count() as second:
        backward_weights(waiting)
    assert first.matmuls == second.matmuls == 3


def test_gradients_accumulate() -> None:
    whole, halves = _Run(_tied_layer), _Run(_tied_layer)
    for run in (whole, halves):
        for parameter in run.parameters.values():
            parameter.grad = torch.ones_like(parameter)
    _assert_same_bits(halves.halves(), whole.whole())


def test_loss_starts_from_gradient_one() -> None:
    run, other = _Run(_decay), _Run(_decay)
    other.gradients = [torch.ones(())]
    (handed,), waiting = backward_inputs(run.outputs, None, [run.received])
    backward_weights(waiting)
    _assert_same_bits(run._found(handed), other.whole())


def test_parameter_hook_runs_once_with_whole_gradient() -> None:
    run, expected = _Run(_tied_layer), _Run(_tied_layer).whole()
    seen: dict[str, list[Tensor]] = {name: [] for name in run.parameters}
    for name, parameter in run.parameters.items():
        parameter.register_hook(seen[name].append)
    run.halves()
    _assert_same_bits({name: each[0] if each else None for name, each in seen.items()} |
                      {"received": expected["received"]}, expected)  # fmt: skip
    assert {len(each) for each in seen.values()} <= {0, 1}


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_are_bit_identical(seed: int) -> None:
    """Any operations on what was received and on parameters, in any order."""

    def stage(p: dict[str, Tensor], x: Tensor) -> Sequence[Tensor]:
        choose = random.Random(seed)
        values = [x, x.tanh(), *(p[name].expand(2, 3, WIDTH) for name in ("bias", "gain"))]
        weights = [p["a"], p["b"], p["c"], p["a"] * p["gain"]]
        for _ in range(12):
            value, other = choose.choice(values), choose.choice(values)
            weight = choose.choice(weights)
            kind = choose.randrange(6)
            if kind == 0:
                values.append(F.linear(value, weight, p["bias"]).tanh())
            elif kind == 1:
                values.append((value @ weight).tanh())
            elif kind == 2:
                values.append(value * other)
            elif kind == 3:
                values += [torch.cat(part, -1) for part in
                           zip(value.chunk(2, -1), other.chunk(2, -1), strict=True)]  # fmt: skip
            elif kind == 4:
                weights.append((weight @ choose.choice(weights)).tanh())
            else:
                values.append(F.layer_norm(value, (WIDTH,), p["gain"], p["bias"]))
        return [choose.choice(values) for _ in range(2)] + [choose.choice(weights), values[-1]]

    _assert_same_bits(_Run(stage).halves(), _Run(stage).whole())


class _Saved:
    """Tensors that autograd saves, tracked until they are freed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_each_half_frees_its_saved_tensors() -> None:
    saved: list[weakref.ref[_Saved]] = []

    def pack(tensor: Tensor) -> _Saved:
        # With its node, a result that is saved for its own backward pass would keep itself alive.
        packed = _Saved(tensor.detach())
        saved.append(weakref.ref(packed))
        return packed

    def alive() -> int:
        gc.collect()
        return sum(each() is not None for each in saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        run = _Run(lambda p, x: [F.linear(x.exp(), p["a"]).tanh().exp().square()])
    assert alive() == len(saved) == 6
    _, waiting = backward_inputs(run.outputs, run.gradients, [run.received])
    # Of the three operations on the weight's result nothing is needed any more.
    assert alive() == 3
    backward_weights(waiting)
    del waiting
    assert alive() == 0


class _Regions(nn.Module):
    """A checkpointed region in the first stage, a hook in the second, neither in the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        x = self.layers[1](x)
        x.register_hook(lambda gradient: 2 * gradient)
        return self.layers[2](x).mean()


def test_checkpoints_and_hooks_are_not_run_twice() -> None:
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in (1, 2)}
    stages = pipeline(_Regions(), (torch.randn(2, WIDTH),), split_spec=spec).stages
    # Torch 2.11 captures a hook as a function, which is run once.
    assert [is_separable(stage.graph) for stage in stages] == [False, IS_TORCH_2_11, True]
