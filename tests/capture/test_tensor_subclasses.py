"""Inputs of tensor subclasses are captured, or refused with a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.breaks import not_followed
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.memory.remat_module import remat
from lightning_unitscale.rules.transform import unit_scale
from tests.helpers import assert_same_bits, captured_copy, same_bits


class Followed(Tensor):
    """Runs the operations of a tensor in its own function."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Broken(Followed):
    """Does so in a way that Dynamo does not capture."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        torch._dynamo.graph_break()
        return super().__torch_function__(func, types, args, kwargs or {})


X = torch.randn(2, 3)


def test_unsupported_tensor_subclasses_are_detected() -> None:
    followed, broken = X.as_subclass(Followed), X.as_subclass(Broken)
    usual = {"a": [X, followed, nn.Parameter(X), torch.tensor(1.0).as_subclass(Followed), None]}
    assert not_followed(usual) is None
    assert not_followed((usual, [broken])) == "Broken"


def test_unsupported_subclass_runs_uncaptured_with_warning() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    tracked = captured_copy(module)
    with pytest.warns(UserWarning, match="called with a Broken, whose operations") as caught:
        for _ in range(2):
            result = tracked(X.as_subclass(Broken))
            assert type(result) is Broken
            assert same_bits(result.as_subclass(Tensor), module(X))
    assert len(caught) == 1
    # Plain tensors are captured afterwards.
    tracked(X)
    steps = steps_of(tracked)
    assert steps is not None and steps.steps["forward"].graphs


def test_unsupported_subclass_is_an_error_under_rules() -> None:
    scaled = unit_scale(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(RuntimeError, match=r"^Sequential\.forward cannot .*: it is called with"):
        scaled(X.as_subclass(Broken))


class Bare(Tensor):
    """A class by its name alone."""


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        return self.layer(x).relu(), x


def with_a_weight_of(kind: type[Tensor]) -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].weight = nn.Parameter(module[0].weight.detach().as_subclass(kind))
    return module


def seen(module: nn.Module, kind: type[Tensor]) -> Any:
    """Classes and values of results, inputs and gradients of two calls of different sizes."""
    values = []
    for size in (4, 6):
        leaf = torch.randn(size, 3, generator=torch.Generator().manual_seed(size))
        leaf = leaf.as_subclass(kind).requires_grad_()
        x = leaf * 1
        results = module(x)
        results = results if isinstance(results, tuple) else (results,)
        module.zero_grad()
        sum(one.square().sum() for one in results).backward()
        values += [*results, x, leaf.grad, *(parameter.grad for parameter in module.parameters())]
    return [type(one) for one in values], [one.detach().as_subclass(Tensor) for one in values]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "make",
    [lambda _: with_a_weight_of(Tensor), lambda _: Writing(), with_a_weight_of],
    ids=["mlp", "writes", "weight"],
)
@pytest.mark.parametrize("kind", [Bare, Followed])
def test_unsupported_subclass_with_memory_plan(
    make: Callable[[type[Tensor]], nn.Module], kind: type[Tensor]
) -> None:
    torch.manual_seed(0)
    module = make(kind)
    planned = remat(module, "min_cut")
    assert_same_bits(seen(planned, kind), seen(module, kind))
    assert planned.remat_reports()  # type: ignore[operator]
