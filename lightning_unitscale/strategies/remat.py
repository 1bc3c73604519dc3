"""Rematerialization within a stage, planned for the number of microbatches that it keeps.

A rank keeps the saved values of every microbatch in flight; the earlier its stage, the more there
are. So a rank's budget covers parameters, gradients and the optimizer's state, one pass, and the
values that the stage saves for each microbatch in flight.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, fx, nn

from lightning_unitscale.dynamo.executors import GraphRewriter, execute_with
from lightning_unitscale.dynamo.graphs import add_placeholder, copy_graph_module
from lightning_unitscale.pipeline.engine import PipelineRunner
from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.pipeline.stage import Passed, StageModule
from lightning_unitscale.profiler.measure import (
    gradient_bytes,
    optimizer_state_bytes,
    storage_bytes,
)
from lightning_unitscale.profiler.report import format_bytes
from lightning_unitscale.ranks import failing_together
from lightning_unitscale.remat.api import Granted, StepPartitioner
from lightning_unitscale.remat.partitioner import RematPartitioner
from lightning_unitscale.remat.planner import Budget, Planner, RematPlan, limit_of
from lightning_unitscale.remat.problem import NodeRegion
from lightning_unitscale.remat.report import RematReport

_NUM_PLANS = 40

# Runs in the place of a stage.
StageRun = Callable[..., Any]


def check_schedule(budget: Budget, schedule: Schedule) -> None:
    """Refuse a budget that cannot be kept under a schedule."""
    if budget != "min_cut" and schedule.num_in_flight(0, 1, 1) is None:
        raise MisconfigurationException(
            f"budget={budget!r} with PipelineStrategy({schedule.name!r}): its ranks run several "
            "stages in turn, so the number of microbatches that each keeps at the peak is unknown; "
            "expected budget='min_cut', or the schedule '1F1B' or 'GPipe'; change one of the two."
        )


class StagePartitioner(RematPartitioner):
    """Plans the joint graph of one stage."""

    def __init__(
        self,
        budget: Budget,
        *,
        stage: int,
        num_in_flight: int,
        resident_bytes: int,
        sent_bytes: int,
        reports: list[RematReport],
        granted: Granted,
    ) -> None:
        super().__init__(budget)
        self._resident_bytes = resident_bytes
        self._stage = stage
        self._num_in_flight = num_in_flight
        self._sent_bytes = sent_bytes
        self._reports = reports
        self._granted = granted

    def resident_bytes(self, static_bytes: int) -> tuple[int, int]:
        """Return the bytes alive throughout beside the stage's own parameters."""
        return self._resident_bytes, 0

    def choose(self, planner: Planner) -> RematPlan:
        """Return the fastest plan with which the rank stays within the budget."""
        plan = self._chosen(planner)
        self._reports.append(replace(RematReport.of(plan), peak_bytes=self.peak_bytes(plan)))
        return plan

    def peak_bytes(self, plan: RematPlan) -> int:
        """Return the bytes of the rank at its peak: one pass, and values saved by earlier ones."""
        problem = plan.problem
        computed = plan.saved & (problem.region != NodeRegion.INPUT)
        earlier = (self._num_in_flight - 1) * problem.saved_bytes(computed)
        return plan.peak_bytes + earlier + self._num_in_flight * self._sent_bytes

    def _chosen(self, planner: Planner) -> RematPlan:
        if self.budget == "min_cut":
            return planner.min_cut
        default = self.peak_bytes(planner.default)
        plans = [planner.default, *planner.front(_NUM_PLANS)]
        least = min(map(self.peak_bytes, plans))
        limit = limit_of(self.budget, default)
        if isinstance(self.budget, float):
            limit = self._granted.limit(limit, lambda: least)
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
    partitioner: StepPartitioner,
    module: nn.Module,
    elsewhere: Collection[str],
    stepped_elsewhere: Collection[str],
    granted: dict[int, Granted],
    rewriter: GraphRewriter | None = None,
) -> dict[int, StageRun]:
    """Plan a rank's stages, on all ranks together; return the plans' functions by stage index."""
    share = _state_share(module)
    runs = {}
    with failing_together(runner.group):
        for index, stage in zip(runner.stage_indices, runner.stages, strict=True):
            info = stage.info
            in_flight = runner.schedule.num_in_flight(
                index, info.num_stages, runner.num_microbatches
            )
            planner = StagePartitioner(
                partitioner.budget,
                stage=index,
                num_in_flight=in_flight or runner.num_microbatches,
                resident_bytes=resident_bytes(
                    module,
                    stage,
                    elsewhere,
                    stepped_elsewhere,
                    share,
                    accumulates=runner.num_accumulated > 1,
                )
                # The engine has a buffer to receive in for every microbatch, in both directions.
                + runner.num_microbatches * (_num_bytes(info.received) + info.sent_bytes),
                sent_bytes=info.sent_bytes,
                reports=partitioner.reports,
                granted=granted.setdefault(index, Granted()),
            )
            inputs = [microbatch[position] for position in info.inputs]
            runs[index] = planned_stage(stage, inputs, planner, runner.device, rewriter)
    return runs


def planned_stage(
    stage: StageModule,
    inputs: Sequence[Any],
    partitioner: StagePartitioner,
    device: torch.device,
    rewriter: GraphRewriter | None = None,
) -> StageRun:
    """Plan a stage, and return a function of its arguments that runs the plan."""
    graph_module, attributes = _lifted(stage)
    # As the engine hands them over.
    received = [
        torch.zeros(passed.tensor.shape, dtype=passed.tensor.dtype, device=device).requires_grad_(
            passed.feeds_loss
        )
        for passed in stage.info.received
    ]
    with torch.enable_grad():
        examples = (*received, *inputs, *attributes)
        compiled = execute_with(
            "aot_eager", graph_module, examples, partition_fn=partitioner, rewriter=rewriter
        )

    return lambda *values: compiled(*values, *attributes)


def resident_bytes(
    module: nn.Module,
    stage: StageModule,
    elsewhere: Collection[str],
    stepped_elsewhere: Collection[str],
    state_share: float,
    *,
    accumulates: bool,
) -> int:
    """Return the bytes of a rank beside its stage's parameters and its activations."""
    params = {name: param for name, param in module.named_parameters() if name not in elsewhere}
    own = storage_bytes([*stage.parameters(), *stage.buffers()])
    trained = {name: param for name, param in params.items() if param.requires_grad}
    whole = storage_bytes([*trained.values()])
    stepped = storage_bytes([p for name, p in trained.items() if name not in stepped_elsewhere])
    everything = storage_bytes([*params.values(), *module.buffers()])
    # Gradients of the step before live until Lightning clears them, after this one. Those of
    # earlier batches are not averaged yet, and whole in every pipeline.
    gradients = whole + (whole if accumulates else stepped)
    return max(0, everything - own) + gradients + int(stepped * state_share)


def _state_share(module: nn.Module) -> float:
    """Return the bytes of the optimizers' state per byte of a parameter."""
    optimizers = module.trainer.optimizers if isinstance(module, pl.LightningModule) else []
    # Once there is state, parameters that are freed here have none.
    stepped = [param for each in optimizers for param in each.state]
    trained = storage_bytes(stepped) if stepped else gradient_bytes(module)
    return optimizer_state_bytes(optimizers) / max(1, trained)


def _num_bytes(passed: Sequence[Passed]) -> int:
    return sum(value.tensor.num_bytes for value in passed)


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
