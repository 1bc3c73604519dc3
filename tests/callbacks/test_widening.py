"""FP8(on_misfit="widen"): layers leave FP8 when they no longer fit, and return at recalibration."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale import FP8, UnitScaleCallback
from tests.callbacks.runs import QUIET


class Spiked(LightningModule):
    """A layer whose input has one huge element in some steps."""

    def __init__(self, spiked: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.spiked = spiked

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        batch = batch[0].clone()
        if index in self.spiked:
            batch[0, 0] = 3000.0
        return self.second(self.first(batch).tanh()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InFP8(UnitScaleCallback):
    """Records after each batch whether both layers run in FP8."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        names = ("first.linear", "second.linear")
        self.seen.append("".join("8" if self._fp8.runs(name) else "-" for name in names))


def _fit(
    spiked: tuple[int, ...], on_misfit: str, steps: int = 7, logger: Logger | bool = False
) -> InFP8:
    torch.manual_seed(2)
    data = DataLoader([torch.randn(16, 32) for _ in range(steps)])
    callback = InFP8(precision=FP8(on_misfit=on_misfit), recalibrate=5)  # type: ignore[arg-type]
    options = {**QUIET, "logger": logger}
    Trainer(max_steps=steps, callbacks=[callback], **options).fit(Spiked(spiked), data)
    return callback


def test_misfit_layer_leaves_fp8_until_recalibration() -> None:
    callback = _fit((2,), "widen")
    # It still runs in FP8 in the step that it does not fit. Step 5 measures again.
    assert callback.seen == ["88", "88", "-8", "-8", "-8", "-8", "88"]
    text = str(callback.explain())
    assert "Out of FP8 from step 2 on: first.linear, since" in text
    assert "Back in the finer format from step 5 on: first.linear" in text


def test_format_changes_are_logged(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    _fit((2,), "widen", logger=logger)
    events = EventAccumulator(logger.log_dir).Reload()
    found = events.Tensors("~scales/formats/text_summary")
    assert [event.step for event in found] == [2, 5]
    texts = [tensor_util.make_ndarray(event.tensor_proto).item().decode() for event in found]
    assert texts[0].startswith("- Out of FP8 from step 2 on: first.linear, since")
    assert texts[1] == "- Back in the finer format from step 5 on: first.linear"


def test_checkpoint_keeps_widened_layers() -> None:
    callback = _fit((2,), "widen", steps=4)
    state = callback._matmuls.state_dict()
    assert list(state["fp8_unfit"]) == ["first.linear"]
    other = UnitScaleCallback(precision=FP8(on_misfit="widen"))
    other._matmuls.load_state_dict(state)
    assert not other._fp8.runs("first.linear")


def test_default_checks_operands_only_at_recalibration() -> None:
    assert _fit((2,), "leave").seen == ["88"] * 7


def test_unknown_on_misfit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^on_misfit='stop': not a reaction"):
        FP8(on_misfit="stop")  # type: ignore[arg-type]
