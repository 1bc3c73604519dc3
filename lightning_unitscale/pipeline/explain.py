"""Estimate the costs, cuts, sent bytes and bubble of a pipeline before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tabulate import tabulate
from torch import nn

from lightning_unitscale.capture.dynamo_capture import static_shapes, unmarked
from lightning_unitscale.capture.graph_nodes import ELSEWHERE, MODULE
from lightning_unitscale.capture.graph_variants import GraphCall, NotOneGraphError
from lightning_unitscale.capture.rollback import restoring
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.memory.costs import CostModel, default_cost_model
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.profile_step import COSTS
from lightning_unitscale.pipeline import balance, captured_program
from lightning_unitscale.pipeline.cuts import LOSS, cut_by, num_marks
from lightning_unitscale.pipeline.pipe import Pipe, build_pipe, pipeline
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.pipeline.schedules import SCHEDULES, PipelineTimeline, simulate_1f1b
from lightning_unitscale.pipeline.stage import StageModule


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one microbatch."""

    first_module: str  # path of the module with the stage's first operation
    # Estimates for one CPU core, or for a data-center GPU.
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    # Bytes for the backward pass: of one microbatch, and of all in flight under 1F1B.
    saved_bytes: int
    peak_saved_bytes: int
    # Bytes sent to the next stage, and gradients sent back.
    sent_bytes: int
    returned_bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline and its estimated costs. ``str`` shows a table and a picture.

    Attributes:
        pipe: The pipeline.
        stages: Costs of its stages.
        timeline: One step under 1F1B. Sending and receiving count on both sides.
        imbalance: Compute seconds of the slowest stage divided by the mean.
        least_imbalance: Lower bound of ``imbalance`` for any cuts, given by the largest operation.
        ideal_seconds: Length of the step with equal stages that send nothing.
        only: The module that runs as the pipeline and the reason, if the whole step does not.
    """

    pipe: Pipe
    stages: tuple[StageCosts, ...]
    timeline: PipelineTimeline
    imbalance: float
    least_imbalance: float
    ideal_seconds: float
    only: str = ""

    def __str__(self) -> str:
        rows = [
            (
                index,
                costs.first_module,
                _milliseconds(costs.forward_seconds),
                _milliseconds(costs.backward_seconds),
                format_bytes(costs.parameter_bytes),
                format_bytes(costs.peak_saved_bytes),
                format_bytes(costs.sent_bytes),
            )
            for index, costs in enumerate(self.stages)
        ]
        headers = ("stage", "from", "forward", "backward", "parameters", "saved at most", "sent")
        aligned = ("right", "left", *["right"] * 5)
        lines = [
            self.only,
            tabulate(rows, headers=headers, colalign=aligned, disable_numparse=True),
            "forward, backward, sent: for one microbatch; saved at most: for those in flight",
            f"estimated step: {_milliseconds(self.timeline.seconds)}, of which the bubble is "
            f"{self.timeline.bubble:.1%}; equal stages that send nothing would take "
            f"{_milliseconds(self.ideal_seconds)}",
            f"slowest stage: {self.imbalance:.3f} times the mean; the largest operation allows no "
            f"less than {self.least_imbalance:.3f}",
            self.timeline.picture(),
        ]
        return "\n".join(filter(None, lines))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def explain_pipeline(
    module: nn.Module, batch: Any, num_stages: int, *, num_microbatches: int | None = None
) -> PipelinePlan:
    """Balance a module over stages and estimate their costs, without computing anything.

    Args:
        module: The module. Include the loss if the backward pass starts there.
        batch: Arguments of one microbatch: a tensor, a tuple, or a dict of keyword arguments.
        num_stages: Number of stages, each on its own device.
        num_microbatches: Microbatches of the step in the picture; twice the stages by default.

    Raises:
        ValueError: If an argument is out of range, or the module has too few cuts.
        RuntimeError: If ``forward`` cannot be captured as one graph.

    Examples:
        >>> import torch
        >>> layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> plan = explain_pipeline(layers, torch.ones(8, 64), num_stages=2)
        >>> [one.parameter_bytes for one in plan.stages]
        [33280, 33280]
    """
    policy = balance.balanced_split(num_stages, num_microbatches=num_microbatches)
    if isinstance(batch, Mapping):
        pipe = pipeline(module, (), batch, split_policy=policy)
    else:
        args = batch if isinstance(batch, tuple) else (batch,)
        pipe = pipeline(module, args, split_policy=policy)
    return plan_of(pipe, module, num_microbatches)


def plan_of(pipe: Pipe, module: nn.Module, num_microbatches: int | None) -> PipelinePlan:
    """Estimate the costs of a pipeline's stages and of a step under 1F1B."""
    count = 2 * pipe.num_stages if num_microbatches is None else num_microbatches
    SCHEDULES["1F1B"].check(pipe.num_stages, pipe.num_stages, count)
    device = balance.device_type_of(module)
    model = default_cost_model(device)
    stages = tuple(_costs(stage, model, count) for stage in pipe.stages)
    seconds = [costs.forward_seconds + costs.backward_seconds for costs in stages]
    mean = sum(seconds) / len(seconds)
    operations = [
        sum(balance.seconds_of(node.meta[COSTS], model))
        for stage in pipe.stages
        for node in stage.graph.nodes
        if COSTS in node.meta
    ]
    # A transfer takes time on both sides.
    rate, edges = balance.sending_rate(device), list(zip([None, *stages], stages, strict=False))
    forward = [
        own.forward_seconds + (own.sent_bytes + (before.sent_bytes if before else 0)) / rate
        for before, own in edges
    ]
    backward = [
        own.backward_seconds
        + (own.returned_bytes + (before.returned_bytes if before else 0)) / rate
        for before, own in edges
    ]
    return PipelinePlan(
        pipe,
        stages,
        simulate_1f1b(forward, backward, count),
        imbalance=max(seconds) / mean,
        least_imbalance=max(1.0, max(operations) / mean),
        ideal_seconds=mean * (count + len(seconds) - 1),
    )


