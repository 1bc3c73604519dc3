"""Stages of ``torch.distributed.pipelining`` in torch 2.11, completed.

There everything that is received is made to ask for a gradient, integers too, and one is sent back
for each; a gradient that is not there is an error; what the last stage returns must look like what
it hands on, which is nothing; and a rank that has two neighbouring stages greets itself, which gloo
refuses.

Checked on torch 2.11: ``PipelineStage`` with its ``_prepare_forward_infra``,
``_create_grad_recv_info``, ``_create_grad_send_info``, ``_get_recv_ops``,
``_retrieve_recv_activations``, ``_validate_fwd_outputs`` and ``_get_init_p2p_neighbors_ops``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override


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


IS_TORCH_2_11 = torch.torch_version.TorchVersion(torch.__version__) < "2.12"
if TYPE_CHECKING or not IS_TORCH_2_11:  # noqa: SIM108
    Stage = PipelineStage
else:
    Stage = StageOnTorch211
