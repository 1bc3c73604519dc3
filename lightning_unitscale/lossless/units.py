"""Plan changes of units at the arguments and the result of a node, and apply them.

Every tensor of a graph has units: what its stored value must be multiplied by to get the value that
the model means, forward and backward. A node's edits convert between the units of its neighbours.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_unitscale.dynamo.graphs import fake_mode_of
from lightning_unitscale.functional.scale import change_gradient_units, change_units
from lightning_unitscale.graph.grad_order import first_to_last
from lightning_unitscale.graph.nodes import (
    INTERNAL,
    MODULE,
    NAME,
    Path,
    argument_at,
    map_arguments,
    replace_other_uses,
    requires_grad,
)
from lightning_unitscale.graph.passes import Region, StepGraph
from lightning_unitscale.graph.regions import meant_name
from lightning_unitscale.lossless.gauge import (
    ONE,
    Factor,
    FactorTable,
    Gauge,
)

FactorNode = Callable[[Region, Factor], fx.Node]


# Keys of ``StepGraph.notes`` by which the rewrite tells later passes about units.
GAUGE = "gauge"
HELD = "held"
# Key of a node's meta: the number by which a rule multiplies the node's first input there.
FACTOR = "rule_factor"
# Key of a scale's meta: the ``Edit`` that it was made for.
EDIT = "edit"


def left_as_they_are(products: Sequence[fx.Node]) -> tuple[str, ...]:
    """What a pass reports of products that it could not rewrite; nothing if there are none."""
    if not products:
        return ()
    names = ", ".join(meant_name(node) for node in products[:4])
    return (f"{len(products)} products left as they are: {names}",)


@dataclass(frozen=True)
class Held:
    """How a tensor is stored at the products that read it.

    Attributes:
        sigma: Forward unit of the stored value.
        gamma: Unit of the stored gradient.
    """

    sigma: Factor = ONE
    gamma: Factor = ONE


@dataclass(frozen=True)
class Edit:
    """A change of units at one argument or at the result of a node.

    Attributes:
        path: Which argument; ``None`` for the result.
        source: The node whose value is scaled.
        name: Name of the scaled tensor.
        forward: Factor on the value.
        backward: Factor on the gradient.
        forward_name: Name in the gauge that holds the unit of the scaled value, if it has one.
        forward_unit: That unit.
        backward_name: Name in the gauge that holds the unit of the gradient at the unscaled value.
    """

    path: Path | None
    source: fx.Node
    name: str
    forward: Factor
    backward: Factor
    forward_name: str | None = None
    forward_unit: Factor = ONE
    backward_name: str | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the edit changes anything under any gauge."""
        return self.forward != ONE or self.backward != ONE


@dataclass(frozen=True)
class NodePlan:
    """All edits around one node.

    Attributes:
        node: The node.
        region: The graph it stands in.
        edits: Changes of units at its arguments and its result.
        kwargs: Keyword arguments to set (a fused attention's temperature).
    """

    node: fx.Node
    region: Region
    edits: tuple[Edit, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def factors(self) -> Iterator[Factor]:
        """Every factor that the edits need."""
        for edit in self.edits:
            if edit.forward != ONE:
                yield edit.forward
            if edit.is_needed:
                yield edit.backward


def apply_plan(plan: NodePlan, factor_node: FactorNode) -> list[tuple[Edit, fx.Node]]:
    """Insert the scales of a plan."""
    applied = []
    graph, node = plan.region.graph, plan.node
    replacements: dict[tuple[Any, ...], fx.Node] = {}
    for edit in _in_order(plan):
        with graph.inserting_before(node) if edit.path else graph.inserting_after(node):
            # An earlier plan may have put the source's result into units of its own.
            source = argument_at(node, edit.path) if edit.path else node
            backward = factor_node(plan.region, edit.backward)
            if edit.forward == ONE:
                scaled = graph.call_function(change_gradient_units, (source, backward))
            else:
                forward = factor_node(plan.region, edit.forward)
                scaled = graph.call_function(change_units, (source, forward, backward))
        scaled.meta["example_value"] = edit.source.meta["example_value"]
        scaled.meta[NAME] = edit.name
        scaled.meta[EDIT] = edit
        scaled.meta[MODULE] = node.meta.get(MODULE, "")
        if edit.path is None:
            if INTERNAL in node.meta:
                scaled.meta[INTERNAL] = True  # not shown to the user, like what it scales
            replace_other_uses(node, scaled)
            node.meta[NAME] = f"{edit.name}:stored"
            node.meta[INTERNAL] = True
        else:
            replacements[edit.path] = scaled
            scaled.meta[INTERNAL] = True
        applied.append((edit, scaled))
    map_arguments(node, replacements)
    if plan.kwargs:
        node.kwargs = {**node.kwargs, **dict(plan.kwargs)}
    return applied


def _in_order(plan: NodePlan) -> list[Edit]:
    """The edits that are needed, in an order in which gradients of one tensor keep theirs.

    Of several scales of a tensor autograd runs the one that was made last first.
    """
    edits = [edit for edit in plan.edits if edit.is_needed]
    at_place: dict[fx.Node, dict[Path, Edit]] = {}
    for edit in edits:
        if edit.path is not None and requires_grad(edit.source):
            at_place.setdefault(edit.source, {})[edit.path] = edit
    for edits_of in at_place.values():
        if len(edits_of) > 1:
            ordered = [edits_of[path] for path in reversed(first_to_last(plan.node, [*edits_of]))]
            indices = [index for index, edit in enumerate(edits) if edit in edits_of.values()]
            for index, edit in zip(indices, ordered, strict=True):
                edits[index] = edit
    return edits


def is_scale(node: fx.Node) -> bool:
    """Whether the node is a change of units by itself, not part of another operation."""
    return node.target in (change_units, change_gradient_units)


class FactorNodes:
    """Gives a graph factors of the gauge in force, and hands them out as 0-d tensors."""

    def __init__(
        self, graph: StepGraph, name: str, factors: Iterable[Factor], gauge: Callable[[], Gauge]
    ) -> None:
        table = FactorTable(graph.device)
        for factor in factors:
            table.row(factor)
        self._vector = graph.add_state(name, lambda: table.tensor(gauge()), table.tensor(gauge()))
        self._row = table.row
        self._unbound: fx.Node | None = None
        self._example: Any = None
        self._items: dict[int, fx.Node] = {}

    def __call__(self, region: Region, factor: Factor) -> fx.Node:
        """The 0-d tensor of ``factor`` in ``region``.

        A checkpoint gets each as an argument. Inductor can neither recompute an ``unbind`` in one
        nor save its result, which is a tuple.
        """
        row = self._row(factor)
        if row not in self._items:
            self._items[row] = self._item(row)
        return region.thread(self._items[row], self._example)

    def _item(self, row: int) -> fx.Node:
        graph = self._vector.graph
        if self._unbound is None:
            *_, last = graph.find_nodes(op="placeholder")
            with graph.inserting_after(last):
                self._unbound = graph.call_function(torch.unbind, (self._vector,))
            with fake_mode_of(graph):
                self._example = self._vector.meta["example_value"][0]
        with graph.inserting_after(self._unbound):
            return graph.call_function(operator.getitem, (self._unbound, row))
