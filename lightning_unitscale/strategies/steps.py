"""Run a whole step as a pipeline: ``training_step`` with its loss, or one without gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.capture.compiled_graph import CompiledGraph, GraphCall
from lightning_unitscale.pipeline.called import LOGS
from lightning_unitscale.pipeline.capture import loss_position, static_shapes
from lightning_unitscale.pipeline.engine import Replaced
from lightning_unitscale.pipeline.observed import ObservedStages
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.remat.api import Granted, StepPartitioner
from lightning_unitscale.strategies.grid import GridStrategy
from lightning_unitscale.strategies.method import (
    NotPipelinedError,
    PipelinedGraph,
    PipelinedMethod,
)
from lightning_unitscale.strategies.remat import remat_stages

_NAME = "training_step"
# Graphs for batches of one size, each of which has to be captured and cut.
_MAX_ALIKE = 4


class PipelinedStep(PipelinedMethod):
    """A ``training_step`` whose graph runs on several ranks."""

    def __init__(
        self, strategy: GridStrategy, cut_context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        super().__init__(_NAME, strategy, defer=LOGS)
        self._cut_context = cut_context
        self._granted: dict[int, Granted] = {}

    def attach(self) -> None:
        """Put the captured step on the module."""
        self.steps.attach(type(self).__name__)

    def detach(self) -> None:
        """Give the module its own step back. Idempotent."""
        self.steps.detach(type(self).__name__)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch, and return the result of the step for it."""
        step = self.steps.steps[_NAME]
        parts = split_evenly(batch, self.strategy.num_microbatches)
        # A tensor that occurs twice in the batch is two inputs, as in its parts.
        (batch,) = split_evenly(batch, 1)
        with static_shapes():
            calls, whole = self.graph_calls(
                [((part, *args), kwargs) for part in parts], ((batch, *args), kwargs)
            )
            graph = self.pipelined(
                calls, whole, lambda: self._loss(calls[0], parts[0], args, kwargs)
            )
            for graph_pass in self.steps.passes:
                graph_pass.before_step(self.module)
            inputs = graph.inputs(calls)
            # Before anything is freed: a budget that is refused leaves the module as it is.
            planned = self._planned(graph, inputs[0])
            with self._cut_context():
                outputs = self._run(graph, inputs, planned)
                step.interpreter = graph.replaying(graph.shared_results(outputs, len(parts)))
                try:
                    return step(batch, *args, **kwargs)
                finally:
                    step.interpreter = None

    def _run(
        self, graph: PipelinedGraph, inputs: list[list[Any]], planned: Replaced
    ) -> list[Any] | None:
        if not self.steps.observed:
            return graph.runner.step_flat(inputs, replaced=planned)
        graph.observed = observed = graph.observed or ObservedStages(
            graph.runner.pipe,
            graph.step.step_graph,
            self.steps.passes,
            self.strategy.ownership.rank_of,
            self.strategy.grid.pipeline,
        )
        observed.begin()
        outputs = graph.runner.step_flat(inputs, replaced=observed.run)
        observed.finish()
        return outputs

    def _planned(self, graph: PipelinedGraph, microbatch: list[Any]) -> Replaced:
        """Return the stages within a memory budget, if there is one."""
        if graph.planned is None and isinstance(self.steps.partition_fn, StepPartitioner):
            graph.planned = remat_stages(
                graph.runner, microbatch, self.steps, self.strategy, self._granted
            )
        return graph.planned or {}

    def _loss(
        self, call: GraphCall, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        position = loss_position(self.steps.steps[_NAME], call, (part, *args), kwargs)
        if position is None:
            raise RuntimeError(
                f"{type(self.module).__name__}.{_NAME} returns no result of its captured graph. "
                "Return the loss, or a dict with the key 'loss'."
            )
        return position


class PipelinedEvaluation(PipelinedMethod):
    """A step without a backward pass, whose graph runs on several ranks."""

    def __init__(self, name: str, strategy: GridStrategy, num_microbatches: int) -> None:
        # Plain: if callbacks make another function of the step, it does not run as a pipeline.
        super().__init__(name, strategy, defer=LOGS, plain=True)
        self._num_microbatches = num_microbatches
        # By the shapes of the inputs.
        self._graphs_for: dict[tuple[torch.Size, ...], dict[int, CompiledGraph]] = {}

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
            self._refuse_another_for_every_batch(calls[0])
            try:
                graph = self.pipelined(calls, whole, is_exact=False)
            except (RuntimeError, ValueError) as error:
                # It uses parameters in another order than the training, or allows too few cuts.
                raise NotPipelinedError(
                    f"{type(self.module).__name__}.{self.name} cannot be cut like the training: "
                    f"{error}"
                ) from error
            values = graph.shared_results(graph.runner.eval_flat(graph.inputs(calls)), count)
            replay = graph.replaying(values)
            return self.steps.steps[self.name].replay(replay, batch, *args, **kwargs)

    def _refuse_another_for_every_batch(self, call: GraphCall) -> None:
        sizes = tuple(value.shape for value in call.inputs if isinstance(value, Tensor))
        graphs = self._graphs_for.setdefault(sizes, {})
        graphs[id(call.graph)] = call.graph
        if len(graphs) > _MAX_ALIKE:
            raise NotPipelinedError(
                f"{type(self.module).__name__}.{self.name} was {len(graphs)} graphs for batches of "
                "one size. A pipeline captures one. Keep counters of calls out of it"
            )