def _costs(stage: StageModule, model: CostModel, num_microbatches: int) -> StageCosts:
    info = stage.info
    nodes = [node.meta[COSTS] for node in stage.graph.nodes if COSTS in node.meta]
    directions = [balance.seconds_of(node_costs, model) for node_costs in nodes]
    saved = sum(node_costs.saved_bytes for node_costs in nodes)
    in_flight = SCHEDULES["1F1B"].num_in_flight(info.index, info.num_stages, num_microbatches)
    assert in_flight is not None
    modules = [
        node.meta.get(MODULE, "")
        for node in stage.graph.nodes
        if COSTS in node.meta and ELSEWHERE not in node.meta
    ]
    return StageCosts(
        first_module=next(iter(modules), ""),
        forward_seconds=sum(forward for forward, _ in directions),
        backward_seconds=sum(backward for _, backward in directions),
        parameter_bytes=sum(param.nbytes for param in stage.parameters()),
        saved_bytes=saved,
        peak_saved_bytes=saved * in_flight,
        sent_bytes=info.sent_bytes,
        returned_bytes=sum(passed.tensor.num_bytes for passed in info.sent if passed.feeds_loss),
    )


def explain_step(
    module: nn.Module,
    batch: Any,
    num_stages: int,
    *args: Any,
    num_microbatches: int | None = None,
    method: str = "training_step",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **kwargs: Any,
) -> PipelinePlan:
    """Balance a step over stages, as a pipeline would, and estimate their costs.

    Args:
        module: The module, which does not change.
        batch: A whole batch.
        num_stages: Number of stages, each on its own device.
        *args: Arguments of the step after the batch.
        num_microbatches: Number of equal parts of the batch; twice the stages by default.
        method: Name of the step.
        context: Entered around the step, such as ``lambda: torch.autocast("cpu", torch.bfloat16)``.
        **kwargs: Keyword arguments of the step.

    Raises:
        ValueError: If an argument is out of range, the batch cannot be divided, or the step has too
            few cuts.
        CaptureError: If neither the step nor a module with most parameters that it calls is one
            graph.
        RuntimeError: If the step returns no loss.
    """
    policy = balance.balanced_split(num_stages, num_microbatches=num_microbatches)
    count = 2 * num_stages if num_microbatches is None else num_microbatches
    # The error names the argument that the user has set.
    default = f"num_stages={num_stages}: num_microbatches is twice as many by default, and"
    part = split_evenly(batch, count, default if num_microbatches is None else "")[0]
    steps = captured_program.CalledSteps(module, (method,), defer=captured_program.LOGS)
    step = steps.steps[method]
    only, loss = "", None
    with static_shapes(), unmarked(module), context():
        run = partial(step.__wrapped__, part, *args, **kwargs)
        try:
            try:
                call = step.graph_call(part, *args, **kwargs)
            except NotOneGraphError:
                if not captured_program.sets_up(steps, run):
                    raise
                call = step.graph_call(part, *args, **kwargs)
            loss = captured_program.loss_position(step, call, (part, *args), kwargs)
        except NotOneGraphError as error:
            title = f"{type(module).__name__}.{method}"
            failure = CaptureError.of(title, error.reasons, manner=" as one graph")
            call, called = _of_called(module, failure, run)
            only = (
                f"{title} is not one graph ({error}): only {called} runs as the pipeline, and the "
                "step around it"
            )
    program = captured_program.program_of_step(call, module, loss).program
    if num_marks(program):
        program.graph_module.meta[LOSS] = program.loss
        balance.note_costs(program.graph_module)
    else:
        cut_by(program, policy)
    return replace(plan_of(build_pipe(program, module), module, num_microbatches), only=only)


def _of_called(
    module: nn.Module, failure: CaptureError, run: Callable[[], Any]
) -> tuple[GraphCall, str]:
    """Return the graph and the name of the module that a step calls for a microbatch."""
    paths = captured_program.with_most_parameters(module)
    while True:
        with restoring(module, parameters=False), captured_program.without_logs(module):
            found = captured_program.first_called(module, paths, run)
        if found is None:
            raise failure
        path, (args, kwargs) = found
        name = captured_program.forward_of(path)
        step = captured_program.CalledSteps(module, (name,)).steps[name]
        try:
            return step.graph_call(*args, **kwargs), captured_program.as_attribute(path)
        except NotOneGraphError:
            paths = captured_program.without(paths, path)
