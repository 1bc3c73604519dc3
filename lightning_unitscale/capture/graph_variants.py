"""Hold Dynamo's captured graphs: per module one graph and its rewritten variants.

Dynamo runs a frame's side effects after the frame's graph. If a step is stopped at the call of its
graph, the graph and its inputs are known (:class:`GraphCall`), and none of the step's side effects
has happened. So the graph can be measured as often as needed, without undoing any of the user's
Python.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture import executors
from lightning_unitscale.capture.aliasing import aliased_by_mutation, find_effects
from lightning_unitscale.capture.breaks import (
    Reason,
    graph_breaks_since,
    joined_reasons,
    unwatched,
)
from lightning_unitscale.capture.copy_graphs import copy_graph_module
from lightning_unitscale.capture.decompose import expand_composites
from lightning_unitscale.capture.dynamo_capture import CapturedGraph
from lightning_unitscale.capture.executors import Executor
from lightning_unitscale.capture.graph_matmuls import MATMULS, Places
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.module_state import ModuleState, Recaptures
from lightning_unitscale.capture.passes import GraphPass, PassRecord, Phase, StepGraph, run_passes
from lightning_unitscale.capture.patches import note_step
from lightning_unitscale.capture.rollback import restorers_of
from lightning_unitscale.capture.side_effects import Postponed, optimizes_itself
from lightning_unitscale.functional.scale import outside_transforms
from lightning_unitscale.patching import nothing, shadowed

# Runs a graph in its place, on the inputs of a call.
Interpreter = Callable[["GraphVariants", tuple[Any, ...]], Any]


class StepState:
    """Captured graphs of a step, and how they run."""

    def __init__(self, owner: ModuleState, name: str, function: Callable[..., Any]) -> None:
        self.owner = owner
        self.name = name
        self.__wrapped__ = function
        self.captured = capture.with_own_code(function)  # the function for Dynamo to capture
        note_step(self.captured)
        # Runs the graphs in their place, if there is one.
        self.interpreter: Interpreter | None = None
        self.is_rehearsing = False  # True while all side effects of the step are discarded
        self.recaptures = Recaptures()
        self.error_of_pass: Exception | None = None  # raised in the current call

    @property
    def title(self) -> str:
        """Return the module's class and the method."""
        return f"{type(self.owner.module).__name__}.{self.name}"

    def reset(self) -> None:
        """Forget the captured graphs."""
        self.names = Names()
        self.graphs: list[GraphVariants] = []
        self.graph_breaks: list[Reason] = []
        self.num_graph_calls = 0  # in the last call of the step
        # Class of an input because of which the last call ran uncaptured.
        self.refused: str | None = None
        self.has_warned = False
        self.recaptures.reset()
        self.postponed = Postponed(self.owner.module, self.__wrapped__, self.owner.defer)
        self._flags: list[bool] = []

    def forget(self) -> None:
        """Have the next call recaptured, by Dynamo as well."""
        capture.forget_captures(self.captured)
        self.reset()

    def forget_after(self, error: BaseException) -> BaseException:
        """Forget the captured graphs, and return the error that Dynamo may have wrapped."""
        # Dynamo skips a frame for good once an error was raised in it, but the next call may work.
        self.forget()
        return capture.original_error(error)

    def forget_before_limit(self) -> None:
        """Forget the captures before Dynamo reaches its limit and runs the rest uncaptured."""
        if functions := self.recaptures.near_limit():
            has_warned = self.has_warned
            self.forget()
            capture.forget_code(functions)
            self.has_warned = has_warned

    def forget_if_thawed(self) -> None:
        """Recapture if other parameters require gradients, since each needs its own unit."""
        flags = [param.requires_grad for param in self.owner.module.parameters()]
        if self._flags and flags != self._flags:
            self.forget()
        self._flags = flags

    def invalidate(self) -> None:
        """Have the passes rewrite the captured graphs again before the next run."""
        if any(graph.executor != "eager" for graph in self.graphs):
            self.reset()  # compiled only while Dynamo collects its guards
        for graph in self.graphs:
            graph.invalidate()

    def note_breaks_since(self, count: int) -> list[Reason]:
        """Note the graph breaks of the process after the first ``count``."""
        breaks = graph_breaks_since(count)
        self.graph_breaks += breaks
        self.owner.graph_breaks += breaks
        return breaks


