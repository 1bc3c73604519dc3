"""What Dynamo's captured graphs become: one compiled graph per module, with its variants.

Dynamo lets a frame's side effects follow the frame's graph. Whoever stops a step where its graph is
called has the graph and its inputs, a :class:`GraphCall`, and nothing that the step does beside the
graph was done: it can be measured on them as often as needed, and nothing of the user's Python has
to be undone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture import executors
from lightning_unitscale.capture.aliasing import find_effects, memory_roots, written_arguments
from lightning_unitscale.capture.breaks import Reason, graph_breaks_since, joined_reasons
from lightning_unitscale.capture.copy_graphs import copy_graph_module
from lightning_unitscale.capture.decompose import expand_composites
from lightning_unitscale.capture.dynamo_capture import CapturedGraph
from lightning_unitscale.capture.executors import Executor
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.module_state import ModuleState
from lightning_unitscale.capture.passes import (
    GraphPass,
    PassRecord,
    Phase,
    StepGraph,
    run_passes,
)
from lightning_unitscale.capture.recaptures import Recaptures
from lightning_unitscale.capture.regions import MATMULS, Places
from lightning_unitscale.capture.rollback import restorers_of
from lightning_unitscale.capture.side_effects import Postponed
from lightning_unitscale.capture.user_checkpoints import refuse_checkpoints
from lightning_unitscale.functional.scale import outside_transforms
from lightning_unitscale.patching import shadowed

# Runs a graph in its place, on the inputs of a call.
Interpreter = Callable[["CompiledGraph", tuple[Any, ...]], Any]


class StepState:
    """The captured graphs of a step, and how they run."""

    def __init__(self, owner: ModuleState, name: str, function: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self.__wrapped__ = function
        self.captured = capture.with_own_code(function)  # what Dynamo captures
        # Runs the graphs in their place, if there is one.
        self.interpreter: Interpreter | None = None
        self.is_rehearsing = False  # nothing that the step does is to remain
        self.recaptures = Recaptures()
        self.error_of_pass: Exception | None = None  # in the current call

    @property
    def title(self) -> str:
        """The module's class and the method."""
        return f"{type(self.owner.module).__name__}.{self.name}"

    def reset(self) -> None:
        """Forget what was captured."""
        self.names = Names()
        self.graphs: list[CompiledGraph] = []
        self.graph_breaks: list[Reason] = []
        self.num_graph_calls = 0  # in the last call of the step
        # Class of an input for which the last call ran as it is.
        self.refused: str | None = None
        self.has_warned = False
        self.recaptures.reset()
        self.postponed = Postponed(self.owner.module, self.__wrapped__, self.owner.defer)
        self._flags: list[bool] = []

    def forget(self) -> None:
        """Have the next call captured anew, by Dynamo as well."""
        capture.forget(self.captured)
        self.reset()

    def forget_after(self, error: BaseException) -> BaseException:
        """Forget what was captured; returns the error that Dynamo may have wrapped."""
        # Dynamo never looks again at a frame in which an error was raised; the next call may.
        self.forget()
        return capture.original_error(error)

    def forget_before_limit(self) -> None:
        """Forget what was captured before Dynamo, past its limit, runs more of it as it is."""
        if functions := self.recaptures.near_limit():
            has_warned = self.has_warned
            self.forget()
            capture.forget_code(functions)
            self.has_warned = has_warned

    def forget_if_thawed(self) -> None:
        """Recapture when other parameters want gradients: each needs units of its own."""
        flags = [param.requires_grad for param in self.owner.module.parameters()]
        if self._flags and flags != self._flags:
            self.forget()
        self._flags = flags

    def invalidate(self) -> None:
        """Have the passes rewrite what was captured again, before the next run of a graph."""
        if any(graph.executor != "eager" for graph in self.graphs):
            self.reset()  # they are compiled only while Dynamo collects its guards
        for graph in self.graphs:
            graph.invalidate()

    def note_breaks_since(self, count: int) -> list[Reason]:
        """Note the graph breaks after the first so many of the process."""
        breaks = graph_breaks_since(count)
        self.graph_breaks += breaks
        self.owner.graph_breaks += breaks
        return breaks


