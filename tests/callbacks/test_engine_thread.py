"""Trainings by every method, with backward passes on a thread of the autograd engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from tests.callbacks.runs import Run, run
from tests.engine_thread import backward_on_engine_thread
from tests.helpers import assert_same_bits
from tests.monitor.modules import MODULES

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
METHODS: dict[str, Callable[[], list[pl.Callback]]] = {
    "plain": list,
    "lossless": lambda: [UnitScaleCallback()],
    "monitor": lambda: [ScaleMonitor(every_n_steps=2)],
    "simulate": lambda: [UnitScaleCallback(simulate="E4M3FN"), ScaleMonitor(every_n_steps=2)],
    "fp8": lambda: [UnitScaleCallback(precision="fp8"), ScaleMonitor(every_n_steps=2)],
    "unit-scaling": lambda: [UnitScaleCallback("unit-scaling"), ScaleMonitor(every_n_steps=2)],
    "u-mup": lambda: [UnitScaleCallback("u-mup", simulate="fp8")],
    "remat": lambda: [RematCallback("min_cut")],
    "remat, lossless": lambda: [UnitScaleCallback(remat="min_cut")],
}
CHECKPOINTS = ("Reentrant", "NonReentrant", "NestedReentrant", "ManualReentrant", "Selective")
KINDS = (*CHECKPOINTS, "Adversaries", "Attack", "Hooks", "OwnFunction", "Penalty")
CASES = [
    *((method, "Tied") for method in METHODS),
    *((method, kind) for method in ("lossless", "monitor", "simulate", "fp8") for kind in KINDS),
]


def _shown(trained: Run) -> list[Any]:
    """The reports of callbacks on a training."""
    shown: list[Any] = []
    for callback in trained.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, UnitScaleCallback):
            shown += [str(callback.gauge), callback.coverage]
        elif isinstance(callback, ScaleMonitor):
            shown += [str(snapshot) for snapshot in callback.snapshots]
    return shown


@pytest.mark.slow_cases
@pytest.mark.parametrize(("method", "kind"), CASES)
def test_engine_thread_matches_calling_thread(method: str, kind: str) -> None:
    """Bits, coverage, explanations and scales are those of the calling thread."""
    here = run(MODULES[kind], METHODS[method]())
    with backward_on_engine_thread():
        there = run(MODULES[kind], METHODS[method]())
    assert_same_bits(there.compared(), here.compared())
    assert _shown(there) == _shown(here)
