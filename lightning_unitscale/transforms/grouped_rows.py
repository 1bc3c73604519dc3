"""One call for several statistics rows, in a graph that Inductor is about to compile.

A call from the code that Inductor writes costs as much as the statistics of some ten thousand
elements, and several times that where there is no kernel and Python is called. Rows that can be
taken together without that anything is kept longer than it would be: those of small inputs and
those of small outputs, wherever they are; those of larger ones that are near each other, so that
they are still in the caches; and those that follow each other, as of the parts of one tensor, which
are then read side by side.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

# Importing the file defines the operators.
from lightning_unitscale.statistics import ROW_OPERATOR, ROWS_OPERATOR

_SMALL = 65_536  # elements of an input or an output that may wait for the others
_WAITING = 1_048_576  # elements that wait in a call while others are computed


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
    waiting, stays, computed = 0.0, True, False
    for node in graph.nodes:
        if node.target is ROW_OPERATOR:
            tensor, _, key = node.args
            is_input, numel = tensor.op == "placeholder", _numel(tensor)
            has_owner = is_input or tensor in outputs
            if has_owner and numel <= _SMALL:
                small.setdefault((is_input, key), []).append(node)
                continue
            may_wait = not computed or (stays and waiting + numel <= _WAITING)
            if run and (run[0].args[2] != key or not may_wait):
                yield run
                run = []
            waiting = waiting + numel if run else numel
            stays = has_owner and (stays or not run)
            run.append(node)
            computed = False
        elif node.op != "placeholder":
            computed |= not _only_looks(node)
            # A call comes before what reads one of its rows, and before what writes into a tensor.
            read = [one for one in node.all_input_nodes if one.target is ROW_OPERATOR]
            if read or _writes(node):
                for group in (run, *small.values()):
                    if _writes(node) or any(one in group for one in read):
                        yield list(group)
                        group.clear()
    yield run
    yield from small.values()


def _numel(node: fx.Node) -> float:
    """Number of elements; infinite if it is not known before the graph runs."""
    example = node.meta.get("val")
    numel = example.numel() if isinstance(example, Tensor) else None
    return numel if isinstance(numel, int) else math.inf


def _writes(node: fx.Node) -> bool:
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _only_looks(node: fx.Node) -> bool:
    """Whether the node computes nothing: a view, or one of several results."""
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _call_together(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Make one call where the last of the calls is."""
    tensors, key = [node.args[0] for node in group], group[0].args[2]
    # The inputs of a call are the tensor and, if there is one, the factor.
    factor_in = [node.all_input_nodes[1:] for node in group]
    factors = list(dict.fromkeys(one for found in factor_in for one in found))
    factor_of = [factors.index(found[0]) if found else -1 for found in factor_in]
    example = group[0].meta["val"]
    with graph.inserting_before(group[-1]):
        rows = graph.call_function(ROWS_OPERATOR, (tensors, factors, factor_of, key))
        rows.meta["val"] = example.new_empty((len(group), *example.shape))
        for place, node in enumerate(group):
            row = graph.call_function(torch.ops.aten.select.int, (rows, 0, place))
            row.meta.update(node.meta)
            row.meta["val"] = rows.meta["val"][place]
            node.replace_all_uses_with(row)
    for node in group:
        graph.erase_node(node)
