"""Count the matmuls of captured steps: those in graphs, by format, and those that no graph has.

A graph knows its own matmuls. What Python multiplies between graphs, after a graph break or where
Dynamo has given up, is seen by kernels of the dispatcher. These take time, so they are there in the
first calls of a step, in calls that capture something or run fewer graphs, and rarely after that.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.compiled_graph import CompiledGraph, GraphBackend
from lightning_unitscale.dispatch.calls import Call
from lightning_unitscale.dispatch.coverage import Coverage, CoverageCounter, Kind
from lightning_unitscale.dispatch.execute import are_real
from lightning_unitscale.dispatch.kernels import close_session, open_session
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.session import SESSION, ProductSession, run_inside
from lightning_unitscale.dispatch.sites import frames
from lightning_unitscale.dispatch.torch_internals import Kernel
from lightning_unitscale.dispatch.units import Units
from lightning_unitscale.dynamo.breaks import joined_reasons
from lightning_unitscale.graph.matmuls import Product, product_of, unreachable_products
from lightning_unitscale.graph.nodes import MODULE, requires_grad, tensors_in
from lightning_unitscale.graph.passes import GraphPass, Phase, Run, StepGraph
from lightning_unitscale.graph.regions import meant_name
from lightning_unitscale.precision.fp8 import NO_LINEAR, FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat
from lightning_unitscale.profiler.flops import node_flops

# Called with the name of a step, its coverage, and when it was.
Report = Callable[[str, Coverage, str], None]
_LOOK_EVERY = 128
_GRAPHS = (CompiledGraph.__call__.__code__, GraphBackend.__call__.__code__)
_BETWEEN = "it runs between captured graphs"
_NO_GRAPH = "Dynamo captures no graph"


@dataclass(frozen=True)
class _InGraph:
    """A matmul of a graph, with those of its gradients.

    Attributes:
        name: What formats call it.
        module: Path of its module.
        flops: Its floating-point operations.
        count: How many matmuls it is in training.
        reason: Why nothing can put it into a format, if that is so.
    """

    name: str
    module: str
    flops: int
    count: int
    reason: str = ""


class _BetweenGraphs(ProductSession):
    """Counts the matmuls of a captured step that no graph has, and leaves them as they are."""

    rewrites_graphs = False

    def run(
        self,
        rule: ProductRule,
        original: Kernel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node: Any,
        call: Call | None,
        frame: FrameType | None,
    ) -> Any:
        """Run a matmul and count it, with those of its gradients."""
        result = run_inside(original, *args, **kwargs)
        operands = rule.operands_in(args)
        counts = node is None and are_real(operands) and not _is_rewriting()
        if self.counter is not None and counts:
            path, flops = self.sites.forward_run().path, rule.flops(args, result)
            is_recorded = torch.is_grad_enabled()
            for _ in range(1 + is_recorded * sum(each.requires_grad for each in operands)):
                self.counter.add(path, "left out", "", flops, outside=_BETWEEN)
        return result


def _is_rewriting() -> bool:
    """Return whether a graph is being rewritten, for which passes try operators out."""
    return any(frame.f_code in _GRAPHS for frame in frames())


class _Call:
    """One call of a captured step.

    Attributes:
        session: Counts the matmuls between graphs; ``None`` unless they are looked for.
        num_graphs: Calls of graphs.
        num_products: Matmuls of these, forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self.counter = CoverageCounter()
        self.session: _BetweenGraphs | None = None
        self.num_graphs = self.num_products = 0
        self._module = module
        self._stack = ExitStack()

    def look(self) -> None:
        """Count what runs between graphs from now on."""
        if self.session is None:
            units = Units(is_used=False)
            self.session = _BetweenGraphs(self._module, CapturedStep.__call__.__code__, units)
            self.session.counter = self.counter
            open_session(self.session)
            self._stack.callback(close_session, self.session)
            self._stack.enter_context(SESSION.being(self.session))

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """Count nothing within this context, in which a graph runs that was counted."""
        outer = SESSION.get()
        with SESSION.being(None if outer is self.session else outer):
            yield

    def end(self) -> None:
        """Put torch's kernels back."""
        self._stack.close()


