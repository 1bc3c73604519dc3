"""No training step reads a number off its device, but for those that measure.

On an accelerator to read one is to wait for all that was computed before. Here it is seen on a CPU,
by the functions and operators that read.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import lightning_unitscale
from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.callbacks import Simulate
from tests.callbacks.modules import Regression, adamw
from tests.callbacks.runs import QUIET, loader

PACKAGE = str(Path(lightning_unitscale.__file__).parent)
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
OPERATORS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}
SAMPLED_EVERY, NUM_STEPS = 4, 8


class Readings(TorchDispatchMode):
    """Where the package reads numbers of tensors within this context."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in OPERATORS:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """Note the place, if it is one of the package."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        others = [
            frame for frame in frames if f"{Path(torch.__file__).parent}" not in frame.filename
        ]
        if others[-1].filename.startswith(PACKAGE):
            self.places.append(f"{others[-1].filename}:{others[-1].lineno}")


class Watching(pl.Callback):
    """Keeps what each training batch has read, from its start to its end."""

    def __init__(self) -> None:
        self.places: list[list[str]] = []
        self._open = contextlib.ExitStack()

    @override
    def on_train_epoch_start(self, *_: Any) -> None:
        self._next()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._next()

    @override
    def on_train_epoch_end(self, *_: Any) -> None:
        self._open.close()

    def _next(self) -> None:
        self._open.close()
        readings = self._open.enter_context(Readings())
        self.places.append(readings.places)
        for name in METHODS:
            stand_in = _noting(readings, getattr(Tensor, name))
            self._open.enter_context(mock.patch.object(Tensor, name, stand_in))


def _noting(readings: Readings, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        readings.note()
        return method(tensor, *args, **kwargs)

    return call


@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")
@pytest.mark.parametrize(
    "make",
    [
        lambda: UnitScaleCallback(),
        lambda: UnitScaleCallback(simulate=Simulate("fp8", rounding="stochastic")),
        lambda: UnitScaleCallback(precision="fp8"),
    ],
    ids=["units", "simulated", "fp8"],
)
def test_a_step(make: Callable[[], pl.Callback]) -> None:
    watching = Watching()
    # Of every loss a number is wanted for alerts, which an accelerator sends while it goes on.
    monitor = ScaleMonitor(every_n_steps=SAMPLED_EVERY, on_violation=None)
    trainer = pl.Trainer(callbacks=[make(), monitor, watching], max_steps=NUM_STEPS, **QUIET)
    trainer.fit(Regression(adamw), loader(4 * NUM_STEPS))
    for step, places in enumerate(watching.places[:NUM_STEPS]):
        if step == 0:
            assert places  # units are taken: it is seen here if something is read
        elif step % SAMPLED_EVERY:
            assert places == []
        else:
            # The sample of all tensors goes to the host as one, and there to NumPy.
            assert len(places) == 2, places
