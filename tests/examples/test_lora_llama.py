from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from examples.lora_llama import LoraLlama
from examples.text import TextDataModule
from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.runs import QUIET
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.slow

NUM_STEPS = 4


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].clone())


def _fit(*callbacks: pl.Callback) -> tuple[LoraLlama, list[Tensor]]:
    pl.seed_everything(0, verbose=False)
    module, losses = LoraLlama(width=32, depth=2), Losses()
    data = TextDataModule(context=64, batch_size=4, max_bytes=200_000)
    options: dict[str, Any] = {"max_steps": NUM_STEPS, **QUIET}
    pl.Trainer(callbacks=[losses, *callbacks], **options).fit(module, data)
    return module, losses.values


def test_budget_is_kept_and_bit_identical() -> None:
    plain, plain_losses = _fit()
    whole, remat = RematCallback(1.0), RematCallback(0.3)
    for callback in (whole, remat):
        module, losses = _fit(callback)
        assert_same_bits((losses, module.state_dict()), (plain_losses, plain.state_dict()))
        # The step is captured whole, so that the budget is that of all of it.
        assert len(callback.reports) == 1
    assert remat.measured_peak_bytes is not None and whole.measured_peak_bytes is not None
    assert remat.measured_peak_bytes <= 0.62 * whole.measured_peak_bytes


def test_only_lora_factors_are_trained() -> None:
    pl.seed_everything(0, verbose=False)
    before = LoraLlama(width=32, depth=2).state_dict()
    after = _fit(UnitScaleCallback(remat=0.6))[0].state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    factors = {name for name in before if name.endswith(("down.weight", "up.weight"))}
    assert changed == factors and len(factors) == 2 * 7 * 2
