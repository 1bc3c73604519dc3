"""Stages driven by the schedules of ``torch.distributed.pipelining``.

Checked on torch 2.13: ``_PipelineScheduleRuntime`` with its ``pipeline_order_with_comms``,
``_add_send_recv``, ``_calculate_single_rank_operations``, ``_Action`` and ``_ComputationType``;
and ``forward_maybe_with_nosync`` and ``backward_maybe_with_nosync`` of ``PipelineStage``, which
have no underscore and no documentation. Checked on torch 2.11 as well, whose stages are completed
by :class:`StageOnTorch211`.

What is worked around here:

- The halves of a backward pass that zero-bubble schedules take apart are those of
  ``split_backward``. The engine's drop the gradient of a parameter that reaches a stage's result by
  a path that touches nothing the stage received (a second embedding that is only handed on), and
  those of torch 2.11 take the gradients of all results of an operation for one of the first, and
  count twice what reaches a weight by two ways. A stage that runs its whole backward pass in the
  place of the first half is given the last one's loss as a tuple, of which the engine's whole pass
  would differentiate nothing.
- A stage with nothing to differentiate (a frozen one) has no backward.
- Zero-bubble schedules send gradients as they come, and only contiguous tensors can be sent.
- ``LoopedBFS`` runs the backward passes from the last microbatch to the first, which adds the
  gradients up in another order than every other schedule. Here they run from the first, which takes
  as long.
- Forward only, multi-stage schedules fail or run empty backward passes. Here they are schedules of
  forward passes alone.

Checked on torch 2.11: ``PipelineStage`` with its ``_prepare_forward_infra``,
``_create_grad_recv_info``, ``_create_grad_send_info``, ``_get_recv_ops``,
``_retrieve_recv_activations``, ``_validate_fwd_outputs`` and ``_get_init_p2p_neighbors_ops``.

There everything that is received is made to ask for a gradient, integers too, and one is sent back
for each; a gradient that is not there is an error; what the last stage returns must look like what
it hands on, which is nothing; and a rank that has two neighbouring stages greets itself, which gloo
refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
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
from lightning_unitscale.pipeline.split_backward import (
    backward_inputs,
    backward_weights,
    is_separable,
)
from lightning_unitscale.pipeline.stage import Passed, StageModule, stage_info


class StageOnTorch211(PipelineStage):
    """A stage that was told what it takes and hands on, and which of it asks for a gradient."""

    @override
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # A stage without a backward pass makes nothing ask for a gradient.
        has_backward, self.has_backward = self.has_backward, False
        try:
            return super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = has_backward

    @override
    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        wants = self.has_backward and torch.is_grad_enabled()
        return tuple(
            tensor.requires_grad_(wants and example.requires_grad)
            for tensor, example in zip(received, self._taken, strict=True)
        )

    @override
    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes what the stage before, on the same rank, hands on."""
        handed = prev_stage_outputs
        handed = (handed,) if isinstance(handed, Tensor) else handed
        for info, tensor in zip(self.args_recv_info[mb_index], handed, strict=True):
            info.buffer = tensor.detach()

    @override
    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        infos = super()._create_grad_recv_info(act_send_info)
        examples: Sequence[Tensor] = self.get_outputs_meta()  # type: ignore[attr-defined]
        for info, example in zip(infos, examples, strict=False):
            if not example.requires_grad:
                info.buffer = None
        return infos

    @override
    def _get_recv_ops(self, recv_infos: tuple[Any, ...]) -> list[dist.P2POp]:
        return super()._get_recv_ops(
            tuple(info for info in recv_infos if getattr(info, "buffer", None) is not None)
        )

    @override
    def _create_grad_send_info(self, args_recv_info: tuple[Any, ...]) -> list[int | None]:
        stages = super()._create_grad_send_info(args_recv_info)
        return [
            stage if example.requires_grad else None
            for stage, example in zip(stages, self._taken, strict=True)
        ]

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send the gradients of what was received; zeros where there is none."""
        if self.has_backward and not self.is_first:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(self._for_sending(gradients))
        return super().get_bwd_send_ops(bwd_chunk_id)

    @override
    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Takes the gradients that the stage after, on the same rank, hands back."""
        for info, gradient in zip(
            self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=False
        ):
            if info.buffer is not None:
                info.buffer = torch.zeros_like(info.buffer) if gradient is None else gradient

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Nothing to compare: shapes are those of the captured step."""

    @override
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    @property
    def _taken(self) -> Sequence[Tensor]:
        """Examples of what is received."""
        examples: Sequence[Tensor] | None = self.inputs_meta  # type: ignore[attr-defined]
        assert examples is not None
        return examples

    def _for_sending(self, gradients: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
        for example, gradient in zip(self._taken, gradients, strict=False):
            if gradient is None and example.requires_grad:
                yield torch.zeros(example.shape, dtype=example.dtype, device=self.device)
            else:
                yield gradient


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
        stage: The stage; on its device.
        run: Called for each microbatch with what the stage received and with the keyword arguments
            of the schedule's step. Returns the stage's outputs, or for the last stage what the
            schedule's loss function takes.
        device: Where it runs.
        group: The pipeline's process group.
        has_backward: Whether gradients are handed back.

    Attributes:
        whole: Whether a backward pass must not be taken apart for reasons beside the stage's own.
    """

    def __init__(
        self,
        stage: StageModule,
        run: Callable[..., Any],
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        has_backward: bool,
    ) -> None:
        info = stage_info(stage)
        sent = _examples(info.sent, has_backward)
        if info.is_last:
            # Only its number and order matter, and nothing is sent from here.
            sent = (torch.empty((), device="meta", requires_grad=has_backward),)
        super().__init__(
            stage,
            info.index,
            info.num_stages,
            device,
            input_args=_examples(info.received, has_backward),
            output_args=sent,
            group=group,
        )
        self._run = run
        self._info = info
        self._is_separable = is_separable(stage.graph)
        self.whole = False

    @override
    def forward_maybe_with_nosync(self, *received: Tensor, **inputs: Any) -> Any:
        """Runs the forward pass of one microbatch."""
        outputs = self._run(*received, **inputs)
        if self._info.is_last:
            return outputs
        # A gradient of zeros would reach parameters that get none on one device.
        return tuple(
            value if passed.feeds_loss else value.detach()
            for value, passed in zip(outputs, self._info.sent, strict=True)
        )

    @override
    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Runs (a part of) the backward pass of one microbatch."""
        output = bwd_kwargs["stage_output"]
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        if backward_type != "weight" and not any(tensor.requires_grad for tensor in outputs):
            return (None,) * len(bwd_kwargs["input_values"]), []
        waiting: list[Any] = []
        # The caller's autocast is for the forward passes, between which this one runs.
        with torch.autocast(self.device.type, enabled=False):
            if backward_type == "weight":
                backward_weights(bwd_kwargs["param_groups"])
                return (), None
            if backward_type == "input" and self._is_separable and not self.whole:
                gradients, waiting = backward_inputs(
                    outputs, bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
                )
            else:
                if bwd_kwargs["output_grads"] is None:
                    # The loss: of a tuple without gradients the engine differentiates nothing.
                    bwd_kwargs = {**bwd_kwargs, "stage_output": outputs[0]}
                gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
        sent = tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)
        return sent, waiting


def make_schedule(
    schedule: Schedule,
    stages: Sequence[EngineStage],
    num_microbatches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> EngineSchedule:
    """The engine's schedule for training; gradients are left as the loss function scales them.

    Args:
        schedule: The schedule.
        stages: This rank's stages, in ascending order.
        num_microbatches: Microbatches of a step.
        loss_fn: Called with the last stage's result and the target of each microbatch.
    """
    engine = _ENGINES[schedule.name]
    local = stages[0] if schedule.placement == "single" else list(stages)
    return engine(local, num_microbatches, loss_fn=loss_fn, scale_grads=False)


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
        # In the order of the stages, as they are, and of the microbatches in each.
        slots = [
            (slot, action)
            for slot, action in enumerate(actions)
            if action is not None and action.computation_type is backward
        ]
        ascending = sorted(
            (action for _, action in slots),
            key=lambda action: (-action.stage_index, action.microbatch_index),
        )
        for (slot, _), action in zip(slots, ascending, strict=True):
            actions[slot] = action
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
        torch.empty(value.tensor.shape, dtype=value.tensor.dtype, device="meta").requires_grad_(
            value.feeds_loss and has_backward
        )
        for value in passed
    )
