"""Leave out statistics rows that follow from others, and compute several rows in one call.

Two cases are common. A tensor is cut into parts (queries, keys and values of one product): its row
is the sum of theirs, and so is its gradient's row if there is no other reader. And the gradient of
a sum is the gradient of each summand that has no other reader: residual branches above all.

A call from the code that Inductor generates costs as much as the statistics of some ten thousand
elements, and several times that without a kernel, when Python is called. These rows share a call,
since that keeps no tensor alive for longer: those of small inputs and of small outputs, wherever
they are; those of larger tensors close together, which are still in the caches; and those that
follow each other, such as the parts of one tensor, which are then read side by side.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx

from lightning_unitscale.graph.aliasing import same_tensor
from lightning_unitscale.graph.nodes import example_tensor, is_whole_view, op_name
from lightning_unitscale.lossless.units import Held
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import ROW_OPERATOR, ROWS_OPERATOR
from lightning_unitscale.scales.tensor_statistics import FloatArray

_SUMS = frozenset({operator.add, torch.add, "add"})
_CUTS = frozenset({"unbind", "split", "chunk", "tensor_split", "split_with_sizes"})


@dataclass(frozen=True)
class SharedRows:
    """Rows that are made of others, by position; what they are made of comes later in the graph.

    Attributes:
        parts: Rows of both directions that are the rows of these parts taken together.
        twins: Rows of gradients that are the row of another gradient.
    """

    parts: dict[int, tuple[int, ...]]
    twins: dict[int, int]

    def fill(self, forward: FloatArray, backward: FloatArray, layout: RowLayout) -> None:
        """Write the rows that were left out, in place.

        Args:
            forward: Shape ``(rows, layout.num_columns)``.
            backward: The same shape; a row of zeros where no gradient has arrived.
            layout: The columns.
        """
        # The parts of a row may themselves follow from rows that come later.
        for index in sorted({*self.parts, *self.twins}, reverse=True):
            if index in self.twins:
                backward[index] = backward[self.twins[index]]
                continue
            parts = list(self.parts[index])
            forward[index] = _together(forward[parts], layout)
            rows = backward[parts]
            arrived = rows[:, :1] > 0
            if arrived.any():
                if not arrived.all():
                    # Autograd fills up with zeros what has no gradient.
                    rows = np.where(arrived, rows, _rows_of_zeros(forward[parts], layout))
                backward[index] = _together(rows, layout)


def find_shared_rows(
    nodes: Sequence[fx.Node],
    held: Sequence[Held],
    differentiable: Sequence[bool],
    mutated: Collection[fx.Node],
) -> SharedRows:
    """Rows of probed tensors that follow from rows of others.

    Args:
        nodes: Nodes of the probed tensors, in graph order.
        held: In which units each is stored; only tensors in the same units share a row.
        differentiable: Whether each is probed in both directions.
        mutated: Nodes whose memory the graph writes into: a part may be measured after a write
            that comes after the whole was measured.
    """
    position = {node: index for index, node in enumerate(nodes)}
    parts: dict[int, tuple[int, ...]] = {}
    twins: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "placeholder" or node in mutated:
            continue  # an input may have readers outside of the graph
        positions = tuple(position.get(part, -1) for part in _parts(node, position))
        if positions and all(
            part >= 0
            and held[part] == held[index]
            and differentiable[part] == differentiable[index]
            for part in positions
        ):
            parts[index] = positions
            continue
        total = _sum_of(node, position)
        if total is None or not (differentiable[index] and differentiable[position[total]]):
            continue
        ours, theirs = held[index], held[position[total]]
        if (ours.gamma, ours.in_graph) == (theirs.gamma, theirs.in_graph):
            twins[index] = position[total]
    return SharedRows(parts, twins)


def _parts(node: fx.Node, probed: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The parts into which the reader of a tensor cuts it; no element is in two of them."""
    cut = _seen_as(node, probed)
    (user, *others) = cut.users or (None,)
    number = None
    if not others and user is not None and op_name(user) in _CUTS and user.args[:1] == (cut,):
        value = user.meta.get("example_value")
        cut, number = user, len(value) if isinstance(value, (tuple, list)) else None
    elif (example := example_tensor(cut)) is not None and example.dim():
        number = example.shape[0]
    places = []
    for part in cut.users:
        index = part.args[1] if part.target is operator.getitem else None
        if not isinstance(index, int) or isinstance(index, bool) or not isinstance(number, int):
            return ()
        places.append(index % number if number else index)
    return tuple(cut.users) if number and sorted(places) == list(range(number)) else ()