class GraphBackend:
    """Dynamo's backend, called with each graph. It must not keep the module alive."""

    def __init__(self, step: weakref.ref[StepState], executor: Executor) -> None:
        self.step = step
        self.executor = executor

    def __call__(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Take over a captured graph, and return the callable that runs in its place."""
        step, nodes = self.step(), graph_module.graph.nodes
        if step is None or all(node.op in ("placeholder", "output") for node in nodes):
            return graph_module.forward  # it computes nothing
        step.recaptures.num_graphs += 1
        captured = capture.describe(graph_module, example_inputs, step.owner.module)
        return _GraphOfEachModule(step, captured, self.executor).__call__


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Rewrite a graph outside the contexts of the call that needs it."""
    # Between two graph breaks it may be called within a torch.func transform, where no rewritten
    # graph can run. A mode such as a logger of operations would see its fake tensors.
    with outside_transforms(), unwatched():
        yield


class _GraphOfEachModule:
    """Graphs, and so names, of each module that runs the same captured code."""

    def __init__(self, step: StepState, captured: CapturedGraph, executor: Executor) -> None:
        # After a graph break Dynamo captures a layer's ``forward`` once for all layers of a class,
        # with the parameters as inputs. But each layer has its own scales.
        self._step = weakref.ref(step)
        # Examples would be activations that stay alive.
        self._captured = replace(captured, example_inputs=())
        self._executor = executor
        # The input that distinguishes modules that run the same code.
        positions = (i for i, described in enumerate(captured.inputs) if described.fqn is not None)
        self._position = next(positions, None)
        self._first = GraphVariants(step, captured, executor)
        self._by_roots = {tuple(captured.roots().values()): self._first}
        self._by_parameter: dict[int, GraphVariants] = {}

    def __call__(self, *inputs: Any) -> Any:
        # A compiled graph cannot be compiled again outside of Dynamo, with its guards.
        if self._position is None or self._executor != "eager":
            return self._first(*inputs)
        parameter = inputs[self._position]
        if id(parameter) not in self._by_parameter:
            with _outside():
                self._by_parameter[id(parameter)] = self._find(inputs)
        return self._by_parameter[id(parameter)](*inputs)

    def _find(self, inputs: tuple[Any, ...]) -> GraphVariants:
        step = self._step()
        if step is None:
            return self._first
        captured = self._captured.for_module_of(inputs, step.owner.module)
        roots = tuple(captured.roots().values())
        if not roots:
            return self._first
        if roots not in self._by_roots:
            self._by_roots[roots] = GraphVariants(step, captured, self._executor)
        return self._by_roots[roots]


class GraphVariants:
    """One captured graph and its variants, with and without probes."""

    def __init__(self, step: StepState, captured: CapturedGraph, executor: Executor) -> None:
        self._step = weakref.ref(step)
        self.executor = executor
        self.index = len(step.graphs)
        # As captured, with composites expanded and names assigned. Passes copy it.
        self.base = copy_graph_module(captured.graph_module)
        step.names.assign(captured, self.base, step.owner.module)
        expand_composites(self.base, ChainMap(*(dict(one.attentions) for one in step.owner.passes)))
        find_effects(self.base.graph)  # cached for all copies
        self.inputs = captured.inputs
        if step.owner.partition_fn is not None and executor == "aot_eager":
            executors.refuse_checkpoints(self.base, self.inputs)
        self._variants: dict[bool, Variant] = {}
        self._interpreted: StepGraph | None = None
        self.num_rewrites = 0
        if executor != "eager":
            # Compiling may specialize on shapes. These become guards only while Dynamo collects
            # them. The eager executor specializes on nothing.
            begin_variant = getattr(step.owner.partition_fn, "begin_variant", nothing)
            for number, observed in enumerate(step.owner.variants()):
                begin_variant(number)
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
            with _outside():
                self._variants[observed] = self._build(observed, inputs)
        return self._variants[observed](*inputs)

    def invalidate(self) -> None:
        """Rewrite the base again at the next run, since a pass has changed its decisions."""
        self.num_rewrites += 1
        self._variants.clear()
        self._interpreted = None

    def interpret(
        self, interpret: Callable[[fx.GraphModule], Callable[..., Any]], inputs: Sequence[Any]
    ) -> Any:
        """Run the captured graph, out of place and reparametrized, through an interpreter."""
        if self._interpreted is None:
            every = self._owner.owner.passes
            passes = [graph_pass for graph_pass in every if graph_pass.phase is Phase.REPARAMETRIZE]
            self._interpreted, _ = self._after(passes)
        return Variant(self._interpreted, interpret(self._interpreted.graph_module))(*inputs)

    def rewritten(self, *, observed: bool = False, out_of_place: bool = True) -> StepGraph:
        """Return a variant as a graph, for a caller that runs it in another way."""
        owner = self._owner.owner
        graph, records = self._after(owner.passes, observed=observed, out_of_place=out_of_place)
        owner.records += records
        return graph

    def out_of_place(self) -> StepGraph:
        """Return the captured graph before any pass, with its in-place operations out of place."""
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
        """Return a copy rewritten by some passes, and the records of the passes."""
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
            # Steps under manual optimization call their backward passes themselves.
            backward_is_autocast=optimizes_itself(owner.module),
            rewriter=owner.rewriter,
        )
        return Variant(graph, run)


