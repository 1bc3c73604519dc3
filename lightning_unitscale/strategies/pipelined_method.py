"""A module's method whose graph runs as a pipeline: it is captured, and cut, when it first runs.

The method is called once for each microbatch with the graph left out, which gives the graph's
inputs; then the pipeline runs. Dynamo guards the Python state that the method reads, and the graph
is captured anew when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_unitscale.graph.compiled_graph import CompiledGraph
from lightning_unitscale.graph.graph_breaks import graph_breaks_since, num_graph_breaks
from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.pipeline.flow import MultiUseParameterConfig
from lightning_unitscale.pipeline.front import build_pipe, cut_by
from lightning_unitscale.pipeline.observed import ObservedStages
from lightning_unitscale.pipeline.ownership import Ownership
from lightning_unitscale.pipeline.rewritten import RewrittenGraph
from lightning_unitscale.pipeline.runner import PipelineRunner
from lightning_unitscale.pipeline.shared import SharedGradients
from lightning_unitscale.pipeline.step_program import example_outputs, program_of_step
from lightning_unitscale.strategies import batches
from lightning_unitscale.strategies.captured_steps import PlainSteps
from lightning_unitscale.strategies.replicas import Replicas
from lightning_unitscale.strategies.same_cuts import check_same_cuts
from lightning_unitscale.transforms.restoring import restoring

# A graph, its inputs, and stand-ins for its outputs.
Call = tuple[CompiledGraph, tuple[Any, ...], list[Any]]
Policy = Callable[[fx.GraphModule], fx.GraphModule]


class NotOneGraphError(RuntimeError):
    """A method of the module does not run as one graph."""


class Replay:
    """Puts the pipeline's results in the place of the one graph that they are of."""

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


@dataclass(frozen=True)
class Rehearsal:
    """Calls of a method for every microbatch, with the one graph of theirs left out.

    Attributes:
        calls: The graph's calls.
        results: What the method returned.
    """

    calls: list[Call]
    results: list[Any]

    @property
    def graph(self) -> CompiledGraph:
        """The graph."""
        return self.calls[0][0]


