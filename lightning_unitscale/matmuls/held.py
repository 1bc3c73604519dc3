"""Find the units in which matmuls read the tensors of a captured graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.capture.copy_graphs import fake_mode_of
from lightning_unitscale.capture.graph_matmuls import Matmul, Operand, Places, matmul_of
from lightning_unitscale.capture.graph_nodes import is_whole_view, tensor_name
from lightning_unitscale.capture.passes import Region, StepGraph
from lightning_unitscale.matmuls.gauge import ONE, Gauge, Unit
from lightning_unitscale.scales.transfer import numbers_on

# Keys of ``StepGraph.notes``: a function that returns the units in force, and the units of tensors.
GAUGE = "gauge"
HELD = "held"
# Key of a node's meta: the number by which a rule multiplies the node's first input.
FACTOR = "rule_factor"
# Suffix of a matmul's result if the rest of the model reads it times a factor.
UNSCALED = ":unscaled"


@dataclass(frozen=True)
class Held:
    """The units of a tensor at the matmuls that read it."""

    sigma: Unit = ONE  # forward unit of the stored value
    gamma: Unit = ONE  # unit of the stored gradient


_TRUE = Held()


def operand_name(matmul: Matmul, operand: Operand) -> str:
    """Return the name of an operand in the gauge."""
    return f"{_site_name(matmul.node)}:{operand.role}"


def _site_name(node: fx.Node) -> str:
    """Return the name of a matmul in the gauge, which ignores the factors of rules."""
    return tensor_name(node).removesuffix(UNSCALED)


def held_units(graph: StepGraph) -> dict[str, Held]:
    """Return the units in which matmuls read each tensor, by its name."""
    places = Places(graph)
    held: dict[str, Held] = {}
    for region in places.regions:
        _add_held_for_matmuls(held, region, places)
    return held


def _add_held_for_matmuls(held: dict[str, Held], region: Region, places: Places) -> None:
    """Add the units of the operands and gradients of a region's matmuls."""
    for node in region.graph.nodes:
        matmul = matmul_of(node)
        if matmul is None:
            continue
        for operand in matmul.operands:
            unit = Unit(operand_name(matmul, operand))
            for read, log2_factor in _read_through(operand.node):
                name = tensor_name(places.origin(region, read))
                # A tensor that several matmuls read is shown in the units of the first.
                known = held.get(name, _TRUE)
                if known.sigma == ONE:
                    held[name] = replace(known, sigma=replace(unit, log2=-log2_factor))
        arriving = Unit(gradient=_site_name(node))
        for result in (node, *(reader for reader in node.users if FACTOR in reader.meta)):
            name = tensor_name(result)
            stored = arriving if result is node else replace(arriving, log2=-_log2_factor(result))
            held[name] = replace(held.get(name, _TRUE), gamma=stored)


def _read_through(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Yield an operand and its sources, with the exponent of the factor in between."""
    # A view or a rule's factor may separate the displayed tensor from the matmul's operand.
    log2_factor = 0
    yield node, log2_factor
    while FACTOR in node.meta or is_whole_view(node):
        log2_factor += _log2_factor(node)
        node = node.all_input_nodes[0]
        yield node, log2_factor


def _log2_factor(node: fx.Node) -> int:
    """Return the exponent of the power of two nearest to a rule's factor."""
    return round(math.log2(abs(node.meta.get(FACTOR, 1.0))))


class FactorNodes:
    """The 0-d tensors by which a graph divides by units of the gauge in force."""

    def __init__(
        self, graph: StepGraph, name: str, units: Iterable[Unit], gauge: Callable[[], Gauge]
    ) -> None:
        self._rows = {unit: row for row, unit in enumerate(dict.fromkeys(units))}

        def supply() -> Tensor:
            powers = [2.0 ** -unit.exponent(gauge()) for unit in self._rows]
            # An evaluation may come first, and training cannot save inference tensors.
            with torch.inference_mode(False):
                return numbers_on(graph.device, powers, torch.float32)

        self._vector = graph.add_state(name, supply, supply())
        self._unbound: fx.Node | None = None
        self._example: Any = None
        self._items: dict[int, fx.Node] = {}

    def __call__(self, region: Region, unit: Unit) -> fx.Node:
        """Return the 0-d tensor of a unit's inverse in ``region``."""
        # A checkpoint gets each tensor as an argument. Inductor cannot recompute an ``unbind`` in a
        # checkpoint or save its result, a tuple.
        row = self._rows[unit]
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