class Variant:
    """Rewritten graph that runs: it gets its states and hands out its results."""

    def __init__(self, graph: StepGraph, run: Callable[..., Any]) -> None:
        self._run = run
        self._supplies = [supply for _, supply in graph.states]
        self._sinks = [sink for _, sink in graph.results]

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs for the user's inputs."""
        outputs = self._run(*inputs, *[supply() for supply in self._supplies])
        if not self._sinks:
            return outputs
        count = len(outputs) - len(self._sinks)
        for sink, value in zip(self._sinks, outputs[count:], strict=True):
            sink(value)
        return tuple(outputs[:count])


class NotOneGraphError(Exception):
    """Error for a call of a step that is not one graph, with the reason."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(joined_reasons(reasons))
        self.reasons = reasons


class GraphReached(BaseException):
    """Signal in place of the run of a graph on inputs. No ``except Exception`` catches it."""


def stop_at_graph(graph: GraphVariants, inputs: tuple[Any, ...]) -> Any:
    """Raise :class:`GraphReached` instead of running the graph."""
    raise GraphReached(graph, inputs)


@dataclass(frozen=True)
class GraphCall:
    """The one graph that a call of a step runs, with inputs, parameters and buffers."""

    step: StepState
    graph: GraphVariants
    inputs: tuple[Any, ...]

    @property
    def differentiable(self) -> list[int]:
        """Return the positions of the graph's outputs that have a gradient, each tensor once."""
        nodes: Any = self.graph.base.graph.output_node().args[0]
        positions: dict[Any, int] = {}
        for position, node in enumerate(nodes):
            example = getattr(node, "meta", {}).get("example_value")
            if isinstance(example, Tensor) and example.requires_grad:
                positions.setdefault(node, position)
        return list(positions.values())

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[tuple[Callable[[Interpreter], Any], tuple[Any, ...]]]:
        """Run the graph in this context. Random states and written inputs are restored after it."""
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
        """Yield the inputs that the graph may write into: parameters only if an operation does."""
        graph = self.graph.base.graph
        mutated = aliased_by_mutation(graph)
        placeholders = graph.find_nodes(op="placeholder")
        for node, origin, value in zip(placeholders, self.graph.inputs, inputs, strict=True):
            # Normalization kernels write into running statistics without declaring it.
            if origin.kind != "parameter" or node in mutated:
                yield value


def _leaf(value: Any) -> Any:
    """Return the same tensor as a leaf, so that no backward pass goes beyond it."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_()