class CapturedFormats(GraphPass):
    """Counts the matmuls of captured steps that are to run in a format, and changes nothing."""

    name = "coverage"
    # Before a format takes the place of a matmul.
    phase = Phase.REWRITE
    needs_graph = False

    def __init__(self, formats: FP8Linears | SimulateFormat, report: Report) -> None:
        self._formats = formats
        self._report = report
        self._call: _Call | None = None
        # By the name of a step.
        self._num_calls: Counter[str] = Counter()
        self._num_products: Counter[str] = Counter()
        self._looks_next: set[str] = set()
        self._coverages: dict[str, Coverage] = {}

    def runs_in(self, step: str) -> bool:
        """Return whether matmuls of a step are to run in the format."""
        return self._formats.runs_in(step)

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Note the matmuls of a graph, to be counted whenever it runs."""
        if self._call is None:
            # Who rewrites a graph outside of a call runs it in another way.
            return ()
        found: list[_InGraph] = []
        for region in graph.regions():
            products = map(product_of, region.graph.nodes)
            found += [_described(product) for product in products if product is not None]
            unreachable = unreachable_products(region.graph).items()
            found += [_unreachable(node, reason) for node, reason in unreachable]
        graph.wrap(functools.partial(self._count, found))
        # It may have been captured in pieces.
        self._call.look()
        return (f"{len(found)} products counted",)

    @contextmanager
    def running(self, step: CapturedStep) -> Iterator[None]:
        """Count what one call of a step multiplies."""
        name = step.name
        # With an interpreter it is measured, as it is written.
        is_measured = step.interpreter is not None
        if self._call is not None or is_measured or not self.runs_in(name):
            yield
            return
        self._num_calls[name] += 1
        number = self._num_calls[name]
        call = self._call = _Call(step.owner.module)
        if name in self._looks_next or number & (number - 1) == 0 or number % _LOOK_EVERY == 0:
            call.look()
        try:
            yield
        finally:
            self._call = None
            call.end()
        has_fewer = call.num_products < self._num_products[name]
        self._num_products[name] = call.num_products
        self._looks_next.discard(name)
        if call.session is not None:
            coverage = call.counter.result(has_units=False, format=self._format)
            coverage = coverage.renamed({_BETWEEN: _why_between(step, call)})
            self._coverages[name] = coverage
            self._report(name, coverage, f"call {number}")
        elif has_fewer:
            # They may run between graphs now.
            self._looks_next.add(name)

    def _count(self, found: Sequence[_InGraph], run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
        call = self._call
        if call is None:
            return run(inputs)
        call.num_graphs += 1
        call.num_products += len(found)
        for product in found:
            outside = self._why_not(product)
            kind: Kind = "left out" if outside else "format"
            for _ in range(product.count if torch.is_grad_enabled() else 1):
                call.counter.add(product.module, kind, "", product.flops, outside=outside)
        with call.in_graph():
            return run(inputs)

    def report(self) -> str:
        """Return the coverage of each step."""
        parts = [f"{name}: {one.line()}\n\n{one.table()}" for name, one in self._coverages.items()]
        return "\n\n".join(parts)

    @property
    def _format(self) -> str:
        return "FP8" if isinstance(self._formats, FP8Linears) else "a simulated format"

    def _why_not(self, product: _InGraph) -> str:
        if product.reason:
            return product.reason
        if isinstance(self._formats, FP8Linears):
            return self._formats.decisions.get(product.name, NO_LINEAR) or ""
        return self._formats.patterns.why_not(product.name, product.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedFormats:
        formats, report = copy.deepcopy((self._formats, self._report), memo)
        new = memo[id(self)] = CapturedFormats(formats, report)
        return new


def _described(product: Product) -> _InGraph:
    node = product.node
    gradients = sum(requires_grad(operand.node) for operand in product.operands)
    return _InGraph(
        meant_name(node),
        str(node.meta.get(MODULE, "")),
        node_flops(node),
        1 + gradients * requires_grad(node),
    )


def _unreachable(node: fx.Node, reason: str) -> _InGraph:
    """Return a matmul whose gradients, of what it reads and of its weights, cost twice as much."""
    is_recorded = any(one.requires_grad for one in tensors_in(node.meta.get("example_value")))
    path, count = str(node.meta.get(MODULE, "")), 3 if is_recorded else 1
    return _InGraph(meant_name(node), path, node_flops(node), count, reason)


def _why_between(step: CapturedStep, call: _Call) -> str:
    what = _BETWEEN if call.num_graphs else _NO_GRAPH
    breaks = joined_reasons(step.graph_breaks)
    if breaks:
        return f"{what}: {breaks}"
    return what if call.num_graphs else f"{what}, as beyond its recompile limit"
