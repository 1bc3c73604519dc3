"""Run ``training_step`` as a pipeline, with its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_unitscale.capture.compiled_graph import (
    GraphCall,
)
from lightning_unitscale.pipeline.capture import (
    loss_position,
    static_shapes,
)
from lightning_unitscale.pipeline.observed import ObservedStages
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.remat.api import Granted, StepPartitioner
from lightning_unitscale.strategies.method import PipelinedGraph, PipelinedMethod, Pipelining
from lightning_unitscale.strategies.remat import StageRun, remat_stages

_NAME = "training_step"


class PipelinedStep(PipelinedMethod):
    """A ``training_step`` whose graph runs on several ranks."""

    def __init__(
        self,
        module: nn.Module,
        pipelining: Pipelining,
        cut_context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(module, _NAME, pipelining, defer=("log", "log_dict"))
        self._cut_context = cut_context
        self._granted: dict[int, Granted] = {}

    def attach(self) -> None:
        """Capture the module's step from now on."""
        self.steps.attach(type(self).__name__)

    def detach(self) -> None:
        """Give the module its own step back. Idempotent."""
        self.steps.detach(type(self).__name__)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch; the result of the step for it."""
        step = self.steps.steps[_NAME]
        parts = split_evenly(batch, self.pipelining.num_microbatches)
        # What occurs twice in the batch is two inputs, as in its parts.
        (batch,) = split_evenly(batch, 1)
        with static_shapes():
            calls = self.graph_calls([((part, *args), kwargs) for part in parts])
            whole = self.whole_call(((batch, *args), kwargs), calls)
            graph = self.pipelined(
                calls, whole, lambda: self._loss(calls[0], parts[0], args, kwargs)
            )
            for graph_pass in self.steps.passes:
                graph_pass.before_step(self.module)
            inputs = graph.inputs(calls)
            # A budget that is refused leaves the module as it is.
            planned = self._planned(graph, inputs[0])
            with self._cut_context():
                outputs = self._run(graph, inputs, planned)
                step.interpreter = graph.replaying(graph.shared_results(outputs, len(parts)))
                try:
                    return step(batch, *args, **kwargs)
                finally:
                    step.interpreter = None

    def _run(
        self, graph: PipelinedGraph, inputs: list[list[Any]], planned: Mapping[int, StageRun]
    ) -> list[Any] | None:
        if not self.steps.observed:
            return graph.runner.step_flat(inputs, replaced=planned)
        graph.observed = observed = graph.observed or ObservedStages(
            graph.runner.pipe,
            graph.step.step_graph,
            self.steps.passes,
            self.pipelining.ownership.rank_of,
            self.pipelining.group,
        )
        observed.begin()
        outputs = graph.runner.step_flat(inputs, replaced=observed.run)
        observed.finish()
        return outputs

    def _planned(self, graph: PipelinedGraph, microbatch: list[Any]) -> Mapping[int, StageRun]:
        """The stages within a memory budget, if there is one."""
        partitioner = self.steps.partition_fn
        if not isinstance(partitioner, StepPartitioner):
            return {}
        if graph.planned is None:
            graph.planned = remat_stages(
                graph.runner,
                microbatch,
                partitioner,
                self.module,
                self.pipelining.freed,
                self.pipelining.stepped_elsewhere,
                self._granted,
                self.steps.rewriter,
            )
        return graph.planned

    def _loss(
        self, call: GraphCall, part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> int:
        position = loss_position(self.steps.steps[_NAME], call, (part, *args), kwargs)
        if position is None:
            raise RuntimeError(
                f"{type(self.module).__name__}.{_NAME} returns no result of its captured graph; "
                "expected the loss, or a dict with the key 'loss'."
            )
        return position
