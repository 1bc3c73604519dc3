"""Which statistics rows of a step follow from others, so that no element is read twice.

Two things are common. A tensor is cut into parts (queries, keys and values of one product): its row
is the sum of theirs, and so is its gradient's where nobody else reads it. And the gradient of a sum
is the gradient of each summand that nobody else reads: residual branches above all.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from lightning_unitscale.exponents import FloatArray
from lightning_unitscale.graph.aliasing import same_tensor
from lightning_unitscale.graph.nodes import example_tensor, is_whole_view, op_name
from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.transforms.units import Held

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
        # What a row is made of may be made of others itself, which come later.
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
        mutated: Nodes whose memory the graph writes into: a part may be seen after the whole.
    """
    position = {node: index for index, node in enumerate(nodes)}
    parts: dict[int, tuple[int, ...]] = {}
    twins: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.op == "placeholder" or node in mutated:
            continue  # an input may have readers outside of the graph
        found = tuple(position.get(part, -1) for part in _parts(node, position))
        if found and all(
            one >= 0 and held[one] == held[index] and differentiable[one] == differentiable[index]
            for one in found
        ):
            parts[index] = found
            continue
        total = _sum_of(node, position)
        if total is None or not (differentiable[index] and differentiable[position[total]]):
            continue
        ours, theirs = held[index], held[position[total]]
        if (ours.gamma, ours.in_graph) == (theirs.gamma, theirs.in_graph):
            twins[index] = position[total]
    return SharedRows(parts, twins)


def _parts(node: fx.Node, probed: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The parts into which whatever reads the node's tensor cuts it, each element in one part."""
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
    examples = [example_tensor(one) for one in (*total.args, total)]
    # Twice the same summand has twice the gradient; one that is broadcast has a sum of it.
    if total.args[0] is total.args[1] or any(one is None for one in examples):
        return None
    # As text: a size that changes from batch to batch is a symbol, which cannot be hashed.
    kinds = {(str(one.shape), one.dtype) for one in examples if one is not None}
    return total if len(kinds) == 1 else None


def _seen_as(node: fx.Node, probed: dict[fx.Node, int]) -> fx.Node:
    """The node that hands its tensor on, through views of all of it that nobody else reads."""
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
