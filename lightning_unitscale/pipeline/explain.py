"""What a pipeline would be like, before it runs: costs, cuts, bytes sent, the bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate
from torch import Tensor, nn

from lightning_unitscale.graph.nodes import ELSEWHERE, MODULE
from lightning_unitscale.pipeline.front import pipeline
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.policy import (
    balanced_split,
    device_type_of,
    seconds_of,
    sending_rate,
)
from lightning_unitscale.pipeline.simulate import Timeline, simulate_1f1b
from lightning_unitscale.pipeline.stage import StageModule, stage_info
from lightning_unitscale.profiler.meta_info_prop import COSTS
from lightning_unitscale.remat.costs import CostModel, default_cost_model


@dataclass(frozen=True)
class StageCosts:
    """What one stage costs for one microbatch.

    Attributes:
        first_module: Path of the module whose operation is the stage's first.
        forward_seconds: Estimated, on one core of a CPU or on a data-centre GPU.
        backward_seconds: The same.
        parameter_bytes: Parameters that the stage has.
        saved_bytes: What one microbatch keeps for its backward pass.
        peak_saved_bytes: The same for as many microbatches as 1F1B has in flight there.
        sent_bytes: Sent to the next stage.
        returned_bytes: Gradients that come back from it.
    """

    first_module: str
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    saved_bytes: int
    peak_saved_bytes: int
    sent_bytes: int
    returned_bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline with what it would cost; ``str`` of it is a table and a picture.

    Attributes:
        pipe: The pipeline.
        stages: Costs of its stages.
        timeline: One step under 1F1B. Sending and receiving count on both sides.
        imbalance: Seconds that the slowest stage computes over their mean.
        least_imbalance: What the largest operation alone makes of it: no cuts get below.
        ideal_seconds: The step of equal stages that send nothing.
    """

    pipe: Pipe
    stages: tuple[StageCosts, ...]
    timeline: Timeline
    imbalance: float
    least_imbalance: float
    ideal_seconds: float

    def __str__(self) -> str:
        rows = [
            (
                index,
                one.first_module,
                1e3 * one.forward_seconds,
                1e3 * one.backward_seconds,
                one.parameter_bytes,
                one.peak_saved_bytes,
                one.sent_bytes,
            )
            for index, one in enumerate(self.stages)
        ]
        headers = ("stage", "from", "forward ms", "backward ms", "parameters", "saved", "sent")
        total, ideal = 1e3 * self.timeline.seconds, 1e3 * self.ideal_seconds
        return "\n".join(
            [
                tabulate(rows, headers=headers, floatfmt=".3f"),
                f"imbalance {self.imbalance:.3f}, bubble {self.timeline.bubble:.3f}, "
                f"step {total:.3f} ms (estimated)",
                f"at best: imbalance {self.least_imbalance:.3f} by the largest operation, "
                f"step {ideal:.3f} ms by equal stages that send nothing",
                self.timeline.picture(),
            ]
        )


def explain_pipeline(
    module: nn.Module, batch: Any, num_stages: int, *, num_microbatches: int | None = None
) -> PipelinePlan:
    """Balance a module over stages and say what they cost. Nothing is computed.

    Args:
        module: The module; with its loss, if the backward pass shall count from there.
        batch: Arguments of one microbatch: a tensor, a tuple, or a dict of keyword arguments.
        num_stages: Stages, each on a device of its own.
        num_microbatches: Microbatches of the step in the picture; by default twice the stages.

    Raises:
        ValueError: If an argument is out of range, or the module cannot be cut so often.
        RuntimeError: If ``forward`` cannot be captured as one graph.

    Example:
        >>> import torch
        >>> layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> plan = explain_pipeline(layers, torch.ones(8, 64), num_stages=2)
        >>> [one.parameter_bytes for one in plan.stages]
        [33280, 33280]
    """
    args = batch if isinstance(batch, tuple) else (batch,)
    kwargs = dict(batch) if isinstance(batch, Mapping) else None
    pipe = pipeline(
        module,
        () if kwargs is not None else args,
        kwargs,
        split_policy=balanced_split(num_stages, num_microbatches=num_microbatches),
    )
    return plan_of(pipe, module, num_microbatches)


def plan_of(pipe: Pipe, module: nn.Module, num_microbatches: int | None) -> PipelinePlan:
    """What the stages of a pipeline cost, and a step of theirs; arguments as above.

    Raises:
        ValueError: If there are fewer microbatches than stages.
    """
    count = 2 * pipe.num_stages if num_microbatches is None else num_microbatches
    if count < pipe.num_stages:
        raise ValueError(
            f"num_microbatches={num_microbatches}: 1F1B keeps {pipe.num_stages} stages busy with "
            f"a microbatch each; expected at least {pipe.num_stages}."
        )
    device = device_type_of(module)
    model = default_cost_model(device)
    stages = tuple(_costs(stage, model, count) for stage in pipe.stages)
    seconds = [one.forward_seconds + one.backward_seconds for one in stages]
    mean = sum(seconds) / len(seconds)
    operations = [
        sum(seconds_of(node.meta[COSTS], model))
        for stage in pipe.stages
        for node in stage.graph.nodes
        if COSTS in node.meta
    ]
    rate = sending_rate(device)
    timeline = simulate_1f1b(
        _with_sending(
            [one.forward_seconds for one in stages], [one.sent_bytes for one in stages], rate
        ),
        _with_sending(
            [one.backward_seconds for one in stages], [one.returned_bytes for one in stages], rate
        ),
        count,
    )
    return PipelinePlan(
        pipe,
        stages,
        timeline,
        imbalance=max(seconds) / mean,
        least_imbalance=max(1.0, max(operations) / mean),
        ideal_seconds=mean * (count + len(seconds) - 1),
    )


def _with_sending(seconds: Sequence[float], behind: Sequence[int], rate: float) -> list[float]:
    """Seconds of the stages' passes, with what goes over the boundary behind each stage."""
    return [
        one + (behind[index] + (behind[index - 1] if index else 0)) / rate
        for index, one in enumerate(seconds)
    ]


def _costs(stage: StageModule, model: CostModel, num_microbatches: int) -> StageCosts:
    info = stage_info(stage)
    nodes = [node.meta[COSTS] for node in stage.graph.nodes if COSTS in node.meta]
    directions = [seconds_of(one, model) for one in nodes]
    saved = sum(one.saved_bytes for one in nodes)
    own = {id(one): one for one in stage.parameters()}
    own_nodes = [
        one for one in stage.graph.nodes if COSTS in one.meta and ELSEWHERE not in one.meta
    ]
    named = [one.meta.get(MODULE, "") for one in own_nodes]
    return StageCosts(
        first_module=next(iter(named), ""),
        forward_seconds=sum(forward for forward, _ in directions),
        backward_seconds=sum(backward for _, backward in directions),
        parameter_bytes=sum(_size(one) for one in own.values()),
        saved_bytes=saved,
        peak_saved_bytes=saved * min(num_microbatches, info.num_stages - info.index),
        sent_bytes=info.sent_bytes,
        returned_bytes=sum(one.tensor.num_bytes for one in info.sent if one.feeds_loss),
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
