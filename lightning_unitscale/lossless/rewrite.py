"""Lossless unit scaling as a graph pass: the same bits, with tensors stored near RMS 1."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from lightning_unitscale.functional.scale import takes_true_derivatives
from lightning_unitscale.graph.matmuls import product_of, unreachable_products
from lightning_unitscale.graph.nodes import ELSEWHERE, is_whole_view, tensor_name
from lightning_unitscale.graph.passes import GraphPass, Phase, Region, StepGraph
from lightning_unitscale.graph.regions import Places
from lightning_unitscale.lossless.calibrate import (
    Calibrator,
    DriftProbes,
    Measured,
    usable_sizes,
)
from lightning_unitscale.lossless.gauge import (
    ONE,
    Factor,
    Gauge,
    GaugePair,
    gamma,
    sigma,
)
from lightning_unitscale.lossless.plan import (
    operand_name,
    plan_region,
)
from lightning_unitscale.lossless.units import (
    EDIT,
    FACTOR,
    GAUGE,
    HELD,
    FactorNodes,
    Held,
    apply_plan,
    is_scale,
    left_as_they_are,
)

_TRUE = Held()


class LosslessUnitScale(GraphPass):
    """Stores tensors in units of a :class:`Gauge` without changing what a step computes.

    Attributes:
        gauge: The current units, which only the methods of this class replace.
        missing: Names of tensors that were zero, empty or not finite whenever they were measured:
            they have no units of their own yet.
    """

    name = "lossless unit scale"
    phase = Phase.REWRITE
    needs_graph = False

    def __init__(
        self,
        *,
        measures_drift: bool = True,
        measures_range: bool = False,
    ) -> None:
        self.observes = measures_drift
        self.measures_range = measures_range
        self.gauge = Gauge()
        self.missing: frozenset[str] = frozenset()
        self.drift = DriftProbes(measures_range=measures_range)

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        regions = list(graph.regions())
        unreachable = [node for region in regions for node in unreachable_products(region.graph)]
        plans = [plan for region in regions for plan in plan_region(region, self.gauge)]
        factors = [factor for plan in plans for factor in plan.factors()]
        if not factors:
            return "no matrix product of floating-point tensors", *left_as_they_are(unreachable)
        factor_nodes = FactorNodes(graph, "factors", factors, lambda: self.gauge)
        held = held_units(graph)
        applied = [scale for plan in plans for scale in apply_plan(plan, factor_nodes)]
        graph.notes[GAUGE] = lambda: self.gauge
        graph.notes[HELD] = held
        if graph.observed and self.observes:
            self.drift.insert(graph, applied)
        return (
            f"{len(plans)} products on operands in their own units, {len(applied)} scales inserted",
            *left_as_they_are(unreachable),
        )

    def observe_part(self, graph: StepGraph) -> None:
        """Measure the drift at the scales of a part of a graph that was rewritten whole."""
        if self.observes:
            applied = [
                (node.meta[EDIT], node)
                for node in graph.graph.nodes
                if EDIT in node.meta and ELSEWHERE not in node.meta and is_scale(node)
            ]
            self.drift.insert(graph, applied)

    def report(self) -> str:
        """What ``explain()`` says of the pass, beside what it did to each graph."""
        if not takes_true_derivatives():
            return ""
        return (
            "A backward pass was recorded (create_graph=True): since then gradients are in the "
            "units of their values, so that second derivatives are those of the plain step."
        )

    def set_gauge(self, pairs: Mapping[str, GaugePair]) -> None:
        """Set the units of tensors from the next call on; nothing is recaptured or recompiled."""
        self.gauge = Gauge(pairs)

    def after_step(self, module: nn.Module, result: Any) -> None:
        """Called after each call that returned ``result``."""
        if not self.observes:
            # Graphs that are observed for another pass may have probes from before.
            self.drift.clear()

    def calibrator(self) -> Calibrator:
        """A fresh calibrator for what this pass needs to know."""
        return Calibrator(measures_range=self.measures_range)

    def update_gauge(self, measured: Measured) -> None:
        """Set the units of all that was measured; the others stay as they are.

        What is zero, empty or not finite gets none, and is ``missing`` if it had none before.
        """
        forward, backward = usable_sizes(measured.forward), usable_sizes(measured.backward)
        unusable = {*measured.forward, *measured.backward} - {*forward, *backward}
        self.missing = (self.missing | (unusable - self.gauge.keys())) - {*forward, *backward}
        self.set_gauge(self.gauge.updated(Gauge.of_rms(forward, backward)))

    def __deepcopy__(self, memo: dict[int, object]) -> LosslessUnitScale:
        new = copy.copy(self)
        memo[id(self)] = new
        new.drift = DriftProbes(measures_range=self.measures_range)
        return new


def held_units(graph: StepGraph) -> dict[str, Held]:
    """Return in which units matmuls read each tensor, by its name, before a graph is rewritten."""
    places = Places(graph)
    held: dict[str, Held] = {}
    for region in places.regions:
        _add_held_for_products(held, region, places)
    return held


def _add_held_for_products(held: dict[str, Held], region: Region, places: Places) -> None:
    """Units in which the products of a region read their operands and meet their gradients."""
    for node in region.graph.nodes:
        product = product_of(node)
        if product is None:
            continue
        for operand in product.operands:
            unit = sigma(operand_name(product, operand))
            for read, factor in _read_through(operand.node):
                name = tensor_name(places.origin(region, read))
                # A tensor that several products read is shown in the units of the first.
                if held.get(name, _TRUE).sigma == ONE:
                    held[name] = replace(held.get(name, _TRUE), sigma=unit / factor)
        arriving = gamma(tensor_name(node))
        for result in (node, *(reader for reader in node.users if FACTOR in reader.meta)):
            name = tensor_name(result)
            stored = arriving if result is node else arriving / _constant(result)
            held[name] = replace(held.get(name, _TRUE), gamma=stored)


def _read_through(node: fx.Node) -> Iterator[tuple[fx.Node, Factor]]:
    """Yield an operand and what it is made of, each with the factor between it and the operand.

    A view, or a rule's factor, stands between the tensor that is shown and what the matmul reads.
    """
    factor = ONE
    yield node, factor
    while FACTOR in node.meta or is_whole_view(node):
        factor = factor * _constant(node)
        node = node.all_input_nodes[0]
        yield node, factor


def _constant(node: fx.Node) -> Factor:
    """The power of two nearest to the factor that a rule multiplies by here."""
    return Factor(constant=round(math.log2(abs(node.meta.get(FACTOR, 1.0)))))
