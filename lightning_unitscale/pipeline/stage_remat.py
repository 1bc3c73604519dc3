"""Plan rematerialization within a stage for the number of microbatches in flight.

A rank keeps the saved values of every microbatch in flight. Earlier stages have more of them. So a
rank's budget covers parameters, gradients, the optimizer's state and one pass. It also covers the
values that the stage saves, once for each microbatch in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from lightning_unitscale.capture.copy_graphs import add_placeholder, copy_graph_module
from lightning_unitscale.capture.executors import GraphRewriter, execute_with
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.loops.ranks import failing_together
from lightning_unitscale.memory.budgets import Budget, limit_of
from lightning_unitscale.memory.partitioner import RematPartitioner
from lightning_unitscale.memory.plan_report import RematReport
from lightning_unitscale.memory.planner import Planner, RematPlan
from lightning_unitscale.memory.problem import NodeRegion
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.real_memory import (
    gradient_bytes,
    optimizer_state_bytes,
    storage_bytes,
)
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.pipeline.engine import PipelineRunner
from lightning_unitscale.pipeline.stage import StageModule

_NUM_PLANS = 40

# Runs instead of a stage.
StageRun = Callable[..., Any]


class StagePartitioner(RematPartitioner):
    """A partitioner for the joint graph of one stage."""

    def __init__(
        self,
        budget: Budget,
        *,
        stage: int,
        num_in_flight: int,
        resident_bytes: int,
        sent_bytes: int,
        reports: list[RematReport],
    ) -> None:
        super().__init__(budget)
        self._resident_bytes = resident_bytes
        self._stage = stage
        self._num_in_flight = num_in_flight
        self._sent_bytes = sent_bytes
        self._reports = reports

    def resident_bytes(self, static_bytes: int) -> tuple[int, int, int]:
        """Return the bytes that are always alive, without the stage's own parameters."""
        return self._resident_bytes, 0, 0

    def choose(self, planner: Planner) -> RematPlan:
        """Return the fastest plan that keeps the rank within the budget."""
        plan = planner.min_cut if self.budget == "min_cut" else self._fastest(planner)
        self._reports.append(replace(RematReport.of(plan), peak_bytes=self.peak_bytes(plan)))
        return plan

    def peak_bytes(self, plan: RematPlan) -> int:
        """Return the rank's bytes at its peak: one pass, and the saved values of others."""
        problem = plan.problem
        computed = plan.saved & (problem.region != NodeRegion.INPUT)
        earlier = (self._num_in_flight - 1) * problem.saved_bytes(computed)
        return plan.peak_bytes + earlier + self._num_in_flight * self._sent_bytes

    def _fastest(self, planner: Planner) -> RematPlan:
        default = self.peak_bytes(planner.default)
        plans = [planner.default, *planner.front(_NUM_PLANS)]
        least = min(map(self.peak_bytes, plans))
        limit = limit_of(self.budget, default, lambda: least)
        fitting = [plan for plan in plans if self.peak_bytes(plan) <= limit]
        if not fitting:
            raise ValueError(
                f"budget={format_bytes(limit)} ({limit} bytes) is too small. Stage {self._stage} "
                f"keeps {self._num_in_flight} microbatches at once, and the smallest achievable "
                f"peak of its rank is {format_bytes(least)} ({least} bytes). Without "
                f"rematerialization it is {format_bytes(default)}. Raise the budget, or use more "
                "and smaller microbatches."
            )
        return min(fitting, key=lambda plan: (plan.seconds, self.peak_bytes(plan)))


