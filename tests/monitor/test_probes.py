"""Probes do not interfere with what a step does to its tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import assert_same_bits, run
from tests.monitor.tracked import Call, probed_copy

graph_break = torch._dynamo.graph_break


def _same_tensors(a: nn.Linear, x: Tensor) -> Tensor:
    h = a(x)
    same = F.dropout(h.float().contiguous(), 0.0)
    return (h + same * same.pow(2).mean(-1, keepdim=True).rsqrt() + same.exp()).sum()


def _writes_after_a_break(a: nn.Linear, x: Tensor) -> Tensor:
    h = F.dropout(a(x), 0.0)
    flat = a(x).view(-1)
    graph_break()
    h[0] = 1.0
    flat += 1
    return (h.relu_() * h).sum() + flat.square().sum()


@pytest.mark.parametrize("function", [_same_tensors, _writes_after_a_break])
def test_probes_are_bit_identical(function: Callable[..., Any]) -> None:
    plain = Call(function, nn.Linear(64, 64))
    module, probes = probed_copy(plain)
    x = torch.randn(32, 64)
    assert_same_bits(run(module, x), run(plain, x))
    sent = probes.take(0)
    assert sent is not None and "parts.0.linear" in sent().names


def test_two_backward_passes_through_one_graph() -> None:
    module, probes = probed_copy(Call(lambda a, x: (a(x).sum(), a(2 * x).sum()), nn.Linear(4, 3)))
    first, second = module(torch.randn(5, 4))
    first.backward()
    second.backward()
    sent = probes.take(0)
    assert sent is not None
    snapshot = sent()
    counted = snapshot.backward[:, 0]
    assert (counted[list(map(snapshot.names.index, ("sum", "sum_1")))] == 1).all()


def test_expanded_gradient_of_sum_is_measured() -> None:
    """Expanded, it has as many elements as the tensor: none of them may be read beyond its end."""
    module, probes = probed_copy(Call(lambda a, x: a(x).sum(), nn.Linear(4, 3)))
    module(torch.randn(500, 4)).backward()
    sent = probes.take(0)
    assert sent is not None
    snapshot = sent()
    row = snapshot.backward[snapshot.names.index("parts.0.linear")]
    assert row[:9].tolist() == [1500, 0, 0, 0, 1500, 1500, 1500, 1, 1]


class Table(nn.Module):
    """A layer whose graph reads no input at all."""

    def forward(self) -> Tensor:
        return torch.full((3, 4), 2.0) @ torch.full((4, 3), 0.5)


def test_graph_without_inputs_is_probed() -> None:
    def in_a_loop(layer: nn.Module, table: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            graph_break()  # Dynamo passes over the loop, and captures each layer by itself
            x = x + layer(x) @ table()
        return x.sum()

    module = Call(in_a_loop, nn.Linear(3, 3), Table())
    x = torch.randn(2, 3)
    assert_same_bits(run(probed_copy(module)[0], x), run(module, x))
