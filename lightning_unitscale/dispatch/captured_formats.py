"""Count the matmuls of captured steps: those in graphs, by format, and those that no graph has.

A graph knows its own matmuls. What Python multiplies between graphs, after a graph break or where
Dynamo has given up, is seen by the kernels of the dispatcher. These cost a little, so they watch
the first calls of a step, rare ones later, and those that capture something.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.steps import ModuleSteps, steps_of
from lightning_unitscale.dispatch.calls import Call
from lightning_unitscale.dispatch.coverage import Coverage, CoverageCounter
from lightning_unitscale.dispatch.execute import are_real
from lightning_unitscale.dispatch.kernels import close_session, open_session
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.session import LOCAL, ProductSession, run_inside
from lightning_unitscale.dispatch.torch_internals import Kernel
from lightning_unitscale.dispatch.units import Units
from lightning_unitscale.graph.matmuls import Product, product_of
from lightning_unitscale.graph.nodes import MODULE, requires_grad
from lightning_unitscale.graph.passes import GraphPass, Phase, Run, StepGraph
from lightning_unitscale.graph.regions import meant_name
from lightning_unitscale.precision.fp8 import NO_LINEAR, FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat
from lightning_unitscale.profiler.node_flops import product_flops

# Called with the name of a step, its coverage, and when it was.
Report = Callable[[str, Coverage, str], None]
# After the first calls, which capture graphs, matmuls outside of graphs are looked for rarely.
_LOOK_EVERY = 128
_NO_GRAPH = "Dynamo runs the step without graphs, as it does beyond its recompile limit"
_BETWEEN = "it runs between captured graphs"


@dataclass(frozen=True)
class _InGraph:
    """A matmul of a graph, with those of its gradients.

    Attributes:
        name: What formats call it.
        module: Path of its module.
        flops: Its floating-point operations.
        count: How many matmuls it is in training.
    """

    name: str
    module: str
    flops: int
    count: int


class CapturedFormats(GraphPass):
    """Counts the matmuls of captured steps that are to run in a format, and changes nothing.

    Args:
        formats: The pass that has them run in it.
        report: Called after each call that was counted with all of its matmuls.
    """

    name = "coverage"
    # Before a format takes the place of a matmul.
    phase = Phase.REWRITE
    needs_graph = False

    def __init__(self, formats: FP8Linears | SimulateFormat, report: Report) -> None:
        self._formats = formats
        self._report = report
        self._watch: _Watch | None = None
        self._num_calls: dict[str, int] = {}
        self._num_in_graphs: dict[str, int] = {}
        self._looks_at_next: set[str] = set()

    def runs_in(self, step: str) -> bool:
        """Return whether matmuls of a step are to run in the format."""
        return self._formats.runs_in(step)

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Note the matmuls of a graph, to be counted whenever it runs."""
        found = [
            _described(product)
            for region in graph.regions()
            for node in region.graph.nodes
            if (product := product_of(node)) is not None
        ]
        graph.wrap(functools.partial(self._count, found))
        if self._watch is not None:
            # What was captured anew may have been captured in pieces.
            self._watch.look()
        return (f"{len(found)} products counted",)

    @contextmanager
    def running(self, step: CapturedStep) -> Iterator[None]:
        """Count within this context, which is one call of a step."""
        name = step.name
        if self._watch is not None or not self.runs_in(name):
            yield
            return
        number = self._num_calls[name] = self._num_calls.get(name, 0) + 1
        self._watch = _Watch(step.owner.module)
        if number & (number - 1) == 0 or not number % _LOOK_EVERY or name in self._looks_at_next:
            self._watch.look()
        self._looks_at_next.discard(name)
        try:
            yield
            watch = self._watch
        finally:
            self._watch.stop()
            self._watch = None
        before, self._num_in_graphs[name] = self._num_in_graphs.get(name, 0), watch.num_in_graphs
        if watch.is_looking:
            reason = ". ".join(_why_outside(step, watch))
            self._report(name, watch.coverage(self._format, reason), f"call {number}")
        elif watch.num_in_graphs < before:
            self._looks_at_next.add(name)

    def _count(self, found: Sequence[_InGraph], run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
        watch = self._watch
        if watch is None:
            return run(inputs)
        for product in found:
            outside = self._why_not(product)
            for _ in range(product.count if torch.is_grad_enabled() else 1):
                watch.add(product.module, outside, product.flops)
        with watch.in_graph():
            return run(inputs)

    @property
    def _format(self) -> str:
        return "FP8" if isinstance(self._formats, FP8Linears) else "a simulated format"

    def _why_not(self, product: _InGraph) -> str:
        if isinstance(self._formats, FP8Linears):
            # What has been captured without this pass has not been decided.
            return self._formats.decisions.get(product.name, NO_LINEAR) or ""
        return self._formats.patterns.why_not(product.name, product.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedFormats:
        new = CapturedFormats(
            copy.deepcopy(self._formats, memo), copy.deepcopy(self._report, memo)
        )
        memo[id(self)] = new
        return new
