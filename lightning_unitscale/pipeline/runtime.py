"""The only file that touches private names of ``torch.distributed.pipelining``.

Checked on torch 2.13: ``_PipelineScheduleRuntime`` with its ``pipeline_order_with_comms``,
``_add_send_recv``, ``_calculate_single_rank_operations``, ``_Action`` and ``_ComputationType``;
and ``PipelineStage.backward_maybe_with_nosync``, which has no underscore and no documentation.
Checked on torch 2.11 as well, whose stages are completed in ``stage_on_torch_2_11.py``.

What is worked around here:

- Zero-bubble schedules drop the gradient of a parameter that reaches a stage's result by a path
  that touches nothing the stage received (a second embedding that is only handed on). Such a stage
  runs its whole backward at once. For the last stage the engine hands over the loss as a tuple
  there, of which a whole backward would differentiate nothing.
- A stage with nothing to differentiate (a frozen one) has no backward.
- Zero-bubble schedules send gradients as they come, and only contiguous tensors can be sent.
- ``LoopedBFS`` runs the backward passes from the last microbatch to the first, which adds the
  gradients up in another order than every other schedule. Here they run from the first, which takes
  as long.
- In torch 2.11 the backward pass of weights takes the gradients of all outputs of an operation for
  one of the first, and counts twice what reaches a weight by two ways. There every stage runs its
  whole backward at once, and zero-bubble schedules have the bubble that they are to save.
- Forward only, multi-stage schedules fail or run empty backward passes. Here they are schedules of
  forward passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from typing_extensions import override

from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.pipeline.stage import Passed, StageInfo
from lightning_unitscale.pipeline.stage_on_torch_2_11 import StageOnTorch211

_IS_2_11 = torch.torch_version.TorchVersion(torch.__version__) < "2.12"
if TYPE_CHECKING or not _IS_2_11:  # noqa: SIM108
    _Stage = PipelineStage
else:
    _Stage = StageOnTorch211

# A schedule of the engine: ``step(...)`` runs all microbatches of this rank's stages.
EngineSchedule = Any


class EngineStage(_Stage):
    """A stage of the engine whose shapes are known, so that nothing is run to find them.

    Args:
        module: Runs the stage: ``module(*received, **kwargs)``.
        info: What it takes and hands on.
        device: Where it runs.
        group: The pipeline's process group.
        has_backward: Whether gradients are handed back.
    """

    def __init__(
        self,
        module: nn.Module,
        info: StageInfo,
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        has_backward: bool,
    ) -> None:
        sent = _examples(info.sent, has_backward)
        if info.is_last:
            # Only its number and order matter, and nothing is sent from here.
            sent = (torch.empty((), device="meta", requires_grad=has_backward),)
        super().__init__(
            module,
            info.index,
            info.num_stages,
            device,
            input_args=_examples(info.received, has_backward),
            output_args=sent,
            group=group,
        )
        self._separable = info.separable and not _IS_2_11
        # Whether gradients of inputs and of weights must come from one pass for other reasons.
        self.at_once = False

    @override
    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Runs (a part of) the backward pass of one microbatch."""
        output = bwd_kwargs["stage_output"]
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        if backward_type != "weight" and not any(one.requires_grad for one in outputs):
            return (None,) * len(bwd_kwargs["input_values"]), []
        if backward_type == "weight" and not bwd_kwargs["param_groups"]:
            return (), None
        at_once = backward_type == "input" and (self.at_once or not self._separable)
        if at_once and bwd_kwargs["output_grads"] is None:
            # The loss: of a tuple without gradients the engine would differentiate nothing.
            bwd_kwargs = {**bwd_kwargs, "stage_output": outputs[0]}
        # The caller's autocast is for the forward passes, between which this one runs.
        with torch.autocast(self.device.type, enabled=False):
            gradients, groups = super().backward_maybe_with_nosync(
                "full" if at_once else backward_type, bwd_kwargs, last_backward
            )
        if backward_type == "weight":
            return gradients, groups
        sent = tuple(None if one is None else one.contiguous() for one in gradients)
        return sent, [] if at_once else groups


def make_schedule(
    schedule: Schedule,
    stages: Sequence[EngineStage],
    num_microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> EngineSchedule:
    """The engine's schedule for training; gradients are left as the loss function scales them."""
    engine = _ENGINES[schedule.name]
    given = stages[0] if schedule.placement == "single" else list(stages)
    return engine(given, num_microbatches, loss_fn=loss_fn, scale_grads=False)


class ForwardOnly(_PipelineScheduleRuntime):
    """Forward passes alone, of every microbatch through one local stage after the other.

    Args:
        schedule: Says which rank has which stages.
        stages: This rank's stages, in ascending order.
        num_microbatches: Microbatches of a step.
    """

    def __init__(
        self, schedule: Schedule, stages: Sequence[EngineStage], num_microbatches: int
    ) -> None:
        super().__init__(list(stages), num_microbatches, loss_fn=None, scale_grads=False)
        # The engine's own preparation asks for as many backward passes as forward ones.
        self.stage_index_to_group_rank = {
            stage: schedule.rank_of(stage, self.pp_group_size) for stage in range(self._num_stages)
        }
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = _add_send_recv(
            {
                rank: [
                    _Action(stage, _ComputationType.FORWARD, microbatch)
                    for stage in schedule.stages_of(rank, self.pp_group_size, self._num_stages)
                    for microbatch in range(num_microbatches)
                ]
                for rank in range(self.pp_group_size)
            },
            stage_to_rank=self.stage_index_to_group_rank.__getitem__,
            num_stages=self._num_stages,
        )


class _AscendingBFS(ScheduleLoopedBFS):
    """Breadth first, with the backward passes in the order of the microbatches."""

    @override
    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        actions: list[_Action | None] = super()._calculate_single_rank_operations(rank)
        backward = _ComputationType.FULL_BACKWARD
        places = [
            place
            for place, one in enumerate(actions)
            if one is not None and one.computation_type is backward
        ]
        # In the order of the stages, as they are, and of the microbatches in each.
        found = [one for place in places if (one := actions[place]) is not None]
        found.sort(key=lambda one: (-one.stage_index, one.microbatch_index))
        for place, one in zip(places, found, strict=True):
            actions[place] = one
        return actions


_ENGINES: dict[str, Callable[..., EngineSchedule]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": _AscendingBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def _examples(passed: Sequence[Passed], has_backward: bool) -> tuple[Tensor, ...]:
    """Tensors without data: the engine reads shape, type and whether a gradient comes back."""
    return tuple(
        torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device="meta").requires_grad_(
            one.feeds_loss and has_backward
        )
        for one in passed
    )
