"""One call for several statistics rows, in a graph that Inductor is about to compile.

A call into Python costs as much as the statistics of ten thousand elements, more when a large
product has just emptied the caches. Rows that can be taken together without that anything is read
later or kept longer than it would be: those of small inputs, those of small outputs, and those that
follow each other, as of the parts of one tensor, which are then read side by side.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

# Importing the file defines the operators.
from lightning_unitscale.statistics import ROW_OPERATOR, ROWS_OPERATOR

_SMALL = 65_536  # elements; what is larger is read when it has just been made


def group_rows(graph: fx.Graph) -> None:
    """Replace calls of ``statistics_row`` by fewer calls of ``statistics_rows``, in place.

    Args:
        graph: A forward or backward graph of functional operators, with example values.
    """
    for group in list(_groups(graph)):
        if len(group) > 1:
            _call_together(graph, group)


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Rows that may be taken together, each in one group at most."""
    outputs = set(graph.output_node().all_input_nodes)
    small: dict[tuple[object, ...], list[fx.Node]] = {}
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is ROW_OPERATOR and node.args[1] is None:
            tensor, _, key = node.args
            is_input = tensor.op == "placeholder"
            if (is_input or tensor in outputs) and _is_small(tensor):
                small.setdefault((is_input, key), []).append(node)
                continue
            if run and run[0].args[2] != key:
                yield run
                run = []
            run.append(node)
        elif node.op != "placeholder" and not _only_looks(node):
            yield run
            run = []
    yield run
    yield from small.values()


def _is_small(node: fx.Node) -> bool:
    example = node.meta.get("val")
    numel = example.numel() if isinstance(example, Tensor) else None
    return isinstance(numel, int) and numel <= _SMALL


def _only_looks(node: fx.Node) -> bool:
    """Whether the node computes nothing: a view, or one of several results."""
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _call_together(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Make one call where the last of the calls is."""
    tensors, key = [node.args[0] for node in group], group[0].args[2]
    example = group[0].meta["val"]
    with graph.inserting_before(group[-1]):
        rows = graph.call_function(ROWS_OPERATOR, (tensors, key))
        rows.meta["val"] = example.new_empty((len(group), *example.shape))
        for place, node in enumerate(group):
            row = graph.call_function(torch.ops.aten.select.int, (rows, 0, place))
            row.meta.update(node.meta)
            row.meta["val"] = rows.meta["val"][place]
            node.replace_all_uses_with(row)
    for node in group:
        graph.erase_node(node)
