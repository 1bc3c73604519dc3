"""Run a module's method as a pipeline: its graph is captured, and cut alike on every rank.

A call with each microbatch is stopped where it reaches the graph, which gives the graph's inputs;
then the pipeline runs. Dynamo guards the Python state that the method reads, and recaptures the
graph when that changes.

Each rank captures and cuts for itself, from the same module and batch and by constants, so they
agree. They are compared all the same: where they differed (Python code that asks for its rank,
other versions), tensors of one shape could silently reach the wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from typing_extensions import override

from lightning_unitscale.capture import compiled_graph
from lightning_unitscale.capture.compiled_graph import CompiledGraph, GraphCall
from lightning_unitscale.capture.steps import ModuleSteps, steps_of
from lightning_unitscale.pipeline.api import build_pipe, cut_by, has_marks
from lightning_unitscale.pipeline.capture import RewrittenGraph, program_of_step
from lightning_unitscale.pipeline.observed import ObservedStages
from lightning_unitscale.pipeline.ownership import Ownership
from lightning_unitscale.pipeline.runner import PipelineRunner, SharedGradients
from lightning_unitscale.strategies.checks import check_same_cuts
from lightning_unitscale.strategies.grid import Replicas


class PlainSteps(ModuleSteps):
    """Captures the user's own methods, where callbacks have captured them with their passes."""

    @override
    def original(self, name: str) -> Callable[..., Any]:
        """The user's own method, even where a captured step has replaced it."""
        steps = steps_of(self.module)
        if steps is None or name not in steps.steps:
            return super().original(name)
        return steps.original(name)


Policy = Callable[[fx.GraphModule], fx.GraphModule]


class NotOneGraphError(RuntimeError):
    """A method of the module does not run as one graph."""


class Replay:
    """Runs no graph, but returns the pipeline's results for it."""

    def __init__(self, name: str, graph: CompiledGraph, values: list[Any]) -> None:
        self._name = name
        self._graph = graph
        self._values = values

    def __call__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
        """The results.

        Raises:
            RuntimeError: If it is another graph.
        """
        if graph is not self._graph:
            raise RuntimeError(
                f"{self._name}: another graph ran with the pipeline's results than without them; "
                "expected a step whose course does not depend on how often it is called; keep "
                "counters of calls out of it."
            )
        return self._values


# Of one call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Pipelining:
    """Settings of a module's pipelines.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Microbatches of a batch.
        policy: Says where the first graph is cut, if the code does not.
        device: Where this rank's stages run.
        group: The pipeline's process group.
        ownership: Which ranks have which parameters.
        replicas: This rank in every pipeline, of which the first chooses the cuts.
        num_accumulated: Says how many batches one optimizer step adds up.
        free_unowned: Whether a rank frees the parameters that other ranks have.
    """

    schedule: str
    num_microbatches: int
    policy: Policy
    device: torch.device
    group: dist.ProcessGroup | None
    ownership: Ownership
    replicas: Replicas
    num_accumulated: Callable[[], int]
    free_unowned: bool

    @property
    def names_elsewhere(self) -> tuple[str, ...]:
        """Names of the parameters that only other ranks have."""
        names = self.ownership.names
        own = names[dist.get_rank(self.group)]
        return tuple(sorted(set().union(*names) - own))


@dataclass(frozen=True)
class PipelinedGraph:
    """A graph that runs as a pipeline.

    Attributes:
        graph: The captured graph; kept, so that its identity stays its own.
        rewritten: What was cut.
        inputs: Which of its inputs are the pipeline's.
        runner: The pipeline.
    """

    graph: CompiledGraph
    rewritten: RewrittenGraph
    inputs: list[int]
    runner: PipelineRunner


