"""A search for a learning rate runs the model that is trained afterwards, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.runs import QUIET, loader
from tests.callbacks.test_fp8 import Tower, _row
from tests.helpers import assert_same_bits


class Faint(Tower):
    """Gradients that are nothing in FP8, but for their units."""

    lr = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.num_units: list[int] = []
        self.callback: UnitScaleCallback | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 1e-6 * super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.num_units.append(0 if self.callback is None else len(self.callback.gauge))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.fc1.parameters(), *self.fc2.parameters()], lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader(128, 16, make=_row)

    def val_dataloader(self) -> Any:
        return loader(16, 16, make=_row)


SEARCH = {"min_lr": 1e4, "max_lr": 2e5, "early_stop_threshold": None}


def _searched(callback: UnitScaleCallback | None, *, as_callback: bool) -> tuple[Tensor, Faint]:
    pl.seed_everything(5, verbose=False)
    module = Faint()
    module.callback = callback
    finder = LearningRateFinder(num_training_steps=8, **SEARCH)  # type: ignore[arg-type]
    callbacks: list[pl.Callback] = [] if callback is None else [callback]
    options = {**QUIET, "max_steps": 2, "num_sanity_val_steps": 1}
    trainer = pl.Trainer(callbacks=[*callbacks, *([finder] if as_callback else [])], **options)
    if as_callback:
        trainer.fit(module)
        found: Any = finder.optimal_lr
    else:
        found = Tuner(trainer).lr_find(module, num_training=8, **SEARCH)  # type: ignore[arg-type]
    return torch.tensor(found.results["loss"]), module


@pytest.mark.parametrize("as_callback", [True, False])
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_learning_rate_search_in_fp8_has_units(
    as_callback: bool, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, _ = _searched(None, as_callback=as_callback)
    lossless, _ = _searched(UnitScaleCallback(), as_callback=as_callback)
    assert_same_bits(lossless, plain)
    makes: tuple[Callable[[], UnitScaleCallback], ...] = (
        lambda: UnitScaleCallback(precision="fp8"),
        lambda: UnitScaleCallback(simulate="fp8"),
    )
    for make in makes:
        found, module = _searched(make(), as_callback=as_callback)
        # Nothing was measured before the first batch of the search, and all of them ran in units.
        assert min(module.num_units) >= 6
        torch.testing.assert_close(found, plain, rtol=0.02, atol=0.0)
        assert "before_call" not in vars(module) and "training_step" not in vars(module)


@pytest.mark.parametrize("as_callback", [True, False])
@pytest.mark.parametrize("method", ["unit-scaling", "u-mup"])
def test_learning_rate_search_by_rules_is_an_error(
    method: Any, as_callback: bool, tmp_path: Any
) -> None:
    """It would find the rate of the plain model, which the rules then make another one."""
    module = Faint()
    finder = [LearningRateFinder(num_training_steps=8)] if as_callback else []
    options = {**QUIET, "max_steps": 2, "default_root_dir": tmp_path}
    trainer = pl.Trainer(callbacks=[UnitScaleCallback(method), *finder], **options)
    with pytest.raises(MisconfigurationException, match=r"^LearningRateFinder: it takes the call"):
        if as_callback:
            trainer.fit(module)
        else:
            Tuner(trainer).lr_find(module)
    assert "training_step" not in vars(module)
