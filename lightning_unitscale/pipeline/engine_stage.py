"""Stages as the engine of ``torch.distributed.pipelining`` runs them.

Checked on torch 2.13: ``forward_maybe_with_nosync`` and ``backward_maybe_with_nosync`` of
``PipelineStage``, which have no underscore and no documentation. Checked on torch 2.11 as well,
whose stages are completed by ``torch_2_11.py``.

What is worked around here:

- The halves of a backward pass are those of ``split_backward``, which says what is wrong with the
  engine's. A stage that runs its whole pass in the first one's place is given the loss as a tuple,
  of which the engine would differentiate nothing.
- A stage with nothing to differentiate (a frozen one) has no backward.
- Zero-bubble schedules send gradients as they come, and only contiguous tensors can be sent.
- What schedules do themselves: ``breadth_first.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_unitscale.pipeline.split_backward import (
    backward_inputs,
    backward_weights,
    is_separable,
)
from lightning_unitscale.pipeline.stage import Passed, StageModule
from lightning_unitscale.pipeline.torch_2_11 import Stage


class EngineStage(Stage):
    """A stage of the engine whose shapes are known, so that nothing is run to find them.

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
        info = stage.info
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
        self._stage, self._run = stage, run
        self._is_separable = is_separable(stage.graph)
        self.whole = False

    @override
    def forward_maybe_with_nosync(self, *received: Tensor, **inputs: Any) -> Any:
        """Runs the forward pass of one microbatch."""
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


def _examples(passed: Sequence[Passed], has_backward: bool) -> tuple[Tensor, ...]:
    """Tensors without data: the engine reads shape, type and whether a gradient comes back."""
    return tuple(
        torch.empty(value.tensor.shape, dtype=value.tensor.dtype, device="meta").requires_grad_(
            value.feeds_loss and has_backward
        )
        for value in passed
    )
