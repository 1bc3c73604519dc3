"""Steps that users write: return values, logging, stored values, changed batches."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import namedtuple
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import RematCallback, UnitScaleCallback
from lightning_unitscale.capture import module_state
from lightning_unitscale.capture.module_steps import steps_of
from tests.callbacks.modules import Evaluated, Regression, adamw, regression_with
from tests.callbacks.runs import (
    ARRANGEMENTS,
    Capturing,
    assert_same_run,
    both,
    loader,
    matmuls_run,
    monitor_of,
    pair,
    run,
    unit_scale_of,
)
from tests.helpers import assert_same_bits

# The results that a step may return.


def _dict(self: Any, batch: Any, batch_idx: int) -> Any:
    prediction = self.forward(batch[0])
    return {"loss": F.mse_loss(prediction, batch[1]), "prediction": prediction, "index": batch_idx}


def _tensor(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss(batch)


def _tensor_of_one_element(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss(batch).reshape(1)


def _none(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss(batch) if batch_idx % 2 else None


def _none_by_value(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    return None if loss.item() > 8 else loss


def _no_index(self: Any, batch: Any) -> Any:
    return self.loss(batch)


def _keywords(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    return self.loss(batch)


def _extra(self: Any, batch: Any, batch_idx: int, extra: Any = None) -> Any:
    return self.loss(batch)


@pytest.mark.parametrize(
    "step",
    [_dict, _tensor, _tensor_of_one_element, _none, _none_by_value, _no_index, _keywords, _extra],
)
@pytest.mark.filterwarnings("ignore:.*training_step. returned .None.")
def test_return_values_and_arguments_of_steps(step: Any) -> None:
    _, callbacks = assert_same_run(regression_with(step), max_steps=4)
    gauge = unit_scale_of(callbacks).gauge
    assert gauge.pair("first.linear:input").log2_sigma < -4
    assert {"first.linear", "second.linear"} <= set(gauge)
    assert "first.linear" in monitor_of(callbacks).snapshots[0].names


def _decorated(step: Any) -> Any:
    """Wrap a step in a decorator that passes everything on."""

    @functools.wraps(step)
    def run_step(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return run_step


@pytest.mark.parametrize(
    "make_callbacks", [both, *(ARRANGEMENTS[n] for n in ("unit scale", "monitor"))]
)
def test_decorated_step_without_batch_idx(make_callbacks: Any) -> None:
    assert_same_run(regression_with(_decorated(_no_index)), make_callbacks, max_steps=3)


# Batches.

Named = namedtuple("Named", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: Tensor
    y: Tensor
    note: str = "text"


def _as_dict(samples: list[Any]) -> Any:
    x, y = (torch.stack(one) for one in zip(*samples, strict=True))
    return {"inputs": {"x": x, "mask": [x > 0, None]}, "y": (y,), "names": ["a", "b"]}


def _from_dict(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss((batch["inputs"]["x"] * batch["inputs"]["mask"][0], batch["y"][0]))


def _popped(self: Any, batch: Any, batch_idx: int) -> Any:
    y = batch.pop("y")[0]
    inputs = batch.pop("inputs")
    inputs["x"].mul_(2)
    batch["seen"] = True
    return self.loss((inputs.pop("x"), y))


def _as_named(samples: list[Any]) -> Any:
    return Named(*(torch.stack(one) for one in zip(*samples, strict=True)))


def _as_dataclass(samples: list[Any]) -> Any:
    return Sample(*_as_named(samples))


def _from_attributes(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss((batch.x, batch.y))


@pytest.mark.parametrize(
    ("collate", "step"),
    [
        (_as_dict, _from_dict),
        (_as_dict, _popped),
        (_as_named, _from_attributes),
        (_as_dataclass, _from_attributes),
    ],
)
def test_batch_structures_are_bit_identical(collate: Any, step: Any) -> None:
    _, callbacks = assert_same_run(
        regression_with(step), data=lambda: loader(12, 4, collate_fn=collate)
    )
    assert "first.linear" in unit_scale_of(callbacks).gauge


# Logging.


class Logging(Evaluated):
    """Everything that ``self.log`` takes."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.error = torchmetrics.MeanSquaredError()
        self.val_errors = torchmetrics.MetricCollection(
            [torchmetrics.MeanAbsoluteError(), torchmetrics.MeanSquaredError()], prefix="val_"
        )

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if self.trainer.training:
            self.log("mean", result.mean())
        return result

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.forward(batch[0])
        loss = F.mse_loss(prediction, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(batch[0]))
        self.log_dict({"a": loss.detach() * 2, "index": float(batch_idx)}, on_epoch=True)
        self.error(prediction, batch[1])
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("highest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.forward(batch[0])
        self.val_errors.update(prediction, batch[1])
        self.log_dict(self.val_errors)
        self.log("val_loss", F.mse_loss(prediction, batch[1]), sync_dist=True)


@pytest.mark.slow_cases
@pytest.mark.parametrize("captured", [False, True])
def test_logged_values_are_identical(captured: bool) -> None:
    found, callbacks = assert_same_run(
        Logging,
        lambda: [UnitScaleCallback(), both()[1], *[Capturing()] * captured],
        entry_options={"val_dataloaders": loader(6)},
        num_sanity_val_steps=1,
        max_epochs=2,
        max_steps=-1,
        data=lambda: loader(10),
    )
    expected = {"loss_step", "loss_epoch", "a_epoch", "error_epoch", "highest", "val_loss", "mean"}
    assert expected | {"val_MeanAbsoluteError", "val_MeanSquaredError"} <= set(found.metrics)
    assert "first.linear" in unit_scale_of(callbacks).gauge


def _log_and_go_on(self: Any, batch: Any, batch_idx: int) -> Any:
    """Write into logged values, and return the loss in a logged dictionary."""
    loss = self.loss(batch)
    average = batch[0].mean(0)
    self.log("average", average[0])
    self.log("mean", value=average[1], on_step=True, on_epoch=True)
    average.mul_(0.5)
    values = {"double": loss.detach() * 2}
    self.log_dict(values)
    values["double"].add_(1)
    values["loss"] = loss
    return values


@pytest.mark.parametrize("captured", [False, True])
def test_step_that_uses_logged_values(captured: bool) -> None:
    found, _ = assert_same_run(
        regression_with(_log_and_go_on),
        lambda: [UnitScaleCallback(), both()[1], *[Capturing()] * captured],
    )
    assert {"average", "mean_step", "mean_epoch", "double"} <= set(found.metrics)
    assert "loss" not in found.metrics


# The attributes that a step leaves on the module.


class Keeping(Regression):
    """Keeps things in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.by_name: dict[str, list[Any]] = {"losses": []}
        self.count = 0
        self.seen = 0.0
        for name in ("average", "squares", "ratios"):
            self.register_buffer(name, torch.zeros(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        self.by_name["losses"].append(batch_idx)
        self.count += 1
        mean = batch[0].mean(0)
        self.average.mul_(0.9).add_(mean, alpha=0.1)
        self.squares.mul_(0.9).addcmul_(mean, mean, value=0.1)
        self.ratios.addcdiv_(mean, self.squares + 1, value=0.1)
        self.last = batch[0]
        return loss * (1 + 0.1 * self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("kept", torch.stack(self.outputs).mean())
        self.log("count", float(self.count))
        assert len(self.by_name["losses"]) == self.trainer.num_training_batches
        self.outputs.clear()
        self.by_name["losses"].clear()


@pytest.mark.slow_cases
@pytest.mark.parametrize("captured", [False, True])
def test_state_kept_on_module_matches_plain_run(captured: bool) -> None:
    found, _ = assert_same_run(
        Keeping,
        lambda: [UnitScaleCallback(), both()[1], *[Capturing()] * captured],
        max_epochs=3,
        max_steps=-1,
        data=lambda: loader(10),
    )
    assert found.module.count == 9


# A value that changes with each step must not have each step captured.


class NumGraphs(pl.Callback):
    """How many graphs there were after every step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        steps = steps_of(pl_module)
        assert steps is not None
        self.found.append(len(steps.steps["training_step"].graphs))


def _append(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    self.outputs.append(loss.detach())
    self.outputs.append(batch_idx)
    return loss


def _count(self: Any, batch: Any, batch_idx: int) -> Any:
    self.count += 1
    return self.loss(batch) * (1 + self.count / 7)


def _by_global_step(self: Any, batch: Any, batch_idx: int) -> Any:
    self.log("rate", 0.1 * self.global_step)
    return self.loss(batch) * (1 if self.global_step < 3 else 1 / (1 + 0.3 * self.global_step))


def _by_index(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.loss(batch) * (1 + 0.1 * batch_idx)


class Changing(Regression):
    def __init__(self) -> None:
        # Inductor draws other random numbers.
        super().__init__(dropout=0.0)
        self.outputs: list[Any] = []
        self.count = 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("step", "at_most"), [(_append, 2), (_count, 2), (_by_global_step, 3), (_by_index, 2)]
)
def test_changing_state_limits_recompilations(
    step: Any, at_most: int, executor: str, torch_kernels: None
) -> None:
    kind = type("Changed", (Changing,), {"training_step": step})

    def callbacks() -> list[pl.Callback]:
        return [UnitScaleCallback(compile=executor == "inductor"), NumGraphs(), Capturing()]

    options: dict[str, Any] = {"data": lambda: loader(36), "max_steps": 9}
    if executor == "eager":
        found, made = assert_same_run(kind, callbacks, **options)
    else:
        made = callbacks()
        found = run(kind, made, **options)
        outputs = run(kind, **options).outputs
        torch.testing.assert_close(found.outputs, outputs, rtol=1e-3, atol=1e-6)
    (counted,) = (one for one in made if isinstance(one, NumGraphs))
    assert len(counted.found) == 9 and counted.found[-1] <= at_most
    if step is _append:
        assert found.module.outputs[1::2] == list(range(9))


@pytest.mark.parametrize("step", [_append, _count, _by_global_step, _by_index])
def test_changing_state_without_capture_is_bit_identical(step: Any) -> None:
    kind = type("Changed", (Changing,), {"training_step": step})
    found, made = assert_same_run(kind, both, data=lambda: loader(36), max_steps=9)
    assert steps_of(found.module) is None
    assert matmuls_run(made) == 6
    if step is _append:
        assert found.module.outputs[1::2] == list(range(9))


def _append_by_key(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    self.by_key["losses"].append(loss.detach())
    return loss


@pytest.mark.slow
def test_repeatedly_recaptured_step_runs_uncaptured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module_state, "MANY_CAPTURES", 3)
    kind = type("ByKey", (Changing,), {"training_step": _append_by_key, "by_key": {"losses": []}})
    options: dict[str, Any] = {"data": lambda: loader(20), "max_steps": 5}
    expected = run(kind, **options)
    with pytest.warns(UserWarning, match=r"captured again in 3 of its first \d calls, since `len"):
        found = run(kind, [RematCallback("min_cut")], **options)
    assert_same_bits(found.weights, expected.weights)
    # There is nothing to say of it where nothing is captured.
    found = run(kind, [UnitScaleCallback()], **options)
    assert_same_bits(found.weights, expected.weights)


def _random(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    x = x + 0.1 * torch.randn_like(x)
    if random.random() < 0.5:
        x = x * float(np.random.rand())
    permutation = torch.randperm(len(x))
    return self.loss((x[permutation], y[permutation]))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_random_state_matches_plain_run() -> None:
    # The states of torch's, Python's and NumPy's generators are part of the comparison.
    assert_same_run(regression_with(_random))


def _by_epoch(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss(batch)
    if self.current_epoch % 2:
        loss = loss + 0.01 * self.second.weight.square().sum()
    return loss * (1 + self.global_step / 10)


def test_step_that_depends_on_epoch() -> None:
    _, callbacks = assert_same_run(
        regression_with(_by_epoch), max_epochs=4, max_steps=-1, data=lambda: loader(8)
    )
    assert len(monitor_of(callbacks).snapshots) == 5


def _hooked(self: Any, batch: Any, batch_idx: int) -> Any:
    hidden = self.first(batch[0])
    hidden.register_hook(lambda gradient: gradient * 2)
    return F.mse_loss(self.second(torch.tanh(hidden)), batch[1])


@pytest.mark.parametrize("captured", [False, True])
def test_user_hooks_are_bit_identical(captured: bool) -> None:
    assert_same_run(
        regression_with(_hooked),
        lambda: [UnitScaleCallback(), both()[1], *[Capturing()] * captured],
    )


class Checkpointed(Regression):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(adamw, norm=False)
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.second(hidden)


@pytest.mark.slow_cases
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant: bool, captured: bool) -> None:
    _, callbacks = assert_same_run(
        lambda: Checkpointed(reentrant),
        lambda: [UnitScaleCallback(), both()[1], *[Capturing()] * captured],
    )
    assert {"first.linear", "second.linear"} <= set(unit_scale_of(callbacks).gauge)


class Configured(Evaluated):
    """A module whose layers do not exist before ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.second

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)


def test_layers_made_in_configure_model() -> None:
    _, callbacks = assert_same_run(Configured, entry_options={"val_dataloaders": loader(4)})
    assert {"first.linear", "second.linear"} <= set(unit_scale_of(callbacks).gauge)


class Nested(Regression):
    """A LightningModule with another in it, some weights frozen, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Evaluated(norm=False)
        self.first.requires_grad_(False)
        self.register_buffer("weights", torch.tensor([1.0, 2.0]), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.child(batch[0]) + self.forward(batch[0])
        self.log("frozen", self.first.weight.sum())
        return ((prediction - batch[1]).square() * self.weights).mean()


def test_nested_lightning_module() -> None:
    assert_same_run(Nested)


class Finetuned(Regression):
    """Thaws its first layer in the second epoch, so that its graph changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.first.requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("captured", [False, True])
def test_weights_unfrozen_during_training(captured: bool) -> None:
    _, callbacks = assert_same_run(
        Finetuned,
        lambda: [UnitScaleCallback(), both()[1], *[Capturing()] * captured],
        max_epochs=3,
        max_steps=-1,
        data=lambda: loader(8, 4, pair),
        others=lambda: [ModelCheckpoint()],
        enable_checkpointing=True,
    )
    assert len(monitor_of(callbacks).snapshots) == 4