@dataclass(frozen=True)
class Pipelining:
    """How a module's graphs become pipelines.

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
        """Names of the parameters that other ranks have, and this one has not."""
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
    """A method of a module whose graphs run on several ranks; the base of the two ways to train.

    Args:
        module: The module.
        name: The method.
        how: The schedule, and the rest.
        defer: Methods of the module whose calls are made after the step.
        plain: Whether the passes of callbacks are left out.

    Attributes:
        steps: The captured method, with the passes of the callbacks over its graphs.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        how: Pipelining,
        *,
        defer: tuple[str, ...] = (),
        plain: bool = False,
    ) -> None:
        self.module = module
        self.name = name
        self.how = how
        self._pipelines: dict[tuple[int, int], PipelinedGraph] = {}
        self._observed: dict[int, ObservedStages] = {}
        known = steps_of(module)
        if known is None or name not in known.steps or plain:
            known = PlainSteps(module, (name,), defer=defer)
        self.steps = known

    def rehearse(self, given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Rehearsal:
        """Call the method for every microbatch with its graph left out.

        Args:
            given: Arguments of the calls.

        Raises:
            NotOneGraphError: If a call is not one graph, or the calls are not the same graph.
        """
        # What runs beside the graph sees stand-ins, and will run once more.
        with restoring(self.module, numbers=False):
            return self._rehearse(given)

    def _rehearse(self, given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Rehearsal:
        step = self.steps.steps[self.name]
        calls: list[Call] = []
        results: list[Any] = []

        def record(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
            calls.append((graph, inputs, example_outputs(graph.base)))
            return calls[-1][2]

        for args, kwargs in given:
            before = num_graph_breaks()
            try:
                results.append(step.rehearse(record, *args, **kwargs))
            except Exception as error:
                # Such as the logarithm of a value that a rehearsal does not have.
                if found := graph_breaks_since(before):
                    raise self._not_one_graph("; ".join(dict.fromkeys(found))) from error
                raise
            # After a graph break the step may look at values, and the rehearsal has none.
            breaks = list(dict.fromkeys(step.graph_breaks))
            if breaks or len(calls) != len(results) or calls[-1][0] is not calls[0][0]:
                reason = "it was another one for the next, so it reads what it changes: a counter"
                if len(calls) != len(results):
                    reason = f"{len(calls)} graphs ran for {len(results)} microbatches"
                raise self._not_one_graph("; ".join(breaks) or reason)
        return Rehearsal(calls, results)

    def _not_one_graph(self, reasons: str) -> NotOneGraphError:
        return NotOneGraphError(
            f"{type(self.module).__name__}.{self.name} is not one graph for every microbatch "
            f"({reasons}); expected tensor operations without branches on values, counters, "
            "printing or third-party calls between them; keep those out of it."
        )

    def inputs_of(self, rehearsal: Rehearsal) -> list[list[Any]]:
        """The flat inputs of the pipeline for every microbatch."""
        known = self._pipelines[_key(rehearsal.graph)]
        given = [known.rewritten.values(one[1]) for one in rehearsal.calls]
        return [[one[place] for place in known.inputs] for one in given]

    def runner_for(self, rehearsal: Rehearsal, loss: int | None) -> PipelineRunner:
        """The pipeline of a graph; made when it first runs.

        Args:
            rehearsal: The graph, with its inputs.
            loss: Position of the loss among the graph's outputs.

        Raises:
            RuntimeError: If parameters would move to other ranks.
        """
        key = _key(rehearsal.graph)
        if key not in self._pipelines:
            self._pipelines[key] = self._cut(rehearsal, loss)
        runner = self._pipelines[key].runner
        runner.num_accumulated = self.how.num_accumulated()
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
        if outputs is not None:
            values = batches.combined(outputs)
        else:
            values = batches.combined_like(examples, count)
        for place, one in enumerate(values):
            if isinstance(one, Tensor):
                values[place] = one.contiguous()
                dist.broadcast(values[place], group=self.how.group, group_src=runner.last_rank)
        return values

    def observed_stages(self, rehearsal: Rehearsal) -> ObservedStages:
        """The stages of a graph with the probes of all passes; made when it is first observed."""
        known = self._pipelines[_key(rehearsal.graph)]
        if id(known) not in self._observed:
            self._observed[id(known)] = ObservedStages(
                known.runner.pipe,
                known.rewritten.graph,
                self.steps.passes,
                self.how.ownership.rank_of,
                self.how.group,
            )
        return self._observed[id(known)]

    def _cut(self, rehearsal: Rehearsal, loss: int | None) -> PipelinedGraph:
        rewritten = RewrittenGraph(rehearsal.graph)
        values = rewritten.examples(rehearsal.calls[0][1])
        ownership, replicas = self.how.ownership, self.how.replicas
        is_first = not ownership.is_settled
        if is_first and replicas.rank > 0:
            ownership.adopt(replicas.of_first(None))
        program, own = program_of_step(
            rewritten.graph.graph_module, rewritten.inputs, self.module, values, loss
        )
        has_marks = cut_by(program, None, required=False)
        if not has_marks:
            policy = ownership.policy() if ownership.is_settled else self.how.policy
            cut_by(program, policy, required=True)
        pipe = build_pipe(program, self.module, lambda name: MultiUseParameterConfig.REPLICATE)
        if is_first:
            check_same_cuts(pipe, self.how.group)
        runner = PipelineRunner(
            pipe,
            self.how.schedule,
            num_microbatches=self.how.num_microbatches,
            device=self.how.device,
            group=self.how.group,
        )
        ownership.note(pipe)
        if is_first and replicas.rank == 0:
            replicas.of_first(ownership.stages)
        # A replica that this graph does not use must not fall behind the others.
        rank = dist.get_rank(self.how.group)
        owned = ownership.parameters_of(rank)
        runner.shared = SharedGradients(owned, ownership.replicas(), self.how.group)
        return PipelinedGraph(rehearsal.graph, rewritten, own, runner)


def _key(graph: CompiledGraph) -> tuple[int, int]:
    """A graph, as its passes rewrite it now."""
    return id(graph), graph.num_rewrites
