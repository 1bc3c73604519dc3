"""Hooks of a validation that read weights, in a pipeline and for themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.pipeline.evaluation import has_validation_hooks
from lightning_unitscale.pipeline.rank_parameters import Watch
from tests.distributed.launch import run_ranks
from tests.helpers import assert_same_bits

READS: dict[str, Callable[[nn.Linear], Any]] = {
    "an operation": lambda layer: layer.weight + 1,
    "the layer": lambda layer: layer(torch.ones(4)),
    "its data": lambda layer: layer.weight.data,
    "a write": lambda layer: layer.weight.data.mul_(2.0),
    "a state dict": lambda layer: layer.state_dict(),
    "a number": lambda layer: layer.bias.tolist(),
}
DESCRIBES: dict[str, Callable[[nn.Linear], Any]] = {
    "nothing": lambda layer: None,
    "a shape": lambda layer: (layer.weight.shape, layer.weight.numel(), layer.weight.dtype),
    "a gradient": lambda layer: layer.weight.grad,
    "a flag": lambda layer: layer.weight.requires_grad_(False),
    "modes": lambda layer: (layer.eval(), list(layer.parameters())),
}


@pytest.mark.parametrize("name", [*READS, *DESCRIBES])
def test_parameter_reads_are_detected(name: str) -> None:
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.load_state_dict(layer.state_dict())
    watch, another = Watch(layer), Watch(nn.Linear(4, 4))
    found = {**READS, **DESCRIBES}[name](layer)
    expected = {**READS, **DESCRIBES}[name](other)
    assert watch.end() == (name in READS)
    assert not another.end()
    assert all(type(one) is nn.Parameter for one in layer.parameters())
    assert_same_bits(list(layer.parameters()), list(other.parameters()))
    if isinstance(found, Tensor):
        assert type(found) is type(expected)
        assert_same_bits(found, expected)


class Plain(pl.LightningModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass


class Hooked(Plain):
    def on_validation_start(self) -> None:
        pass


class Swaps(pl.Callback):
    def on_validation_epoch_start(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("module", "callbacks", "expected"),
    [
        (Plain(), [], False),
        (Plain(), [pl.Callback(), UnitScaleCallback(), ScaleMonitor()], False),
        (Plain(), [pl.callbacks.ModelCheckpoint(), pl.callbacks.RichProgressBar()], False),
        (Hooked(), [], True),
        (Plain(), [Swaps()], True),
    ],
)
def test_hooks_that_may_read_weights(module: Any, callbacks: list[Any], expected: bool) -> None:
    assert has_validation_hooks(module, callbacks) == expected


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["merged", "swapped", "watched", "first rank"])
def test_validation_hooks_that_change_weights(case: str, tmp_path: Path) -> None:
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        module, given = "tests.pipeline.validation_hooks_run", (str(count), case)
        run_ranks(module, folder, *given, num_ranks=count, timeout=120)
        found[count] = [torch.load(folder / f"{rank}.pt") for rank in range(count)]
    (expected,) = found[1]
    for one in found[2]:
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert one["validations"] == pytest.approx(expected["validations"], rel=1e-5)
        assert len(one["validations"]) == 3
        # Every rank validates with all weights only if a hook reads them.
        assert one["whole"] == ([True] * 3 if case != "watched" else [False] * 3)
        assert not any(one["whole in training"])
