"""Rows of a compiled graph, made by one call for several tensors."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_unitscale.scales import statistics
from lightning_unitscale.scales.layout import MOMENTS, RowLayout
from lightning_unitscale.scales.statistics import (
    JOINT_ROWS_OPERATOR,
    ROW_OPERATOR,
    join_rows,
    statistics_row,
)
from lightning_unitscale.scales.torch_rows import functional_row
from tests.scales.test_statistics import assert_row

LIGHT = RowLayout().measured


def _traced(function, *inputs, mode="fake"):
    return make_fx(function, tracing_mode=mode)(*inputs)


def _num_calls(graph_module, operator):
    return len(graph_module.graph.find_nodes(op="call_function", target=operator))


def _step(first, second):
    """Five tensors of very different size; one has a NaN, and one repeats its elements."""
    tensors = (first, first @ second, second.exp(), first / 0 * 0, first[:1].expand(40, -1))
    return torch.stack([statistics_row(tensor, LIGHT) for tensor in tensors]), tensors


def test_joint_rows_match_single_rows():
    inputs = torch.randn(70, 300), torch.randn(300, 40)
    graph_module = _traced(_step, *inputs)
    join_rows(graph_module)
    assert _num_calls(graph_module, JOINT_ROWS_OPERATOR) == 1
    assert not _num_calls(graph_module, ROW_OPERATOR)
    rows, tensors = graph_module(*inputs)
    for row, tensor in zip(rows, tensors, strict=True):
        assert_row(row, functional_row(tensor, LIGHT), LIGHT)


def test_tensor_is_read_before_in_place_write():
    def step(first, second):
        rows = [statistics_row(tensor, LIGHT) for tensor in (first, second)]
        first.copy_(second * 2)
        rows += [statistics_row(tensor, LIGHT) for tensor in (first, second)]
        return torch.stack(rows)

    inputs = torch.randn(9), torch.randn(9)
    graph_module = _traced(step, *inputs)
    join_rows(graph_module)
    assert _num_calls(graph_module, JOINT_ROWS_OPERATOR) == 2
    expected = step(*(tensor.clone() for tensor in inputs))
    assert torch.equal(graph_module(*inputs), expected)


def test_row_is_made_before_its_reader():
    def step(tensor):
        first, second = statistics_row(tensor, LIGHT), statistics_row(tensor + 1, LIGHT)
        following = tensor * (first + second)[0].float()
        return first, second, following, statistics_row(following, LIGHT)

    tensor = torch.randn(50)
    graph_module = _traced(step, tensor)
    join_rows(graph_module)
    assert _num_calls(graph_module, JOINT_ROWS_OPERATOR) == 1
    for found, expected in zip(graph_module(tensor), step(tensor), strict=True):
        assert torch.equal(found, expected)


def test_number_of_joined_rows_is_bounded(monkeypatch):
    inputs = torch.randn(70, 300), torch.randn(300, 40)
    expected, _ = _step(*inputs)
    monkeypatch.setattr(statistics, "_MOST_TENSORS", 2)
    graph_module = _traced(_step, *inputs)
    join_rows(graph_module)
    assert _num_calls(graph_module, JOINT_ROWS_OPERATOR) == 2
    assert _num_calls(graph_module, ROW_OPERATOR) == 1
    rows, _ = graph_module(*inputs)
    torch.testing.assert_close(rows, expected)
    monkeypatch.setattr(statistics, "_MOST_BYTES", 1)
    graph_module = _traced(_step, *inputs)
    join_rows(graph_module)
    assert _num_calls(graph_module, ROW_OPERATOR) == 5


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_unsupported_rows_are_not_joined(mode):
    """Moments, exact counts, and tensors whose size differs from call to call."""
    layouts = MOMENTS, RowLayout(sample_size=None), *([LIGHT] * 2 if mode == "symbolic" else ())

    def step(tensor):
        return [statistics_row(tensor * 2, layout) for layout in layouts]

    graph_module = _traced(step, torch.randn(5, 7), mode=mode)
    join_rows(graph_module)
    assert _num_calls(graph_module, ROW_OPERATOR) == len(layouts)