def remat_stages(
    runner: PipelineRunner,
    microbatch: Sequence[Any],
    steps: ModuleSteps,
    strategy: GridStrategy,
) -> dict[int, StageRun]:
    """Plan a rank's stages, and return functions that replace them. Every rank calls it."""
    partitioner, num_microbatches = steps.partition_fn, runner.num_microbatches
    runs = {}
    with failing_together(runner.group):
        for index, stage in zip(runner.stage_indices, runner.stages, strict=True):
            info = stage.info
            in_flight = runner.schedule.num_in_flight(index, info.num_stages, num_microbatches)
            # The engine has a receive buffer for every microbatch, in both directions.
            received_bytes = sum(passed.tensor.num_bytes for passed in info.received)
            buffer_bytes = num_microbatches * (received_bytes + info.sent_bytes)
            planner = StagePartitioner(
                partitioner.budget,
                stage=index,
                num_in_flight=in_flight or num_microbatches,
                resident_bytes=buffer_bytes
                + resident_bytes(strategy, stage, runner.num_accumulated > 1),
                sent_bytes=info.sent_bytes,
                reports=partitioner.reports,
            )
            inputs = [microbatch[position] for position in info.inputs]
            runs[index] = planned_stage(stage, inputs, planner, runner.device, steps.rewriter)
    return runs


def planned_stage(
    stage: StageModule,
    inputs: Sequence[Any],
    partitioner: StagePartitioner,
    device: torch.device,
    rewriter: GraphRewriter | None = None,
) -> StageRun:
    """Return a function that runs a stage by a plan, with the same arguments and results."""
    graph_module, attributes = _lifted(stage)
    received = [
        torch.zeros(passed.tensor.shape, dtype=passed.tensor.dtype, device=device).requires_grad_(
            passed.feeds_loss
        )
        for passed in stage.info.received
    ]
    with torch.enable_grad():
        compiled = execute_with(
            "aot_eager",
            graph_module,
            (*received, *inputs, *attributes),
            partition_fn=partitioner,
            rewriter=rewriter,
        )
    return lambda *values: compiled(*values, *attributes)


def resident_bytes(strategy: GridStrategy, stage: StageModule, accumulates: bool) -> int:
    """Return a rank's bytes without its stage's parameters and activations."""
    module, ownership, grid = strategy.own_module, strategy.ownership, strategy.grid
    freed = set[str]().union(*ownership.names) - ownership.names[dist.get_rank(grid.pipeline)]
    if not strategy.free_unowned:
        freed = set()
    steppers = ownership.steppers.items()
    stepped_elsewhere = {name for name, rank in steppers if rank != grid.replicas.rank}
    params = {name: param for name, param in module.named_parameters() if name not in freed}
    own = storage_bytes([*stage.parameters(), *stage.buffers()])
    trained = {name: param for name, param in params.items() if param.requires_grad}
    whole = storage_bytes([*trained.values()])
    stepped = storage_bytes([p for name, p in trained.items() if name not in stepped_elsewhere])
    everything = storage_bytes([*params.values(), *module.buffers()])
    # Lightning clears the last step's gradients after this step. Accumulated gradients are not
    # averaged yet, so every pipeline has them whole.
    gradients = whole + (whole if accumulates else stepped)
    # Optimizers have no state for parameters that are freed here.
    optimizers = module.trainer.optimizers
    with_state = [param for optimizer in optimizers for param in optimizer.state]
    with_state_bytes = storage_bytes(with_state) if with_state else gradient_bytes(module)
    state_share = optimizer_state_bytes(optimizers) / max(1, with_state_bytes)
    return max(0, everything - own) + gradients + int(stepped * state_share)


def _lifted(stage: StageModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the stage's graph with its parameters and buffers as its last arguments."""
    copy = copy_graph_module(stage)
    graph = copy.graph
    attributes: list[Tensor] = []
    for node in list(graph.find_nodes(op="get_attr")):
        value = operator.attrgetter(str(node.target))(stage)
        if isinstance(value, Tensor):
            name = f"attribute_{len(attributes)}"
            placeholder = add_placeholder(graph, name, value, nested=True)
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
            attributes.append(value)
    graph.lint()
    copy.recompile()
    return copy, attributes
