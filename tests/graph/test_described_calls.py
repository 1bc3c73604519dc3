"""Calls that are described alike do the same: all that matters is in a description."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.graph.described_calls import described_call, found_once


def _call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call on tensors, in a graph of its own."""
    graph = fx.Graph()
    inputs: dict[int, fx.Node] = {}

    def placeholder(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(placeholder, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in inputs:
            inputs[id(value)] = graph.placeholder(f"x{len(inputs)}")
            inputs[id(value)].meta["example_value"] = value
        return inputs[id(value)]

    given = tuple(map(placeholder, args)), {name: placeholder(one) for name, one in kwargs.items()}
    create = graph.call_method if isinstance(target, str) else graph.call_function
    return create(target, *given)


def _different_calls(*sizes: int) -> list[fx.Node]:
    x, y = torch.empty(sizes), torch.empty(sizes)
    return [
        *(_call("add", x, y), _call("add_", x, y), _call(torch.add, x, y), _call("add", x, x)),
        *(_call("add", x, y, alpha=2), _call("add", x, y, alpha=2.0), _call("add", x, 1)),
        *(_call("add", x, True), _call("add", x.t(), y), _call("add", x, y.double())),
        *(_call("add", x, y[1:]), _call("add", x.to("meta"), y), _call(operator.add, x, y)),
        *(_call(operator.getitem, x, slice(1)), _call(operator.getitem, x, slice(1, None))),
        *(_call(operator.getitem, x, 1), _call(operator.getitem, x, (None, ...))),
        *(_call("to", x, torch.float16), _call("to", x, torch.float64)),
        *(_call(torch.stack, [x, y]), _call(torch.stack, (x, y)), _call(torch.stack, [x, x])),
        *(_call(F.dropout, x, 0.5), _call(F.dropout, x, 0.5, inplace=True)),
    ]


def test_what_makes_a_difference() -> None:
    calls = [*_different_calls(3, 4), *_different_calls(4, 4)]
    described = [described_call(node) for node in calls]
    assert None not in described
    assert len(set(described)) == len(described)
    assert described == [
        described_call(node) for node in [*_different_calls(3, 4), *_different_calls(4, 4)]
    ]


def test_autocast_makes_a_difference() -> None:
    node = _call("t", torch.empty(2, 2))
    outside = described_call(node)
    with torch.autocast("cpu", torch.bfloat16):
        assert described_call(node) != outside


def test_calls_that_are_more_than_they_say() -> None:
    x = torch.empty(2, 2)
    assert described_call(_call(_different_calls, x)) is None  # not torch's
    assert described_call(_call(torch.vmap, _different_calls, x)) is None  # a function of theirs
    assert described_call(_call("t", x.to_sparse())) is None


def test_a_call_is_looked_at_once() -> None:
    known: dict[Any, int] = {}
    number = iter(range(9))
    calls = [_call("t", torch.empty(2, 2)), _call("t", torch.empty(2, 2)), _call(_call, 1)]
    found = [found_once(known, node, lambda: next(number)) for node in (*calls, *calls)]
    assert found == [0, 0, 1, 0, 0, 2]
    assert list(known.values()) == [0]
