"""Run a module's method as a pipeline. Every rank captures and cuts the same graph.

:class:`PipelinedStep` runs ``training_step`` with its loss. :class:`PipelinedEvaluation` runs a
step without gradients.

The method is called with each microbatch and stopped at the graph. This gives the graph's inputs.
Then the pipeline runs. The method is called once more with the pipeline's results, and logs and
returns values of the whole batch. Dynamo guards the Python state that the method reads, and
recaptures the graph when that changes.

Each rank captures and cuts for itself. The module, the batch and all constants are the same, so the
ranks agree. We still compare them: with rank-dependent code or other versions, tensors of one shape
could silently reach the wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_unitscale.capture.dynamo_capture import static_shapes
from lightning_unitscale.capture.graph_variants import (
    GraphCall,
    GraphVariants,
    Interpreter,
    NotOneGraphError,
)
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.matmuls.scaled_methods import begin_microbatch
from lightning_unitscale.memory.remat_module import StepPartitioner
from lightning_unitscale.patching import nothing
from lightning_unitscale.pipeline import captured_program
from lightning_unitscale.pipeline.batch_rules import Fact
from lightning_unitscale.pipeline.batchwise import compare_graphs
from lightning_unitscale.pipeline.checks import check_same_cuts
from lightning_unitscale.pipeline.cuts import cut_by, num_marks
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.pipeline.engine import PipelineRunner, Replaced
from lightning_unitscale.pipeline.pipe import build_pipe
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.pipeline.stage_owners import SharedGradients
from lightning_unitscale.pipeline.stage_variants import ObservedStages, remat_stages
from lightning_unitscale.pipeline.whole_batch import WholeBatch, joined

_NAME = "training_step"
# Limit on graphs for batches of one size. Each has to be captured and cut.
_MAX_ALIKE = 4


class NotPipelinedError(RuntimeError):
    """Raised before a method runs, if it cannot run as a pipeline."""

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"{reason} {advice}".rstrip())
        self.reason = reason


@dataclass
class PipelinedGraph:
    """A graph that runs as a pipeline."""

    # The graph of a microbatch. It is kept so that no other graph can reuse its id.
    graph: GraphVariants
    whole: GraphVariants  # the graph of the whole batch, whose results are replayed
    batch: WholeBatch | None  # values of the whole batch for the stages, with several microbatches
    step: captured_program.StepProgram
    runner: PipelineRunner
    # The stages with the probes of all passes, after an observed step.
    observed: ObservedStages | None = None
    planned: Replaced | None = None  # the stages within a memory budget, after a planned step

    def inputs(self, calls: Sequence[GraphCall]) -> list[list[Any]]:
        """Return the flat inputs of the pipeline for every microbatch."""
        return [self.step.inputs(call) for call in calls]

    def shared_results(self, outputs: Sequence[Any] | None, count: int) -> list[Any]:
        """Return the joined results of ``count`` microbatches on all ranks, which all log."""
        values = self.joined(outputs or [captured_program.example_outputs(self.graph.base)] * count)
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

        def replay(graph: GraphVariants, inputs: tuple[Any, ...]) -> Any:
            if graph is not self.whole:
                raise RuntimeError(
                    f"{self.step.step_graph.step} ran a different graph the second time. A "
                    "pipeline calls it more than once for a batch. Keep counters of calls out of "
                    "it."
                )
            return values

        return replay


class PipelinedMethod:
    """A method of a module whose graphs run on several ranks."""

    def __init__(
        self, name: str, strategy: GridStrategy, *, defer: tuple[str, ...] = (), plain: bool = False
    ) -> None:
        self.module = module = strategy.own_module
        self.name = name
        self.strategy = strategy
        self._is_set_up = False
        # By the graph, the number of rewrites by its passes, and the graph of the whole batch.
        self._pipelines: dict[tuple[int, int, int], PipelinedGraph] = {}
        # The captured method, with the callbacks' passes over its graphs unless ``plain``.
        steps = None if plain else steps_of(module)
        if steps is None or name not in steps.steps:
            steps = captured_program.CalledSteps(module, (name,), defer=defer, like=steps)
        self.steps = steps

    def sets_up(self, run: Callable[[], object]) -> bool:
        """Run code of the module uncaptured, once, and return whether that set anything up."""
        if self._is_set_up:
            return False
        self._is_set_up = True
        return captured_program.sets_up(self.steps, run)

    def graph_calls(
        self, parts: Sequence[captured_program.Arguments], whole: captured_program.Arguments
    ) -> tuple[list[GraphCall], GraphCall]:
        """Return the calls of the method's one graph, for the microbatches and for the batch."""
        # No part of the method has run yet.
        step, calls = self.steps.steps[self.name], list[GraphCall]()
        try:
            for args, kwargs in parts:
                calls.append(step.graph_call(*args, **kwargs))
                if calls[-1].graph is not calls[0].graph:
                    raise NotOneGraphError("the next microbatch has a different graph")
            args, kwargs = whole
            return calls, calls[0] if len(calls) == 1 else step.graph_call(*args, **kwargs)
        except NotOneGraphError as error:
            raise NotPipelinedError(
                f"{type(self.module).__name__}.{self.name} is not one graph for every microbatch "
                f"({error}).",
                "A pipeline is cut from one graph of tensor operations. Keep branches on values, "
                "counters, printing and third-party calls out of it.",
            ) from None

    def pipelined(
        self,
        calls: Sequence[GraphCall],
        whole: GraphCall,
        loss: Callable[[], int] | None = None,
        *,
        is_exact: bool = True,
    ) -> PipelinedGraph:
        """Return the pipeline of a graph, and make it at the first call."""
        call = calls[0]
        key = id(call.graph), call.graph.num_rewrites, id(whole.graph)
        if key not in self._pipelines:
            position = None if loss is None else loss()
            batch = None
            if len(calls) > 1:
                batch = WholeBatch(compare_graphs(call, whole, len(calls)))
                if is_exact and (reason := batch.why_not(call, position)):
                    raise NotPipelinedError(
                        f"{type(self.module).__name__}.{self.name}: the loss of the batch cannot "
                        f"be computed from microbatches: {reason}.",
                        "The loss has to consist of sums and means over samples or tokens. "
                        "Otherwise compute it in training_step, from the result of one module "
                        "(capture='forward').",
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
        step = captured_program.program_of_step(
            call, self.module, loss, batch.rewrite if batch else nothing
        )
        strategy, ownership = self.strategy, self.strategy.ownership
        replicas, group = strategy.grid.replicas, strategy.grid.pipeline
        is_first = not ownership.is_settled
        if is_first and replicas.rank > 0:
            ownership.adopt(replicas.of_first(None))
        if not num_marks(step.program):
            cut_by(step.program, ownership.policy())
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

    def run(
        self,
        graph: PipelinedGraph,
        inputs: list[list[Any]],
        finish: Callable[..., Any] | None = None,
        planned: Replaced | None = None,
    ) -> list[Any] | None:
        """Run forward and backward of all microbatches, with probes in an observed step."""
        if not self.steps.observed:
            return graph.runner.step_flat(inputs, finish, replaced=planned)
        graph.observed = observed = graph.observed or ObservedStages(
            graph.runner, graph.step.step_graph, self.steps.passes, self.strategy.ownership.rank_of
        )
        observed.begin()
        outputs = graph.runner.step_flat(inputs, finish, replaced=observed.run)
        observed.finish()
        return outputs


class PipelinedStep(PipelinedMethod):
    """A ``training_step`` whose graph runs on several ranks."""

    def __init__(
        self, strategy: GridStrategy, cut_context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(_NAME, strategy, defer=captured_program.LOGS)
        self._cut_context = cut_context
        self.steps.attach(type(self).__name__)

    def detach(self) -> None:
        """Restore the module's own step. Idempotent."""
        self.steps.detach(type(self).__name__)

    def set_up(self, batch: Any, *args: Any, **kwargs: Any) -> bool:
        """Run a step that is not one graph, and return whether that set anything up."""
        # If so, the step may be one graph now.
        if self.strategy.ownership.is_settled:
            return False
        part = split_evenly(batch, self.strategy.num_microbatches)[0]
        return self.sets_up(partial(self.steps.original(_NAME), part, *args, **kwargs))

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch, and return the step's result for it."""
        step = self.steps.steps[_NAME]
        parts = split_evenly(batch, self.strategy.num_microbatches)
        # Here and in the parts of a batch, a tensor that occurs twice becomes two inputs.
        (batch,) = split_evenly(batch, 1)
        with static_shapes():
            calls, whole = self.graph_calls(
                [((part, *args), kwargs) for part in parts], ((batch, *args), kwargs)
            )

            def loss() -> int:
                position = captured_program.loss_position(step, calls[0], (parts[0], *args), kwargs)
                if position is None:
                    raise RuntimeError(
                        f"{type(self.module).__name__}.{_NAME} returns no result of its captured "
                        "graph. Return the loss, or a dict with the key 'loss'."
                    )
                return position

            graph = self.pipelined(calls, whole, loss)
            for graph_pass in self.steps.passes:
                graph_pass.before_step(self.module)
            inputs = graph.inputs(calls)
            # Before any memory is freed: a refused budget leaves the module unchanged.
            planned = self._planned(graph, inputs[0])
            with self._cut_context():
                outputs = self.run(graph, inputs, planned=planned)
                step.interpreter = graph.replaying(graph.shared_results(outputs, len(parts)))
                try:
                    return step(batch, *args, **kwargs)
                finally:
                    step.interpreter = None

    def _planned(self, graph: PipelinedGraph, microbatch: list[Any]) -> Replaced:
        """Return the stages within the memory budget, none without a budget."""
        if graph.planned is None and isinstance(self.steps.partition_fn, StepPartitioner):
            graph.planned = remat_stages(graph.runner, microbatch, self.steps, self.strategy)
        return graph.planned or {}


class PipelinedEvaluation(PipelinedMethod):
    """A step without a backward pass, whose graph runs on several ranks."""

    def __init__(self, name: str, strategy: GridStrategy, num_microbatches: int) -> None:
        # Plain: a step that callbacks rewrite into another function does not run as a pipeline.
        super().__init__(name, strategy, defer=captured_program.LOGS, plain=True)
        self._num_microbatches = num_microbatches
        # By the shapes of the inputs.
        self._graphs_for: dict[tuple[torch.Size, ...], dict[int, GraphVariants]] = {}

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the step for a batch, on all ranks."""
        count = self._num_microbatches
        parts = [batch] if count == 1 else split_evenly(batch, count)
        if count > 1:
            (batch,) = split_evenly(batch, 1)
        with static_shapes():
            calls, whole = self.graph_calls(
                [((part, *args), kwargs) for part in parts], ((batch, *args), kwargs)
            )
            sizes = tuple(value.shape for value in calls[0].inputs if isinstance(value, Tensor))
            graphs = self._graphs_for.setdefault(sizes, {})
            graphs[id(calls[0].graph)] = calls[0].graph
            if len(graphs) > _MAX_ALIKE:
                raise NotPipelinedError(
                    f"{type(self.module).__name__}.{self.name} was captured as {len(graphs)} "
                    "graphs for batches of one size. A pipeline needs one. Keep counters of calls "
                    "out of it."
                )
            try:
                graph = self.pipelined(calls, whole, is_exact=False)
            except (RuntimeError, ValueError) as error:
                # It uses parameters in another order than the training, or has too few cuts.
                raise NotPipelinedError(
                    f"{type(self.module).__name__}.{self.name} cannot be cut into the stages of "
                    f"training: {error}"
                ) from error
            values = graph.shared_results(graph.runner.eval_flat(graph.inputs(calls)), count)
            replay = graph.replaying(values)
            return self.steps.steps[self.name].replay(replay, batch, *args, **kwargs)
