"""Adapt stages and schedules to the engine of ``torch.distributed.pipelining``.

Workarounds, on torch 2.13 and 2.11:

- ``split_backward`` splits backward passes, because the engine's halves are wrong. If a stage runs
  its whole pass in the first half, it gets the loss as a tensor. The engine would not differentiate
  a tuple.
- A stage with nothing to differentiate (a frozen one) has no backward pass.
- Zero-bubble schedules send gradients without a copy, but only contiguous tensors can be sent.
- ``LoopedBFS`` adds gradients up from the last microbatch to the first, unlike all other schedules.
  :class:`BreadthFirst` begins with the first, at the same cost.
- Multi-stage schedules fail, or run empty backward passes, if there are only forward passes.

On torch 2.11 only (:class:`StageOnTorch211`): every received tensor, even of integers, requires a
gradient and sends one back. A missing gradient is an error. The results of the last stage must look
like what it sends, which is nothing. A rank with two adjacent stages connects to itself, which gloo
refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
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
from lightning_unitscale.pipeline.stage import Passed, StageModule


class StageOnTorch211(PipelineStage):
    """A stage with known received and sent tensors, and known requirements for gradients."""

    @override
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # Without a backward pass, no tensor of a stage may require a gradient.
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
        """Use the results of the previous stage on the same rank."""
        sent = prev_stage_outputs
        sent = (sent,) if isinstance(sent, Tensor) else sent
        for info, tensor in zip(self.args_recv_info[mb_index], sent, strict=True):
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
        """Send the gradients of the received tensors, and zeros for missing ones."""
        if self.has_backward and not self.is_first:
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(example.shape, dtype=example.dtype, device=self.device)
                if gradient is None and example.requires_grad
                else gradient
                for example, gradient in zip(
                    self._taken, self.bwd_cache[bwd_chunk_id], strict=False
                )
            )
        return super().get_bwd_send_ops(bwd_chunk_id)

    @override
    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Use the gradients of the next stage on the same rank."""
        for info, gradient in zip(
            self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=False
        ):
            if info.buffer is not None:
                info.buffer = torch.zeros_like(info.buffer) if gradient is None else gradient

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Skip the comparison, because shapes are those of the captured step."""

    @override
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    @property
    def _taken(self) -> Sequence[Tensor]:
        """Return examples of the received tensors."""
        examples: Sequence[Tensor] | None = self.inputs_meta  # type: ignore[attr-defined]
        assert examples is not None
        return examples


if TYPE_CHECKING or torch.torch_version.TorchVersion(torch.__version__) >= "2.12":
    Stage = PipelineStage
else:
    Stage = StageOnTorch211


class EngineStage(Stage):
    """A stage of the engine with known shapes, so nothing runs to find them."""

    def __init__(
        self,
        stage: StageModule,
        run: Callable[..., Any],
        device: torch.device,
        group: dist.ProcessGroup | None,
        *,
        has_backward: bool,
    ) -> None:
        info = stage.info
        sent = _examples(info.sent, has_backward)
        if info.is_last:
            # Only its number and order matter. This stage sends nothing.
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
        self._stage, self._run = stage, run
        self._is_separable = is_separable(stage.graph)
        # True if something other than the stage's graph prevents a split of the backward pass.
        self.whole = False

    @override
    def forward_maybe_with_nosync(self, *received: Tensor, **inputs: Any) -> Any:
        """Run the forward pass of one microbatch."""
        outputs = self._run(self._stage, *received, **inputs)
        info = self._stage.info
        if info.is_last:
            return outputs
        # A gradient of zeros would reach parameters that get none on one device.
        return tuple(
            value if passed.feeds_loss else value.detach()
            for value, passed in zip(outputs, info.sent, strict=True)
        )

    @override
    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run the backward pass of one microbatch, or one half of it."""
        output = bwd_kwargs["stage_output"]
        outputs = (output,) if isinstance(output, Tensor) else tuple(output)
        if backward_type != "weight" and not any(tensor.requires_grad for tensor in outputs):
            return (None,) * len(bwd_kwargs["input_values"]), []
        waiting: list[Any] = []
        # The caller's autocast is for the forward passes that run around this one.
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
                    # The loss itself: the engine does not differentiate a tuple without gradients.
                    bwd_kwargs = {**bwd_kwargs, "stage_output": outputs[0]}
                gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
        sent = tuple(None if gradient is None else gradient.contiguous() for gradient in gradients)
        return sent, waiting


def _examples(passed: Sequence[Passed], has_backward: bool) -> tuple[Tensor, ...]:
    """Return tensors without data. The engine reads shape, type and ``requires_grad``."""
    return tuple(
        torch.empty(value.tensor.shape, dtype=value.tensor.dtype, device="meta").requires_grad_(
            value.feeds_loss and has_backward
        )
        for value in passed
    )


class BreadthFirst(_PipelineScheduleRuntime):
    """A schedule with all forward passes, then all backward passes if there is a loss."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        num_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False)
        # The engine's own preparation expects as many backward passes as forward passes.
        self.stage_index_to_group_rank = {
            stage: schedule.rank_of(stage, self.pp_group_size) for stage in range(self._num_stages)
        }
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        kinds = [_ComputationType.FORWARD]
        if loss_fn is not None:
            kinds.append(_ComputationType.FULL_BACKWARD)
        actions: dict[int, list[_Action]] = {}
        for rank in range(self.pp_group_size):
            own = schedule.stages_of(rank, self.pp_group_size, self._num_stages)
            actions[rank] = [
                _Action(stage, kind, microbatch)
                for kind in kinds
                for stage in (own if kind is _ComputationType.FORWARD else reversed(own))
                for microbatch in range(num_microbatches)
            ]
        self.pipeline_order_with_comms = _add_send_recv(
            actions,
            stage_to_rank=self.stage_index_to_group_rank.__getitem__,
            num_stages=self._num_stages,
        )
