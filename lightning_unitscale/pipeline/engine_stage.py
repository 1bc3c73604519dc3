"""A stage for a schedule of torch.distributed.pipelining that somebody else drives."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_unitscale.pipeline.stage import StageModule, stage_info


class NamedInputs(nn.Module):
    """A stage that takes what it received by position, and the call's arguments by name.

    Args:
        stage: The stage.
        loss: Position of the loss among the outputs of the last stage.
    """

    def __init__(self, stage: StageModule, loss: int | None) -> None:
        super().__init__()
        self.stage = stage
        self._info = stage_info(stage)
        self._loss = loss

    @override
    def forward(self, *received: Tensor, **inputs: Any) -> Any:
        """Runs the stage; of the last one's results the loss, if it is known.

        Raises:
            ValueError: If an argument that the stage reads is not given.
        """
        names = self._info.input_names
        missing = [name for name in names if name not in inputs]
        if missing or len(received) != len(self._info.received):
            raise ValueError(
                f"stage {self._info.index} was given {len(received)} positional arguments and "
                f"{sorted(inputs)}; expected the module's arguments by name on every rank, "
                f"{', '.join(names) or 'none'} of them here: schedule.step(name=value, ...)."
            )
        outputs = self.stage(*received, *(inputs[name] for name in names))
        if not self._info.is_last:
            # A gradient of zeros would reach parameters that get none on one device.
            return tuple(
                value if passed.feeds_loss else value.detach()
                for value, passed in zip(outputs, self._info.sent, strict=True)
            )
        if self._loss is not None:
            return outputs[self._loss]
        tensors = tuple(one for one in outputs if isinstance(one, Tensor))
        return tensors[0] if len(tensors) == 1 else tensors
