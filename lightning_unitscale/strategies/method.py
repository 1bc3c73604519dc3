"""Run a module's method as a pipeline: its graph is captured, and cut alike on every rank.

The method is called with each microbatch and stopped when it reaches the graph, which gives the
graph's inputs. Then the pipeline runs. The method is called once more with the pipeline's results
in the graph's place, and logs and returns values of the whole batch. Dynamo guards the Python state
that the method reads, and recaptures the graph when that changes.

Each rank captures and cuts for itself, from the same module and batch and by constants, so they
agree. They are compared all the same: if they differed (Python code that asks for its rank, other
versions), tensors of one shape could silently reach the wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_unitscale.capture.compiled_graph import (
    CompiledGraph,
    GraphCall,
    Interpreter,
    NotOneGraphError,
)
from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.dispatch.attach import begin_microbatch
from lightning_unitscale.pipeline.batch_facts import Fact, joined
from lightning_unitscale.pipeline.batchwise import compare_graphs
from lightning_unitscale.pipeline.called import Arguments, CalledSteps
from lightning_unitscale.pipeline.capture import StepProgram, example_outputs, program_of_step
from lightning_unitscale.pipeline.cuts import cut_by, num_marks
from lightning_unitscale.pipeline.engine import PipelineRunner, Replaced
from lightning_unitscale.pipeline.observed import ObservedStages
from lightning_unitscale.pipeline.ownership import SharedGradients
from lightning_unitscale.pipeline.pipe import build_pipe
from lightning_unitscale.pipeline.whole_batch import WholeBatch
from lightning_unitscale.strategies.checks import check_same_cuts
from lightning_unitscale.strategies.grid import GridStrategy


class NotPipelinedError(RuntimeError):
    """A method of the module cannot run as a pipeline; nothing of it has run."""


@dataclass
class PipelinedGraph:
    """A graph that runs as a pipeline."""

    # The graph of a microbatch; kept, so that no other graph gets its id.
    graph: CompiledGraph
    # The graph of the whole batch, whose results are replayed.
    whole: CompiledGraph
    # Values of the whole batch for the stages, if it has several microbatches.
    batch: WholeBatch | None
    step: StepProgram
    runner: PipelineRunner
    # The stages with the probes of all passes, once a step was observed.
    observed: ObservedStages | None = None
    # The stages within a memory budget, once a step has run in one.
    planned: Replaced | None = None

    def inputs(self, calls: Sequence[GraphCall]) -> list[list[Any]]:
        """Return the flat inputs of the pipeline for every microbatch."""
        return [self.step.inputs(call) for call in calls]

    def shared_results(self, outputs: Sequence[Any] | None, count: int) -> list[Any]:
        """Return the joined results of ``count`` microbatches on all ranks, which all log."""
        values = self.joined(outputs or [example_outputs(self.graph.base)] * count)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                values[index] = value.contiguous()
                group, last_rank = self.runner.group, self.runner.last_rank
                dist.broadcast(values[index], group=group, group_src=last_rank)
        return values

    def joined(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Join the results of the microbatches into those of the batch."""
        facts: Sequence[Fact | None] = [None] * len(outputs[0])
        if self.batch is not None:
            facts = self.batch.relations(self.step.program.loss)
        return [joined(list(each), fact) for *each, fact in zip(*outputs, facts, strict=True)]

    def replaying(self, values: list[Any]) -> Interpreter:
        """Return an interpreter that returns the pipeline's results instead of running a graph."""

        def replay(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
            if graph is not self.whole:
                raise RuntimeError(
                    f"{self.step.step_graph.step} ran another graph the second time. A pipeline "
                    "calls it more than once for a batch. Keep counters of calls out of it."
                )
            return values

        return replay


class PipelinedMethod:
    """A method of a module whose graphs run on several ranks."""

    def __init__(
        self,
        name: str,
        strategy: GridStrategy,
        *,
        defer: tuple[str, ...] = (),
        plain: bool = False,
    ) -> None:
        self.module = module = strategy.own_module
        self.name = name
        self.strategy = strategy
        # By the graph, how often its passes were rewritten, and the graph of the whole batch.
        self._pipelines: dict[tuple[int, int, int], PipelinedGraph] = {}
        # The captured method, with the passes of the callbacks over its graphs unless ``plain``.
        steps = steps_of(module)
        if steps is None or name not in steps.steps or plain:
            steps = CalledSteps(module, (name,), defer=defer)
        self.steps = steps

    def graph_calls(
        self, parts: Sequence[Arguments], whole: Arguments
    ) -> tuple[list[GraphCall], GraphCall]:
        """Return the calls of the method's one graph for the microbatches and for the batch.

        Nothing of the method has run then.
        """
        calls: list[GraphCall] = []
        for arguments in parts:
            calls.append(self._graph_call(arguments))
            if calls[-1].graph is not calls[0].graph:
                raise self._not_one_graph("it is another one for the next microbatch")
        return calls, calls[0] if len(calls) == 1 else self._graph_call(whole)

    def _graph_call(self, arguments: Arguments) -> GraphCall:
        args, kwargs = arguments
        try:
            return self.steps.steps[self.name].graph_call(*args, **kwargs)
        except NotOneGraphError as error:
            raise self._not_one_graph(str(error)) from None

    def _not_one_graph(self, reasons: str) -> NotPipelinedError:
        return NotPipelinedError(
            f"{type(self.module).__name__}.{self.name} is not one graph for every microbatch "
            f"({reasons}). A pipeline is cut from one graph of tensor operations. Keep branches on "
            "values, counters, printing and third-party calls out of it."
        )

    def pipelined(
        self,
        calls: Sequence[GraphCall],
        whole: GraphCall,
        loss: Callable[[], int] | None = None,
        *,
        is_exact: bool = True,
    ) -> PipelinedGraph:
        """Return the pipeline of a graph, which is made when it first runs."""
        call = calls[0]
        key = id(call.graph), call.graph.num_rewrites, id(whole.graph)
        if key not in self._pipelines:
            position = None if loss is None else loss()
            batch = None
            if len(calls) > 1:
                batch = WholeBatch(compare_graphs(call, whole, len(calls)))
                if is_exact and (reason := batch.why_not(call, position)):
                    raise NotPipelinedError(
                        f"{type(self.module).__name__}.{self.name} does not give the loss of the "
                        f"batch by microbatches: {reason}. The loss has to consist of sums and "
                        "means over samples or tokens. Otherwise compute it in training_step, from "
                        "the result of one module (capture='forward')."
                    )
            self._pipelines[key] = self._cut(call, whole, position, batch)
        graph = self._pipelines[key]
        if graph.batch is not None:
            graph.batch.note(whole)
        graph.runner.num_accumulated = int(self.module.trainer.accumulate_grad_batches)
        return graph

    def _cut(
        self, call: GraphCall, whole: GraphCall, loss: int | None, batch: WholeBatch | None
    ) -> PipelinedGraph:
        step = program_of_step(call, self.module, loss, batch)
        strategy, ownership = self.strategy, self.strategy.ownership
        replicas, group = strategy.grid.replicas, strategy.grid.pipeline
        is_first = not ownership.is_settled
        if is_first and replicas.rank > 0:
            ownership.adopt(replicas.of_first(None))
        if not num_marks(step.program):
            is_settled = ownership.is_settled
            cut_by(step.program, ownership.policy() if is_settled else strategy.policy)
        pipe = build_pipe(step.program, self.module)
        if is_first:
            check_same_cuts(pipe, group)
        runner = PipelineRunner(
            pipe,
            strategy.schedule.name,
            num_microbatches=strategy.num_microbatches,
            device=strategy.root_device,
            group=group,
        )
        runner.before_stage = partial(begin_microbatch, self.module, "training_step")
        ownership.note(pipe)
        if is_first and replicas.rank == 0:
            replicas.of_first(ownership.stages)
        # All replicas: one that this graph does not use must get the same gradients.
        owned = ownership.parameters_of(dist.get_rank(group))
        runner.shared = SharedGradients(owned, ownership.replicas(), group)
        return PipelinedGraph(call.graph, whole.graph, batch, step, runner)