class GraphBackend:
    """What Dynamo calls with each graph; it must not keep the module alive by itself."""

    def __init__(self, step: weakref.ref[StepState], executor: Executor) -> None:
        self.step = step
        self.executor = executor

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Take over a captured graph; what is returned runs in its place."""
        step = self.step()
        if step is None:
            return graph_module.forward
        step.recaptures.num_graphs += 1
        captured = capture.describe(graph_module, example_inputs, step.owner.module)
        return _GraphOfEachModule(step, captured, self.executor).__call__


class _GraphOfEachModule:
    """Gives each module that runs the same captured code a graph, and so names, of its own."""

    def __init__(self, step: StepState, captured: CapturedGraph, executor: Executor) -> None:
        # After a graph break Dynamo captures a layer's ``forward`` once for all layers of a class,
        # with the parameters as inputs; but the scales of the tensors are each layer's own.
        self._step = weakref.ref(step)
        # They are activations then, which would be alive ever after.
        self._captured = replace(captured, example_inputs=())
        self._executor = executor
        self._position = captured.first_parameter()
        self._first = CompiledGraph(step, captured, executor)
        self._by_roots = {tuple(captured.roots().values()): self._first}
        self._by_parameter: dict[int, CompiledGraph] = {}

    def __call__(self, *inputs: Any) -> Any:
        # A compiled graph cannot be compiled again outside of Dynamo, with its guards.
        if self._position is None or self._executor != "eager":
            return self._first(*inputs)
        parameter = inputs[self._position]
        if id(parameter) not in self._by_parameter:
            self._by_parameter[id(parameter)] = self._find(inputs)
        return self._by_parameter[id(parameter)](*inputs)

    def _find(self, inputs: tuple[Any, ...]) -> CompiledGraph:
        step = self._step()
        if step is None:
            return self._first
        captured = self._captured.for_module_of(inputs, step.owner.module)
        roots = tuple(captured.roots().values())
        if not roots:
            return self._first
        if roots not in self._by_roots:
            self._by_roots[roots] = CompiledGraph(step, captured, self._executor)
        return self._by_roots[roots]


class CompiledGraph:
    """One captured graph and its variants, with and without probes."""

    def __init__(self, step: StepState, captured: CapturedGraph, executor: Executor) -> None:
        self._step = weakref.ref(step)
        self.executor = executor
        self.index = len(step.graphs)
        # As captured, with composites expanded and names assigned; passes copy it.
        self.base = copy_graph_module(captured.graph_module)
        step.names.assign(captured, self.base)
        expand_composites(self.base)
        find_effects(self.base.graph)  # for all copies of it
        self.inputs = captured.inputs
        if step.owner.partition_fn is not None and executor == "aot_eager":
            refuse_checkpoints(self.base, self.inputs)
        self._variants: dict[bool, Variant] = {}
        self._interpreted: dict[bool, StepGraph] = {}
        self.num_rewrites = 0
        if executor != "eager":
            # Compiling may specialise on shapes, and only while Dynamo is still collecting its
            # guards do those become part of them. The eager executor specialises on nothing.
            for observed in step.owner.variants():
                self._variants[observed] = self._build(observed, captured.example_inputs)
        step.graphs.append(self)

    def __call__(self, *inputs: Any) -> Any:
        """Run the variant that is wanted now, or the step's interpreter if it has one."""
        step = self._owner
        step.num_graph_calls += 1
        if step.interpreter is not None:
            return step.interpreter(self, inputs)
        observed = step.owner.observed
        if observed not in self._variants:
            # Between two graph breaks it may be called within a transform of torch.func's, which
            # its rewriting is no part of.
            with outside_transforms():
                self._variants[observed] = self._build(observed, inputs)
        return self._variants[observed](*inputs)

    def invalidate(self) -> None:
        """Rewrite the base again at the next run, for passes that have changed their minds."""
        self.num_rewrites += 1
        self._variants.clear()
        self._interpreted.clear()

    def interpret(
        self, interpret: Callable[[fx.GraphModule], Callable[..., Any]], inputs: Sequence[Any]
    ) -> Any:
        """Run the captured graph, out of place and reparametrized, through an interpreter."""
        step = self._owner
        observed = step.owner.observed and not step.is_rehearsing  # with the probes that are wanted
        if observed not in self._interpreted:
            phases = (Phase.REPARAMETRIZE, Phase.OBSERVE)
            passes = [graph_pass for graph_pass in step.owner.passes if graph_pass.phase in phases]
            self._interpreted[observed], _ = self._after(passes, observed=observed)
        graph = self._interpreted[observed]
        return Variant(graph, interpret(graph.graph_module))(*inputs)

    def rewritten(self, *, observed: bool = False, out_of_place: bool = True) -> StepGraph:
        """A variant as a graph: for whoever runs it in another way."""
        owner = self._owner.owner
        graph, records = self._after(owner.passes, observed=observed, out_of_place=out_of_place)
        owner.records += records
        return graph

    def out_of_place(self) -> StepGraph:
        """The captured graph before any pass, its in-place operations out of place."""
        return self._after(())[0]

    @property
    def _owner(self) -> StepState:
        step = self._step()
        if step is None:
            raise RuntimeError("a captured graph was called after its module was restored")
        return step

    def _after(
        self, passes: Sequence[GraphPass], *, observed: bool = False, out_of_place: bool = True
    ) -> tuple[StepGraph, list[PassRecord]]:
        """A copy that some passes have rewritten, and what they did."""
        step = self._owner
        graph = StepGraph(copy_graph_module(self.base), observed=observed, step=step.name)
        if (rewriter := step.owner.rewriter) is not None:
            rewriter.describe(graph)
        graph.notes[MATMULS] = Places(graph).operands_and_matmuls()
        try:
            records = run_passes(
                graph, passes, step=step.name, graph_index=self.index, out_of_place=out_of_place
            )
        except Exception as error:
            step.error_of_pass = error
            raise
        return graph, records

    def _build(self, observed: bool, examples: Sequence[Any]) -> Variant:
        owner = self._owner.owner
        graph = self.rewritten(observed=observed, out_of_place=False)
        run = executors.execute_with(
            self.executor,
            graph.graph_module,
            graph.example_inputs(examples),
            owner.partition_fn,
            owner.compile_mode,
            # Steps under manual optimization take their backward passes themselves.
            backward_is_autocast=not getattr(owner.module, "automatic_optimization", True),
            rewriter=owner.rewriter,
        )
        return Variant(graph, run)