def _sum_of(node: fx.Node, probed: dict[fx.Node, int]) -> fx.Node | None:
    """The probed sum of which the node's tensor is a summand, and that alone."""
    summand = _seen_as(node, probed)
    if len(summand.users) != 1:
        return None
    (total,) = summand.users
    if total not in probed or total.target not in _SUMS or total.kwargs or len(total.args) != 2:
        return None
    examples = [example_tensor(operand) for operand in (*total.args, total)]
    # Twice the same summand has twice the gradient; one that is broadcast has a sum of it.
    if total.args[0] is total.args[1] or any(example is None for example in examples):
        return None
    # As text: a size that changes from batch to batch is a symbol, which cannot be hashed.
    kinds = {(str(example.shape), example.dtype) for example in examples if example is not None}
    return total if len(kinds) == 1 else None


def _seen_as(node: fx.Node, probed: dict[fx.Node, int]) -> fx.Node:
    """The last of a chain of views of the whole tensor, each the only reader of the one before."""
    example = example_tensor(node)
    while len(node.users) == 1:
        (user,) = node.users
        seen = example_tensor(user)
        if user in probed or seen is None or example is None or user.args[:1] != (node,):
            break
        if not (is_whole_view(user) or same_tensor(user) is node):
            break
        if seen.dtype != example.dtype or seen.numel() != example.numel():
            break
        if seen.requires_grad != example.requires_grad:
            break
        node = user
    return node


def _together(rows: FloatArray, layout: RowLayout) -> FloatArray:
    """As ``merge_rows``, of any number of rows, none of which is absent."""
    row: FloatArray = rows.sum(axis=0)
    largest, smallest = layout.index("abs_max"), layout.index("abs_min")
    row[largest] = rows[:, largest].max()
    row[smallest] = rows[:, smallest].min()
    return row


def _rows_of_zeros(rows: FloatArray, layout: RowLayout) -> FloatArray:
    """Rows of tensors of zeros that are as large as those of ``rows``."""
    zeros: FloatArray = np.zeros_like(rows)
    for column in ("numel", "zeros"):
        zeros[:, layout.index(column)] = rows[:, layout.index("numel")]
    zeros[:, layout.index("abs_min")] = np.inf
    if layout.histogram:
        zeros[:, layout.index("sampled")] = rows[:, layout.index("sampled")]
    return zeros


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
            read = [source for source in node.all_input_nodes if source.target is ROW_OPERATOR]
            if read or _writes(node):
                for group in (run, *small.values()):
                    if _writes(node) or any(row in group for row in read):
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
    """Whether the node computes nothing: it is a view, or takes one of several results."""
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _call_together(graph: fx.Graph, group: list[fx.Node]) -> None:
    """Make one call where the last of the calls is."""
    tensors, key = [node.args[0] for node in group], group[0].args[2]
    # The inputs of a call are the tensor and, if there is one, the factor.
    factor_in = [node.all_input_nodes[1:] for node in group]
    factors = list(dict.fromkeys(factor for of_call in factor_in for factor in of_call))
    factor_of = [factors.index(of_call[0]) if of_call else -1 for of_call in factor_in]
    example = group[0].meta["val"]
    with graph.inserting_before(group[-1]):
        rows = graph.call_function(ROWS_OPERATOR, (tensors, factors, factor_of, key))
        rows.meta["val"] = example.new_empty((len(group), *example.shape))
        for index, node in enumerate(group):
            row = graph.call_function(torch.ops.aten.select.int, (rows, 0, index))
            row.meta.update(node.meta)
            row.meta["val"] = rows.meta["val"][index]
            node.replace_all_uses_with(row)
    for node in group:
        graph.erase_node(node)
