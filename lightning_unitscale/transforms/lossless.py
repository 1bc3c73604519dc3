"""Lossless unit scaling as a graph pass: the same bits, with tensors stored near RMS 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import fx

from lightning_unitscale.graph.nodes import is_float_tensor, requires_grad, tensor_name
from lightning_unitscale.graph.passes import GraphPass, Region, Stage, StepGraph
from lightning_unitscale.graph.products import product_of, unreachable_products
from lightning_unitscale.transforms.calibration import Calibrator, Measured
from lightning_unitscale.transforms.gauge import (
    MAX_LOG2_GAMMA,
    MAX_LOG2_SIGMA,
    FactorTable,
    Gauge,
    GaugePair,
    nearest_exponent,
)
from lightning_unitscale.transforms.product_gauge import operands_to_measure, plan_product
from lightning_unitscale.transforms.stored_gauge import kept_argument, plan_stored
from lightning_unitscale.transforms.units import FactorNodes, NodePlan, Units, apply_plan

Depth = Literal["products", "all"]


class LosslessUnitScale(GraphPass):
    """Stores tensors in units of a :class:`Gauge` without changing what a step computes.

    Args:
        depth: ``"products"`` gives units to what matrix products read and to the gradients that
            arrive at them; ``"all"`` to every tensor of the step that carries a gradient.

    Attributes:
        gauge: The units in force; replace them by :meth:`set_gauge`.
    """

    name = "lossless unit scale"
    stage = Stage.REWRITE

    def __init__(self, depth: Depth = "products") -> None:
        if depth not in get_args(Depth):
            raise ValueError(
                f"depth={depth!r}: unknown depth; expected 'products' or 'all'; "
                "pass depth='products' for FP8 products, depth='all' for FP16."
            )
        self.depth = depth
        self.out_of_place = depth == "all"
        self.gauge = Gauge()
        self._tables: list[tuple[FactorTable, torch.device]] = []

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        plans = [plan for region in graph.regions() for plan in self._plans(region)]
        table = FactorTable()
        for plan in plans:
            for factor in plan.factors():
                table.row(factor)
        if not len(table):
            return ("no matrix product of floating-point tensors",)
        table.set(self.gauge, graph.device)
        self._tables.append((table, graph.device))
        vector = graph.add_state("factors", lambda: table.current, table.current)
        factor_nodes = FactorNodes(vector, table.row)
        num_scales = 0
        for plan in plans:
            apply_plan(plan, factor_nodes)
            num_scales += sum(edit.is_needed for edit in plan.edits)
        return tuple(self._changes(graph, plans, num_scales))

    def set_gauge(self, gauge: Gauge) -> None:
        """Put a new gauge into force from the next call on; nothing is captured or compiled anew."""
        self.gauge = gauge
        for table, device in self._tables:
            table.set(gauge, device)

    def calibrator(self) -> Calibrator:
        """A fresh calibrator for what this pass needs to know."""
        if self.depth == "products":
            return Calibrator(operands_to_measure, _gradient_of_product, lambda _: None)
        return Calibrator(operands_to_measure, _tensor_with_units, _tensor_with_units)

    def gauge_from(self, forward: Measured, backward: Measured) -> Gauge:
        """The powers of two nearest to measured RMS values."""
        names = dict.fromkeys((*forward, *backward))
        return Gauge(
            {
                name: GaugePair(
                    nearest_exponent(forward.get(name, 0.0), MAX_LOG2_SIGMA),
                    nearest_exponent(backward.get(name, 0.0), MAX_LOG2_GAMMA),
                )
                for name in names
            }
        )

    def __deepcopy__(self, memo: dict[int, object]) -> LosslessUnitScale:
        new = LosslessUnitScale(self.depth)
        memo[id(self)] = new
        new.gauge = self.gauge
        return new

    def _plans(self, region: Region) -> Iterator[NodePlan]:
        # Tensors that cross a checkpoint's boundary stay in true units, so only products inside.
        if self.depth == "all" and region.parent is None:
            yield from plan_stored(region, self.gauge)
            return
        units = Units()
        for node in list(region.graph.nodes):
            product = product_of(node)
            if product is not None:
                yield plan_product(product, region, self.gauge, units)

    def _changes(
        self, graph: StepGraph, plans: list[NodePlan], num_scales: int
    ) -> Iterator[str]:
        products = sum(product_of(plan.node) is not None for plan in plans)
        yield f"{products} products on operands in their own units, {num_scales} scales inserted"
        left = [one for region in graph.regions() for one in unreachable_products(region.graph)]
        if left:
            names = ", ".join(tensor_name(one) for one in left[:4])
            yield f"{len(left)} products left as they are: {names}"


def _gradient_of_product(node: fx.Node) -> str | None:
    return tensor_name(node) if product_of(node) is not None else None


def _tensor_with_units(node: fx.Node) -> str | None:
    if node.op not in {"call_function", "call_method"} or not is_float_tensor(node):
        return None
    if not requires_grad(node) or kept_argument(node) is not None:
        return None
    return tensor_name(node)