class Variant:
    """A rewritten graph that runs: gives it its states and takes its results."""

    def __init__(self, graph: StepGraph, run: Callable[..., Any]) -> None:
        self._run = run
        self._supplies = [supply for _, supply in graph.states]
        self._sinks = [sink for _, sink in graph.results]

    def __call__(self, *inputs: Any) -> Any:
        """The outputs for the user's inputs."""
        outputs = self._run(*inputs, *[supply() for supply in self._supplies])
        if not self._sinks:
            return outputs
        count = len(outputs) - len(self._sinks)
        for sink, value in zip(self._sinks, outputs[count:], strict=True):
            sink(value)
        return tuple(outputs[:count])


class NotOneGraphError(Exception):
    """A call of a step is not one graph; says why."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(joined_reasons(reasons))
        self.reasons = reasons


class GraphReached(BaseException):
    """Raised in place of a graph's run; no ``except Exception`` of a user's sees it."""

    def __init__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.graph = graph
        self.inputs = inputs


def stop_at_graph(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
    """The interpreter that runs no graph, but raises."""
    raise GraphReached(graph, inputs)


@dataclass(frozen=True)
class GraphCall:
    """The one graph that a call of a step runs, with its inputs: parameters and buffers as well."""

    step: StepState
    graph: CompiledGraph
    inputs: tuple[Any, ...]

    @property
    def differentiable(self) -> list[int]:
        """Positions among the graph's outputs of tensors with a gradient, each tensor once."""
        nodes: Any = self.graph.base.graph.output_node().args[0]
        positions: dict[Any, int] = {}
        for position, node in enumerate(nodes):
            example = getattr(node, "meta", {}).get("example_value")
            if isinstance(example, Tensor) and example.requires_grad:
                positions.setdefault(node, position)
        return list(positions.values())

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[tuple[Callable[[Interpreter], Any], tuple[Any, ...]]]:
        """Run the graph in this context; random states and written inputs are put back then."""
        inputs = tuple(_leaf(value) for value in self.inputs)
        restorers = [restore for value in self._written(inputs) for restore in restorers_of(value)]
        devices = {value.device for value in inputs if isinstance(value, Tensor)}
        with (
            torch.random.fork_rng([device for device in devices if device.type == "cuda"]),
            torch.set_grad_enabled(torch.is_grad_enabled()),
            shadowed(self.step, is_rehearsing=True),
        ):
            try:
                yield lambda interpreter: interpreter(self.graph, inputs), inputs
            finally:
                for restore in restorers:
                    restore()

    def _written(self, inputs: Sequence[Any]) -> Iterator[Any]:
        """The inputs that the graph may write into: parameters only if an operation says so."""
        graph = self.graph.base.graph
        roots = memory_roots(graph)
        mutated = {roots[target] for node in graph.nodes for target in written_arguments(node)}
        placeholders = graph.find_nodes(op="placeholder")
        for node, origin, value in zip(placeholders, self.graph.inputs, inputs, strict=True):
            # Kernels of normalization layers write into running statistics, and do not say so.
            if origin.kind != "parameter" or roots[node] in mutated:
                yield value


def _leaf(value: Any) -> Any:
    """The same tensor without what has computed it, through which no backward pass may go."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_()
