"""Run a module's own step as a pipeline: its graph is captured, and cut, when it first runs.

The step is called once for each microbatch with the graph left out, which gives the graph's inputs;
then the pipeline runs; then the step is called once more with the pipeline's results in the graph's
place, and what it logs and returns is made of them. Dynamo guards the Python state that the step
reads, and the graph is captured anew when that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, fx

from lightning_unitscale.graph.compiled_graph import CompiledGraph
from lightning_unitscale.graph.steps import ModuleSteps
from lightning_unitscale.pipeline.flow import MultiUseParameterConfig
from lightning_unitscale.pipeline.front import build_pipe, cut_by
from lightning_unitscale.pipeline.ownership import Ownership
from lightning_unitscale.pipeline.runner import PipelineRunner
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.pipeline.shared import SharedGradients
from lightning_unitscale.pipeline.step_program import (
    example_outputs,
    program_of_step,
    static_shapes,
)
from lightning_unitscale.strategies import batches

# A graph, its inputs, and stand-ins for its outputs.
Call = tuple[CompiledGraph, tuple[Any, ...], list[Any]]
Policy = Callable[[fx.GraphModule], fx.GraphModule]
_NAME = "training_step"


class _Replay:
    """Puts the pipeline's results in the place of the one graph that they are of."""

    def __init__(self, graph: CompiledGraph, values: list[Any]) -> None:
        self._graph = graph
        self._values = values

    def __call__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
        if graph is not self._graph:
            raise RuntimeError(
                f"{_NAME}: another graph ran with the pipeline's results than without them; "
                "expected a step whose course does not depend on how often it is called; keep "
                "counters of calls out of it."
            )
        return self._values


class PipelinedStep:
    """A ``training_step`` whose graph runs on several ranks.

    Args:
        module: The module.
        schedule: Name of the schedule.
        num_microbatches: Microbatches of a batch.
        policy: Says where the graph is cut, if the code does not.
        device: Where this rank's stages run.
        group: The pipeline's process group.

    Attributes:
        ownership: Which ranks have which parameters.
        runners: The pipelines, one for each graph.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        schedule: str,
        num_microbatches: int,
        policy: Policy,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.module = module
        num_ranks = dist.get_world_size(group)
        self.ownership = Ownership(
            module, num_ranks, lambda stage: find_schedule(schedule).rank_of(stage, num_ranks)
        )
        self.runners: dict[int, PipelineRunner] = {}
        self._schedule = schedule
        self._num_microbatches = num_microbatches
        self._policy = policy
        self._device = device
        self._group = group
        self._graphs: list[CompiledGraph] = []
        self._inputs: dict[int, list[int]] = {}
        self._steps = ModuleSteps(module, (_NAME,), defer=("log", "log_dict"))

    def attach(self) -> None:
        """Capture the module's step from now on."""
        self._steps.attach(type(self).__name__)

    def detach(self) -> None:
        """Give the module its own step back. Idempotent."""
        self._steps.detach(type(self).__name__)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch; the result of the step for it.

        Raises:
            RuntimeError: If the step cannot be one graph, or returns no loss.
        """
        step = self._steps.steps[_NAME]
        parts = batches.split(batch, self._num_microbatches)
        calls: list[Call] = []

        def record(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
            calls.append((graph, inputs, example_outputs(graph.base)))
            return calls[-1][2]

        with static_shapes():
            results = [step.rehearse(record, part, *args, **kwargs) for part in parts]
            graph = self._one_graph([one[0] for one in calls])
            runner = self._runner_for(graph, calls[0], results[0])
            own = self._inputs[id(graph)]
            outputs = runner.step_flat([[one[1][place] for place in own] for one in calls])
            values = self._shared_results(runner, calls[0][2], outputs)
            step.interpreter = _Replay(graph, values)
            try:
                return step(parts[0], *args, **kwargs)
            finally:
                step.interpreter = None

    def _one_graph(self, graphs: list[CompiledGraph]) -> CompiledGraph:
        # After a graph break the step may look at values, and the rehearsal has none.
        breaks = list(dict.fromkeys(self._steps.graph_breaks))
        several = len(graphs) != self._num_microbatches or len(set(map(id, graphs))) > 1
        if breaks or several:
            reasons = "; ".join(breaks) or f"{len(graphs)} graphs ran"
            raise RuntimeError(
                f"{type(self.module).__name__}.{_NAME} is not one graph for every microbatch "
                f"({reasons}); expected tensor operations without branches on values, printing or "
                "third-party calls between them; keep those out of the step."
            )
        return graphs[0]

    def _runner_for(self, graph: CompiledGraph, call: Call, result: Any) -> PipelineRunner:
        if id(graph) in self.runners:
            return self.runners[id(graph)]
        loss = result["loss"] if isinstance(result, dict) else result
        found = [place for place, one in enumerate(call[2]) if one is loss]
        if not found:
            raise RuntimeError(
                f"{type(self.module).__name__}.{_NAME} returned {type(loss).__name__}, which is no "
                "result of its captured graph; expected the loss, or a dict with the key 'loss'."
            )
        program, own = program_of_step(graph.base, graph.inputs, self.module, call[1], found[0])
        has_marks = cut_by(program, None, required=False)
        if not has_marks:
            later = self.ownership.policy() if self.ownership.is_settled else self._policy
            cut_by(program, later, required=True)
        pipe = build_pipe(program, self.module, lambda name: MultiUseParameterConfig.REPLICATE)
        runner = PipelineRunner(
            pipe,
            self._schedule,
            num_microbatches=self._num_microbatches,
            device=self._device,
            group=self._group,
        )
        self.ownership.note(pipe)
        # A replica that this graph does not use must not fall behind the others.
        rank = dist.get_rank(self._group)
        owned = self.ownership.parameters_of(rank)
        runner.shared = SharedGradients(owned, self.ownership.replicas(), self._group)
        # Kept, so that its id stays its own.
        self._graphs.append(graph)
        self._inputs[id(graph)] = own
        self.runners[id(graph)] = runner
        return runner

    def _shared_results(
        self, runner: PipelineRunner, examples: list[Any], outputs: list[Any] | None
    ) -> list[Any]:
        """The combined results, on all ranks: each of them logs."""
        if outputs is not None:
            values = batches.combined(outputs)
        else:
            values = batches.combined_like(examples, self._num_microbatches)
        num_ranks = dist.get_world_size(self._group)
        last = runner.schedule.rank_of(runner.pipe.num_stages - 1, num_ranks)
        for place, one in enumerate(values):
            if isinstance(one, Tensor):
                values[place] = one.contiguous()
                dist.broadcast(values[place], group=self._group, group_src=last)
        return values
