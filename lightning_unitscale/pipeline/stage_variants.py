"""Make variants of a rank's stages: with probes, or within a memory budget.

A graph is rewritten before it is cut and probed afterwards. So the records of a probe stay on the
rank that runs the stage. Every tensor is probed in one stage. For a batch or a buffer it is the
first stage that reads it, for other values the stage that computes it. If several stages use a
parameter, the parts of its gradient are kept per microbatch. The rank of the first stage adds them
up.

A rank keeps the saved values of every microbatch in flight. Earlier stages have more of them. So a
rank's budget covers parameters, gradients, the optimizer's state and one pass. It also covers the
values that the stage saves, once for each microbatch in flight.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from lightning_unitscale.capture.copy_graphs import add_placeholder, copy_graph_module
from lightning_unitscale.capture.executors import GraphRewriter, execute_with
from lightning_unitscale.capture.graph_nodes import ELSEWHERE, replace_other_uses, tensor_name
from lightning_unitscale.capture.graph_recorder import tap_gradient
from lightning_unitscale.capture.graph_variants import Variant
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.passes import GraphPass, Phase, StepGraph
from lightning_unitscale.loops.ranks import failing_together, gathered_on
from lightning_unitscale.memory.budgets import Budget, limit_of
from lightning_unitscale.memory.partitioner import RematPartitioner
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.problem import NodeRegion
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.real_memory import (
    gradient_bytes,
    optimizer_state_bytes,
    storage_bytes,
)
from lightning_unitscale.memory.remat_plan import RematPlan, RematReport
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.pipeline.engine import PipelineRunner, Replaced
from lightning_unitscale.pipeline.stage import StageModule

_NUM_PLANS = 40


class ObservedStages:
    """Variants of a rank's stages with the probes of all passes."""

    def __init__(
        self,
        runner: PipelineRunner,
        step_graph: StepGraph,
        passes: Sequence[GraphPass],
        rank_of: Callable[[int], int],
    ) -> None:
        pipe = runner.pipe
        self._passes = [graph_pass for graph_pass in passes if graph_pass.phase is Phase.OBSERVE]
        self._rank_of = rank_of
        self._group = runner.group
        wanted = frozenset[str]().union(
            *(graph_pass.before_cut(step_graph) for graph_pass in self._passes)
        )
        trainable = {name for name, param in pipe.named_parameters() if param.requires_grad}
        shared = pipe.shared_parameters()
        self._shared = {name: shared[name] for name in sorted(wanted & trainable & shared.keys())}
        # The gradients of shared parameters in this rank's stages, one per microbatch.
        self._parts: dict[tuple[str, int], list[Tensor | None]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        # The functions that replace this rank's stages.
        self.run: dict[int, Callable[..., Any]] = {}
        seen: set[str] = set()
        for index, stage in enumerate(pipe.stages):
            if index in runner.stage_indices:
                self.run[index] = self._observed(index, stage, step_graph, seen)
            seen |= {tensor_name(node) for node in stage.graph.nodes if _is_read(node)}

    def begin(self) -> None:
        """Drop the gradients of the last step before a new one."""
        for parts in self._parts.values():
            parts.clear()

    def finish(self) -> None:
        """Pass the gradients of shared parameters to the passes after a step. All ranks call it."""
        for name, stages in self._shared.items():
            own = {stage: parts for (key, stage), parts in self._parts.items() if key == name}
            on_cpu = tree_map_only(Tensor, lambda gradient: gradient.cpu(), own)
            gathered = gathered_on(self._rank_of(stages[0]), on_cpu, self._group)
            if gathered is not None:
                parts = {stage: own for each in gathered for stage, own in each.items()}
                # In autograd's order of addition: the last use first.
                self._show(name, [parts[stage] for stage in reversed(stages)])
        self.begin()

    def _observed(
        self, index: int, stage: StageModule, step_graph: StepGraph, seen: set[str]
    ) -> Callable[..., Any]:
        copy = copy_graph_module(stage)
        for node in copy.graph.nodes:
            name = tensor_name(node)
            if _is_read(node) and name in seen:
                node.meta[ELSEWHERE] = True
            if node.op == "get_attr" and name in self._shared:
                self._parameters[name] = stage.get_parameter(str(node.target))
                parts = self._parts[name, index] = []
                _keep_gradient(copy.graph, node, parts)
        graph = StepGraph(copy, observed=True, step=step_graph.step)
        graph.notes.update(step_graph.notes)
        for graph_pass in self._passes:
            graph_pass.observe_part(graph)
        graph.finish()
        return Variant(graph, execute_with("eager", graph.graph_module, ()))

    def _show(self, name: str, parts: Sequence[Sequence[Tensor | None]]) -> None:
        """Add up the parts of a gradient for each microbatch, and pass it to the passes."""
        parameter = self._parameters[name].detach()
        for of_microbatch in zip(*parts, strict=True):
            present = [part.to(parameter.device) for part in of_microbatch if part is not None]
            total = functools.reduce(operator.add, present) if present else None
            for graph_pass in self._passes:
                graph_pass.see_shared(name, parameter, total)


def _keep_gradient(graph: fx.Graph, node: fx.Node, parts: list[Tensor | None]) -> None:
    def keep(tensor: Tensor) -> Tensor:
        index = len(parts)
        parts.append(None)

        def see(gradient: Tensor) -> None:
            # A dense copy, because autograd may add to the tensor that it passes on.
            dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
            parts[index] = dense.clone()

        return tap_gradient(tensor, None, see)

    with graph.inserting_after(node):
        kept = graph.call_function(keep, (node,))
    kept.meta.update(node.meta)
    node.meta[ELSEWHERE] = kept.meta[ELSEWHERE] = True
    replace_other_uses(node, kept)


def _is_read(node: fx.Node) -> bool:
    """Check whether a node is an input of the call or an attribute."""
    return node.op in {"placeholder", "get_attr"} and ELSEWHERE not in node.meta


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
    runner: PipelineRunner, microbatch: Sequence[Any], steps: ModuleSteps, strategy: GridStrategy
) -> Replaced:
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
                resident_bytes=buffer_bytes + resident_bytes(strategy, stage),
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
) -> Callable[..., Any]:
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


def resident_bytes(strategy: GridStrategy, stage: StageModule) -> int:
    """Return a rank's bytes without its stage's parameters and activations."""
    module, ownership, grid = strategy.own_module, strategy.ownership, strategy.grid
    freed = set[str]().union(*ownership.names) - ownership.names[dist.get_rank(grid.pipeline)]
    if not strategy.free_unowned:
        freed = set()
    params = {name: param for name, param in module.named_parameters() if name not in freed}
    own = storage_bytes([*stage.parameters(), *stage.buffers()])
    trained = storage_bytes([param for param in params.values() if param.requires_grad])
    everything = storage_bytes([*params.values(), *module.buffers()])
    # Lightning clears the last step's gradients after this step.
    gradients = 2 * trained
    # Optimizers have no state for parameters that are freed here.
    optimizers = module.trainer.optimizers
    with_state = [param for optimizer in optimizers for param in optimizer.state]
    with_state_bytes = storage_bytes(with_state) if with_state else gradient_bytes(module)
    state_share = optimizer_state_bytes(optimizers) / max(1, with_state_bytes)
    return max(0, everything - own) + gradients + int(trained * state_share)


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
