"""Matmuls of recurrent layers are rounded to the format, or counted as unscaled."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.capture.operators import RECURRENT
from lightning_unitscale.matmuls.coverage import NO_UNIT
from tests.callbacks.runs import QUIET

SAMPLES, LENGTH, SIZE, HIDDEN = 6, 5, 8, 16


class Recurrent(pl.LightningModule):
    """A recurrent layer, or a cell that a loop calls, below a linear layer."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = getattr(nn, kind)(SIZE, HIDDEN, **options)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.recurrent, nn.RNNCellBase):
            return self.head(self.recurrent(x)[0][-1])
        state = None
        for row in x:
            state = self.recurrent(row, state)
        assert state is not None
        return self.head(state[0] if isinstance(state, tuple) else state)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "lstm": ("LSTM", {}, 4),
    "gru": ("GRU", {}, 3),
    "rnn": ("RNN", {}, 1),
    "relu": ("RNN", {"nonlinearity": "relu"}, 1),
    "lstm cell": ("LSTMCell", {}, 4),
    "gru cell": ("GRUCell", {}, 3),
    "rnn cell": ("RNNCell", {}, 1),
    "relu cell": ("RNNCell", {"nonlinearity": "relu"}, 1),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_matmuls_are_rounded_if_visible(kind: str) -> None:
    name, of_layer, gates = KINDS[kind]
    callback = UnitScaleCallback("u-mup", simulate="fp8")
    data = DataLoader([torch.randn(LENGTH, SAMPLES, SIZE)] * 3, batch_size=None)
    pl.Trainer(**QUIET, max_steps=3, max_epochs=1, callbacks=[callback]).fit(
        Recurrent(name, **of_layer), data
    )
    counts = [one for one in callback.coverage.counts if one.module == "recurrent"]
    matrices = gates * HIDDEN * (SIZE + HIDDEN)
    if kind == "lstm":
        # Forward, and as much for the gradients of weights and for those of what they multiply.
        (inside,) = counts
        assert (inside.kind, inside.outside) == ("plain", RECURRENT)
        assert inside.flops == 3 * 2 * LENGTH * SAMPLES * matrices
        return
    # The first state is zero.
    assert {(one.kind, one.outside) for one in counts} == {("format", ""), ("units", NO_UNIT)}
    # Neither the input nor the first state asks for a gradient.
    unasked = gates * HIDDEN * (LENGTH * SIZE + HIDDEN)
    total = sum(one.flops for one in counts)
    assert total == 2 * SAMPLES * (3 * LENGTH * matrices - unasked)
