"""Run a module's method as a pipeline: its graph is captured, and cut alike on every rank.

A call with each microbatch is stopped where it reaches the graph, which gives the graph's inputs;
then the pipeline runs. The step is called once more with the pipeline's results in the graph's
place, and what it logs and returns is made of them. Dynamo guards the Python state that the method
reads, and recaptures the graph when that changes.

Each rank captures and cuts for itself, from the same module and batch and by constants, so they
agree. They are compared all the same: where they differed (Python code that asks for its rank,
other versions), tensors of one shape could silently reach the wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_unitscale.capture.compiled_graph import (
    CompiledGraph,
    GraphCall,
    Interpreter,
    NotOneGraphError,
)
from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.pipeline.batch_facts import Fact, joined
from lightning_unitscale.pipeline.batchwise import compare_graphs
from lightning_unitscale.pipeline.called import Arguments, CalledSteps
from lightning_unitscale.pipeline.capture import (
    StepProgram,
    example_outputs,
    program_of_step,
)
from lightning_unitscale.pipeline.cuts import SplitPolicy, cut_by, num_marks
from lightning_unitscale.pipeline.engine import PipelineRunner
from lightning_unitscale.pipeline.observed import ObservedStages
from lightning_unitscale.pipeline.ownership import Ownership, SharedGradients
from lightning_unitscale.pipeline.pipe import build_pipe
from lightning_unitscale.pipeline.whole_batch import WholeBatch
from lightning_unitscale.strategies.checks import check_same_cuts
from lightning_unitscale.strategies.grid import Replicas
from lightning_unitscale.strategies.remat import StageRun


class NotPipelinedError(RuntimeError):
    """A method of the module cannot run as a pipeline; nothing of it has run."""


class PlainSteps(CalledSteps):
    """Captures the user's own methods, where callbacks have captured them with their passes."""

    @override
    def original(self, name: str) -> Callable[..., Any]:
        """The user's own method, even where a captured step has replaced it."""
        steps = steps_of(self.module)
        if steps is None or name not in steps.steps:
            return super().original(name)
        return steps.original(name)


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
        before_stage: Called with the index of a microbatch before a stage runs it.
    """

    schedule: str
    num_microbatches: int
    policy: SplitPolicy
    device: torch.device
    group: dist.ProcessGroup | None
    ownership: Ownership
    replicas: Replicas
    num_accumulated: Callable[[], int]
    free_unowned: bool
    before_stage: Callable[[int], None]

    @property
    def owned(self) -> set[str]:
        """Names of the parameters that this rank has."""
        return self.ownership.names[dist.get_rank(self.group)]

    @property
    def freed(self) -> set[str]:
        """Names of the parameters whose memory is freed here: only other ranks have them."""
        names = set[str]().union(*self.ownership.names) - self.owned
        return names if self.free_unowned else set()

    @property
    def stepped_elsewhere(self) -> set[str]:
        """Names of the parameters that other pipelines step for this one."""
        return {n for n, rank in self.ownership.steppers.items() if rank != self.replicas.rank}


@dataclass
class PipelinedGraph:
    """A graph that runs as a pipeline.

    Attributes:
        graph: The captured graph; kept, so that its identity stays its own.
        whole: That of a whole batch, of which the results are made.
        batch: What the stages need to know of a whole batch, if that is several microbatches.
        step: What was cut.
        runner: The pipeline.
        observed: The stages with the probes of all passes, once a step was observed.
        planned: The stages within a memory budget, once a step has run in one.
    """

    graph: CompiledGraph
    whole: CompiledGraph
    batch: WholeBatch | None
    step: StepProgram
    runner: PipelineRunner
    observed: ObservedStages | None = None
    planned: Mapping[int, StageRun] | None = None

    def inputs(self, calls: Sequence[GraphCall]) -> list[list[Any]]:
        """The flat inputs of the pipeline for every microbatch."""
        return [self.step.inputs(call) for call in calls]

    def shared_results(self, outputs: Sequence[Any] | None, count: int) -> list[Any]:
        """The combined results of ``count`` microbatches, on all ranks: each of them logs."""
        values = self.joined(outputs or [example_outputs(self.graph.base)] * count)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                values[index] = value.contiguous()
                group, last_rank = self.runner.group, self.runner.last_rank
                dist.broadcast(values[index], group=group, group_src=last_rank)
        return values

    def joined(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        """The results of the batch, from those of each microbatch."""
        facts = self.relations or [None] * len(outputs[0])
        return [joined(list(each), fact) for *each, fact in zip(*outputs, facts, strict=True)]

    @property
    def relations(self) -> list[Fact | None]:
        """How the results of the microbatches relate to those of the batch."""
        if self.batch is None:
            return []
        return self.batch.relations(self.step.program.loss)

    def replaying(self, values: list[Any]) -> Interpreter:
        """Runs no graph, but returns the pipeline's results for it."""

        def replay(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
            if graph is not self.whole:
                raise RuntimeError(
                    f"{self.step.step_graph.step}: another graph ran with the pipeline's results "
                    "than without them; expected a step whose course does not depend on how often "
                    "it is called; keep counters of calls out of it."
                )
            return values

        return replay


class PipelinedMethod:
    """A method of a module whose graphs run on several ranks.

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
        # A graph, as its passes rewrite it now, and that of the whole batch.
        self._pipelines: dict[tuple[int, int, int], PipelinedGraph] = {}
        steps = steps_of(module)
        if steps is None or name not in steps.steps or plain:
            steps = PlainSteps(module, (name,), defer=defer)
        self.steps = steps

    def graph_calls(self, arguments: Sequence[Arguments]) -> list[GraphCall]:
        """The call of the method's one graph for every microbatch; nothing of it has run then."""
        calls: list[GraphCall] = []
        for each in arguments:
            calls.append(self._graph_call(each))
            if calls[-1].graph is not calls[0].graph:
                raise self._not_one_graph("it is another one for the next microbatch")
        return calls

    def whole_call(self, arguments: Arguments, calls: Sequence[GraphCall]) -> GraphCall:
        """The call of the method's one graph for a whole batch."""
        return calls[0] if len(calls) == 1 else self._graph_call(arguments)

    def _graph_call(self, arguments: Arguments) -> GraphCall:
        args, kwargs = arguments
        try:
            return self.steps.steps[self.name].graph_call(*args, **kwargs)
        except NotOneGraphError as error:
            raise self._not_one_graph(str(error)) from None

    def _not_one_graph(self, reasons: str) -> NotPipelinedError:
        return NotPipelinedError(
            f"{type(self.module).__name__}.{self.name} is not one graph for every microbatch "
            f"({reasons}); expected tensor operations without branches on values, counters, "
            "printing or third-party calls between them; keep those out of it."
        )

    def pipelined(
        self,
        calls: Sequence[GraphCall],
        whole: GraphCall,
        loss: Callable[[], int] | None = None,
        *,
        is_exact: bool = True,
    ) -> PipelinedGraph:
        """The pipeline of a graph; made when it first runs."""
        call = calls[0]
        key = id(call.graph), call.graph.num_rewrites, id(whole.graph)
        if key not in self._pipelines:
            position = None if loss is None else loss()
            batch = None
            if len(calls) > 1:
                batch = WholeBatch(compare_graphs(call, whole, len(calls)))
                if is_exact and (reason := batch.why_not(call, position)):
                    raise self._not_exact(reason)
            self._pipelines[key] = self._cut(call, whole, position, batch)
        graph = self._pipelines[key]
        if graph.batch is not None:
            graph.batch.note(whole)
        graph.runner.num_accumulated = self.pipelining.num_accumulated()
        return graph

    def _not_exact(self, reason: str) -> NotPipelinedError:
        return NotPipelinedError(
            f"{type(self.module).__name__}.{self.name} does not give the loss of the batch by "
            f"microbatches: {reason}. Expected sums and means over samples or tokens; otherwise "
            "compute the loss in training_step, of what one module returns (capture='forward')."
        )

    def _cut(
        self, call: GraphCall, whole: GraphCall, loss: int | None, batch: WholeBatch | None
    ) -> PipelinedGraph:
        step = program_of_step(call, self.module, loss, batch)
        pipelining = self.pipelining
        ownership, replicas, group = pipelining.ownership, pipelining.replicas, pipelining.group
        is_first = not ownership.is_settled
        if is_first and replicas.rank > 0:
            ownership.adopt(replicas.of_first(None))
        if not num_marks(step.program):
            is_settled = ownership.is_settled
            cut_by(step.program, ownership.policy() if is_settled else pipelining.policy)
        pipe = build_pipe(step.program, self.module)
        if is_first:
            check_same_cuts(pipe, group)
        runner = PipelineRunner(
            pipe,
            pipelining.schedule,
            num_microbatches=pipelining.num_microbatches,
            device=pipelining.device,
            group=group,
        )
        runner.before_stage = pipelining.before_stage
        ownership.note(pipe)
        if is_first and replicas.rank == 0:
            replicas.of_first(ownership.stages)
        # A replica that this graph does not use must not fall behind the others.
        owned = ownership.parameters_of(dist.get_rank(group))
        runner.shared = SharedGradients(owned, ownership.replicas(), group)
        return PipelinedGraph(call.graph, whole.graph, batch, step, runner)
