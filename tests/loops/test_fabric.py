"""Callbacks in Lightning Fabric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, TensorBoardLogger
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_unitscale import ScaleMonitor
from tests.helpers import assert_same_bits
from tests.loops.loops import NUM_STEPS, Net, batches, new
from tests.loops.methods import METHODS


def train(
    callbacks: list[Any], folder: Path, precision: Any, is_compiled: bool = False
) -> list[Tensor]:
    """Two models in turn, each with its optimizer, the first with accumulated gradients."""
    loggers = [TensorBoardLogger(folder, "board"), CSVLogger(folder, "csv")]
    fabric = Fabric(
        accelerator="cpu", devices=1, precision=precision, callbacks=callbacks, loggers=loggers
    )
    fabric.launch()
    models = [new(seed) for seed in (1, 2)]
    if is_compiled:
        models[0][0].compile(backend="aot_eager")
    (one, first), (two, second) = (fabric.setup(*each) for each in models)
    seen = []
    for x, y in batches():
        for part, target, is_last in zip(x.chunk(2), y.chunk(2), (False, True), strict=True):
            with fabric.no_backward_sync(one, enabled=not is_last):
                fabric.backward(F.cross_entropy(one(part), target))
        loss = F.cross_entropy(two(x), y)
        fabric.backward(loss)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.detach())
    fabric.save(folder / "state.pt", {"one": one, "two": two, "optimizer": first})
    return [*seen, *one.state_dict().values(), *two.state_dict().values()]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("precision", "is_compiled"), [("32-true", False), ("32-true", True), ("bf16-mixed", False)]
)
def test_two_models_are_bit_identical(precision: str, is_compiled: bool, tmp_path: Path) -> None:
    callbacks = METHODS["both"]()
    found = train(callbacks, tmp_path / "with", precision, is_compiled)
    assert_same_bits(found, train([], tmp_path / "without", precision, is_compiled))
    first = callbacks[0].attachments
    assert [attachment.step_index for attachment in first] == [NUM_STEPS] * 2
    for attachment in first:
        # Both callbacks share it.
        assert len(attachment.callbacks) == len(callbacks)
        for callback in attachment.callbacks:
            if hasattr(callback, "coverage"):
                assert callback.coverage.num_matmuls in (5, 10)
                assert "100 %" in callback.coverage.line()
            else:
                assert [snapshot.step for snapshot in callback.snapshots] == [0, 1, 2, 4]
                (folder,) = (tmp_path / "with" / "board").glob("version_*")
                tags = EventAccumulator(str(folder)).Reload().Tags()
                assert tags["scalars"]
        attachment.detach()
        assert "forward" not in vars(attachment.module)


class Stepping(pl.LightningModule):
    """Fabric's loop calls its step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def trained(
    make: Callable[[], torch.nn.Module],
    loss_of: Callable[[Any, Any, int], Tensor],
    prepare: Callable[[Any], None] = lambda model: None,
) -> tuple[torch.nn.Module, Any, Any]:
    """Module, wrapper and attachment of a training, which has the bits of one without callbacks."""
    results = []
    for callbacks in ([], METHODS["both"]()):
        torch.manual_seed(3)
        fabric = Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
        fabric.launch()
        module = make()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        prepare(model)
        for index, batch in enumerate(batches(3)):
            fabric.backward(loss_of(model, batch, index))
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert_same_bits(*results)
    (attachment,) = callbacks[0].attachments
    units, monitor = attachment.callbacks
    assert units.coverage.num_in_units == units.coverage.num_matmuls == 5
    assert [snapshot.step for snapshot in monitor.snapshots] == [0, 1, 2]
    return module, model, attachment


def test_steps_of_lightning_module_in_fabric() -> None:
    _, _, attachment = trained(
        Stepping, lambda model, batch, index: model.training_step(batch, index)
    )
    assert "net.up.linear" in attachment.callbacks[1].snapshots[-1].names
    attachment.detach()


class Scored(Net):
    """A module whose loop calls a method that calls the parts of the module, not the module."""

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.gelu(self.norm(self.up(x)))), y)


def test_method_marked_as_forward() -> None:
    def mark(model: Any) -> None:
        model.mark_forward_method("score")
        model.mark_forward_method(model.score)
        with pytest.raises(AttributeError, match="'nothing' as a forward method"):
            model.mark_forward_method("nothing")

    module, model, attachment = trained(
        Scored, lambda model, batch, index: model.score(*batch), mark
    )
    assert {"up.linear", "down.linear"} <= set(attachment.callbacks[1].snapshots[-1].names)
    attachment.detach()
    assert "score" not in vars(module)
    assert "mark_forward_method" not in vars(model)


def test_setup_module_without_callbacks_is_an_error() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=METHODS["both"]())
    fabric.launch()
    model, optimizer = new()
    module, optimizer = fabric.setup_module(model), fabric.setup_optimizers(optimizer)
    fabric.backward(module(batches(1)[0][0]).sum())
    with pytest.raises(RuntimeError, match=r"model = fabric\.setup\(model\)"):
        optimizer.step()


def test_bad_callbacks_are_an_error() -> None:
    for callbacks, kind, text in (
        (
            [ScaleMonitor],
            MisconfigurationException,
            r"callbacks=ScaleMonitor: .*Write ScaleMonitor",
        ),
        ([ScaleMonitor(), ScaleMonitor()], ValueError, "ScaleMonitor is given 2 times"),
    ):
        fabric = Fabric(accelerator="cpu", devices=1, callbacks=callbacks)
        with pytest.raises(kind, match=text):
            fabric.setup(*new(1))
