"""Find the units in which matmuls read the tensors of a captured graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import is_whole_view, tensor_name
from lightning_unitscale.capture.passes import StepGraph
from lightning_unitscale.capture.regions import Places
from lightning_unitscale.matmuls.gauge import ONE, Unit

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


def held_units(graph: StepGraph) -> dict[str, Held]:
    """Return the units in which matmuls read each tensor, by its name."""
    places = Places(graph)
    held: dict[str, Held] = {}
    for region in places.regions:
        for matmul in filter(None, map(matmul_of, region.graph.nodes)):
            # The gauge's name of a matmul ignores the factors of rules.
            site = tensor_name(matmul.node).removesuffix(UNSCALED)
            for operand in matmul.operands:
                for read, log2_factor in _read_through(operand.node):
                    name = tensor_name(places.origin(region, read))
                    # A tensor that several matmuls read is shown in the units of the first.
                    known = held.get(name, _TRUE)
                    if known.sigma == ONE:
                        unit = Unit(f"{site}:{operand.role}", log2=-log2_factor)
                        held[name] = replace(known, sigma=unit)
            scaled = [user for user in matmul.node.users if FACTOR in user.meta]
            for result in (matmul.node, *scaled):
                name, unit = tensor_name(result), Unit(gradient=site, log2=-_log2_factor(result))
                held[name] = replace(held.get(name, _TRUE), gamma=unit)
    return held


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
