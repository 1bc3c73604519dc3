"""A model trained with ``precision="fp8"`` is evaluated as its checkpoint is, or in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import FP8, UnitScaleCallback
from tests.callbacks.runs import QUIET, loader


def _row(generator: torch.Generator) -> Tensor:
    return torch.randn(8, 32, generator=generator)


class Encoder(pl.LightningModule):
    """A layer that torch evaluates as one kernel, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch).float(), batch.cumsum(-1))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _module() -> Encoder:
    torch.manual_seed(0)
    return Encoder()


def _trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(callbacks=list(callbacks), max_steps=8, **{**QUIET, **options})


def _data() -> Any:
    return loader(16, 4, make=_row)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_validation_loss_matches_checkpoint_without_callback(
    precision: Any, tmp_path: Path
) -> None:
    callback = UnitScaleCallback(precision="fp8")
    trainer = _trainer(callback, precision=precision)
    trainer.fit(_module(), _data(), _data())
    found = trainer.callback_metrics["loss"]
    text = callback.explain()
    assert "validation_step" in text and "5 of 6 matmuls in FP8" in text
    assert "Evaluation uses the Trainer's precision" in text
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    saved = torch.load(tmp_path / "trained.ckpt", weights_only=True)
    module = _module()
    module.load_state_dict(saved["state_dict"])
    (expected,) = _trainer(precision=precision).validate(module, _data(), verbose=False)
    assert float(found) == expected["loss"]


def test_evaluation_in_fp8_is_close_to_plain_evaluation() -> None:
    losses, texts = [], []
    for in_evaluation in (False, True):
        callback = UnitScaleCallback(precision=FP8(evaluation=in_evaluation))
        trainer = _trainer(callback)
        trainer.fit(_module(), _data(), _data())
        losses.append(trainer.callback_metrics["loss"])
        texts.append(callback.explain())
    assert 1e-5 < abs(losses[1] / losses[0] - 1) < 0.05
    lines = [text.splitlines() for text in texts]
    rows = [next(row for row in found if row.startswith("validation_step")) for found in lines]
    assert "in FP8" not in rows[0] and "in FP8" in rows[1]
    assert "checkpoint" not in texts[1]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_without_fit(stage: str) -> None:
    """It has the bits of a run without the callback, no batch runs twice, and FP8 differs."""
    found = []
    for callbacks in (
        [],
        [UnitScaleCallback(precision="fp8")],
        [UnitScaleCallback(precision=FP8(evaluation=True))],
    ):
        trainer = _trainer(*callbacks)
        if stage == "predict":
            found.append(torch.cat(trainer.predict(_module(), _data())))  # type: ignore[arg-type]
        else:
            (result,) = getattr(trainer, stage)(_module(), _data(), verbose=False)
            found.append(torch.tensor(result["loss"]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], found[2], rtol=0.1, atol=0.2)
