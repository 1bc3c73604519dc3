"""No step but the first makes the host wait for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_unitscale
from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.gpu.models import train

_PACKAGE = str(Path(lightning_unitscale.__file__).parent)
_SAMPLED_EVERY = 4


class _Waits(pl.Callback):
    """Return where the package waited in each step, as reported by CUDA."""

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self._open = contextlib.ExitStack()

    def on_train_batch_start(self, *_: Any) -> None:
        self._caught = self._open.enter_context(warnings.catch_warnings(record=True)) or []
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self._open.close()
        self.lines.append(
            [
                f"{warning.filename}:{warning.lineno}"
                for warning in self._caught
                if "synchronizing CUDA" in str(warning.message)
                and warning.filename.startswith(_PACKAGE)
            ]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: UnitScaleCallback(),
        lambda: UnitScaleCallback(precision="fp8"),
        lambda: UnitScaleCallback(remat="min_cut"),
        lambda: UnitScaleCallback("u-mup"),
    ],
    ids=["units", "fp8", "captured", "u-mup"],
)
def test_steps_after_first_do_not_synchronize(
    make: Callable[[], pl.Callback], device: torch.device
) -> None:
    waits = _Waits()
    monitor = ScaleMonitor(every_n_steps=_SAMPLED_EVERY, on_violation=None)
    train(device, [waits, make(), monitor], steps=8)
    # The first one measures units; the numbers of a sample are read a step later.
    assert waits.lines[1:] == [[]] * 7