class PipelinedMethod:
    """A method of a module whose graphs run on several ranks.

    Args:
        module: The module.
        name: The method.
        pipelining: Settings of the module's pipelines.
        defer: Methods of the module whose calls are made after the step.
        plain: Whether the passes of callbacks are left out.

    Attributes:
        steps: The captured method, with the passes of the callbacks over its graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        pipelining: Pipelining,
        *,
        defer: tuple[str, ...] = (),
        plain: bool = False,
    ) -> None:
        self.module = module
        self.name = name
        self.pipelining = pipelining
        self._pipelines: dict[tuple[int, int], PipelinedGraph] = {}
        self._observed: dict[int, ObservedStages] = {}
        steps = steps_of(module)
        if steps is None or name not in steps.steps or plain:
            steps = PlainSteps(module, (name,), defer=defer)
        self.steps = steps

    def graph_calls(self, arguments: list[Arguments]) -> list[GraphCall]:
        """The call of the method's one graph for every microbatch; nothing of it has run then.

        Args:
            arguments: Positional and keyword arguments of each call.

        Raises:
            NotOneGraphError: If a call is not one graph, or the calls are not the same graph.
        """
        step = self.steps.steps[self.name]
        calls: list[GraphCall] = []
        for args, kwargs in arguments:
            try:
                calls.append(step.graph_call(*args, **kwargs))
            except compiled_graph.NotOneGraphError as error:
                raise self._not_one_graph(str(error)) from None
            if calls[-1].graph is not calls[0].graph:
                raise self._not_one_graph("it is another one for the next microbatch")
        return calls

    def _not_one_graph(self, reasons: str) -> NotOneGraphError:
        return NotOneGraphError(
            f"{type(self.module).__name__}.{self.name} is not one graph for every microbatch "
            f"({reasons}); expected tensor operations without branches on values, counters, "
            "printing or third-party calls between them; keep those out of it."
        )

    def inputs_of(self, calls: list[GraphCall]) -> list[list[Any]]:
        """The flat inputs of the pipeline for every microbatch."""
        pipelined = self._pipelines[_key(calls[0].graph)]
        inputs = [pipelined.rewritten.values(call.inputs) for call in calls]
        return [[values[position] for position in pipelined.inputs] for values in inputs]

    def runner_for(self, call: GraphCall, loss: Callable[[], int] | None = None) -> PipelineRunner:
        """The pipeline of a graph; made when it first runs.

        Args:
            call: The graph, with its inputs.
            loss: Says which of the graph's outputs is the loss, if it has one.

        Raises:
            RuntimeError: If parameters would move to other ranks.
        """
        key = _key(call.graph)
        if key not in self._pipelines:
            self._pipelines[key] = self._cut(call, None if loss is None else loss())
        runner = self._pipelines[key].runner
        runner.num_accumulated = self.pipelining.num_accumulated()
        return runner

    def shared_results(
        self, runner: PipelineRunner, examples: list[Any], outputs: list[Any] | None, count: int
    ) -> list[Any]:
        """The combined results of ``count`` microbatches, on all ranks: each of them logs.

        Args:
            runner: The pipeline.
            examples: Stand-ins for the results of a microbatch.
            outputs: The results, on the rank of the last stage.
            count: How many microbatches there are.
        """
        values = combined([examples] * count if outputs is None else outputs)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                values[index] = value.contiguous()
                dist.broadcast(
                    values[index], group=self.pipelining.group, group_src=runner.last_rank
                )
        return values

    def observed_stages(self, call: GraphCall) -> ObservedStages:
        """The stages of a graph with the probes of all passes; made when it is first observed."""
        pipelined = self._pipelines[_key(call.graph)]
        if id(pipelined) not in self._observed:
            self._observed[id(pipelined)] = ObservedStages(
                pipelined.runner.pipe,
                pipelined.rewritten.graph,
                self.steps.passes,
                self.pipelining.ownership.rank_of,
                self.pipelining.group,
            )
        return self._observed[id(pipelined)]

    def _cut(self, call: GraphCall, loss: int | None) -> PipelinedGraph:
        rewritten = RewrittenGraph(call.graph)
        values = rewritten.examples(call.inputs)
        ownership, replicas = self.pipelining.ownership, self.pipelining.replicas
        is_first = not ownership.is_settled
        if is_first and replicas.rank > 0:
            ownership.adopt(replicas.of_first(None))
        program, own = program_of_step(
            rewritten.graph.graph_module, rewritten.inputs, self.module, values, loss
        )
        if not has_marks(program):
            cut_by(program, ownership.policy() if ownership.is_settled else self.pipelining.policy)
        pipe = build_pipe(program, self.module)
        if is_first:
            check_same_cuts(pipe, self.pipelining.group)
        runner = PipelineRunner(
            pipe,
            self.pipelining.schedule,
            num_microbatches=self.pipelining.num_microbatches,
            device=self.pipelining.device,
            group=self.pipelining.group,
        )
        ownership.note(pipe)
        if is_first and replicas.rank == 0:
            replicas.of_first(ownership.stages)
        # A replica that this graph does not use must not fall behind the others.
        rank = dist.get_rank(self.pipelining.group)
        owned = ownership.parameters_of(rank)
        runner.shared = SharedGradients(owned, ownership.replicas(), self.pipelining.group)
        return PipelinedGraph(call.graph, rewritten, own, runner)


def _key(graph: CompiledGraph) -> tuple[int, int]:
    """A graph, as its passes rewrite it now."""
    return id(graph), graph.num_rewrites


def combined(results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of microbatches as those of one batch.

    The mean of single floating-point numbers, the sum of single whole numbers, and everything else
    one after the other along the first dimension.
    """
    return [_combine(list(each)) for each in zip(*results, strict=True)]


def _combine(values: list[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].ndim:
        return torch.cat(values)
    stacked = torch.stack(values)
    return stacked.mean() if stacked.is_floating_point() else stacked.sum()
