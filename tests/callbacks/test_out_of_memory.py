"""The text that is added to an out-of-memory error of a training step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from lightning_unitscale.capture.module_steps import steps_of
from tests.callbacks.runs import QUIET, MemoryLogger

CALLBACKS: dict[str, Callable[[], list[pl.Callback]]] = {
    "remat": lambda: [RematCallback(1.0)],
    "units": lambda: [UnitScaleCallback()],
    "all": lambda: [RematCallback(1.0), UnitScaleCallback(), ScaleMonitor(every_n_steps=100)],
}
_TEXT = (
    "CUDA out of memory. Tried to allocate 2 MiB. GPU 0 has a total capacity of {} of which 0 is"
)


class Failing(pl.LightningModule):
    """A model whose second step runs out of memory."""

    def __init__(self, error: BaseException, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(num_blocks)
        )
        self._error = error

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = x + block(x)
        loss = x.square().mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 1:
            raise self._error

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def _notes(error: BaseException, callbacks: list[pl.Callback], num_blocks: int = 1) -> list[str]:
    """Return the notes of the error that a fit ends with, which is the error itself."""
    module = Failing(error, num_blocks)
    data = DataLoader(TensorDataset(torch.randn(256 * 3, 32)), batch_size=256)
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "logger": MemoryLogger()}
    with pytest.raises(type(error)) as raised:
        pl.Trainer(callbacks=callbacks, **options).fit(module, data)
    assert raised.value is error
    assert steps_of(module) is None
    return [note for note in getattr(error, "__notes__", []) if "lightning_unitscale" in note]


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", CALLBACKS)
def test_error_note_has_largest_owners_and_budget(name: str) -> None:
    error = torch.OutOfMemoryError(_TEXT.format("1.50 MiB"))
    (note,) = _notes(error, CALLBACKS[name](), num_blocks=3)
    assert str(error) == _TEXT.format("1.50 MiB")
    assert "at batch size 256. The largest owners of its bytes" in note
    owners = [line for line in note.splitlines() if line.endswith("iB")]
    assert len(owners) == 5 and owners[0].startswith("activations of blocks.*.1")
    found = re.search(r"RematCallback\((\d+)\) would fit into 1.50 MiB", note)
    assert found is not None
    if name == "remat":
        callback = RematCallback(int(found[1]))
        _notes(torch.OutOfMemoryError("again"), [callback], num_blocks=3)
        assert callback.predicted_peak_bytes is not None
        assert callback.predicted_peak_bytes <= int(found[1])


@pytest.mark.slow
def test_error_note_if_no_budget_fits() -> None:
    (note,) = _notes(torch.OutOfMemoryError(_TEXT.format("100.00 KiB")), [RematCallback(1.0)])
    assert "No budget fits into 100.00 KiB, since the smallest peak" in note


def test_error_note_without_capacity_has_only_owners() -> None:
    (note,) = _notes(torch.OutOfMemoryError("out of memory"), [UnitScaleCallback()])
    assert "largest owners" in note and "RematCallback" not in note


@pytest.mark.slow
def test_other_errors_get_no_note() -> None:
    assert not _notes(RuntimeError("something else"), [RematCallback(1.0)])


def test_failed_profile_keeps_original_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no shapes")

    monkeypatch.setattr("lightning_unitscale.callbacks.out_of_memory.profile_graph", fail)
    (note,) = _notes(torch.OutOfMemoryError("out of memory"), [RematCallback(1.0)])
    assert note == "lightning_unitscale: The step could not be profiled: no shapes"
