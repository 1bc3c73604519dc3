"""Units of operands that are zero, empty or not finite at first."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_unitscale import UnitScaleCallback, attach, transforms
from lightning_unitscale.matmuls.measurement import Extent
from tests.callbacks.late import (
    LATE,
    Annealed,
    Late,
    batches,
    drop_what_is_not_finite,
    exponents,
    optimizer_of,
)
from tests.callbacks.runs import Run, run
from tests.helpers import assert_same_bits, sampled

NUM_STEPS = 8
FORMATS: dict[str, dict[str, Any]] = {
    "units": {},
    "simulated": {"simulate": "fp8"},
    "fp8": {"precision": "fp8"},
}
# Steps of two halves of a batch, with an evaluation after each.
INTERRUPTED = {"plain": (1, False), "accumulating": (2, False), "evaluating": (2, True)}


def train(
    module: Late,
    callbacks: Any = (),
    *,
    num_parts: int = 1,
    evaluates: bool = False,
    num_steps: int = NUM_STEPS,
    after_step: Callable[[int], None] = lambda _: None,
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, int]]:
    """Train; returns the losses, the weights and where each parameter had its first gradient."""
    optimizer, losses, first = optimizer_of(module), [], {}
    with attach(module, optimizer, callbacks):
        for step, batch in enumerate(batches(num_steps)):
            for part in batch.chunk(num_parts):
                loss = module(part, step) / num_parts
                loss.backward()
                losses.append(loss.detach())
            drop_what_is_not_finite(module)
            for name, param in module.named_parameters():
                if param.grad is not None and param.grad.any():
                    first.setdefault(name, step)
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                with torch.no_grad():
                    losses.append(module.eval()(batch, step))
                module.train()
            after_step(step)
    return losses, dict(module.state_dict()), first


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("how", INTERRUPTED)
@pytest.mark.parametrize("recalibrate", sampled(["auto", None], 2))
def test_units_come_from_first_nonzero_value(name: str, how: str, recalibrate: Any) -> None:
    make, (num_parts, evaluates) = LATE[name], INTERRUPTED[how]
    options = {"num_parts": num_parts, "evaluates": evaluates}
    expected = train(make(), **options)
    module, callback = make(), UnitScaleCallback(recalibrate=recalibrate)
    gauges: list[dict[str, Any]] = []
    found = train(
        module, [callback], after_step=lambda _: gauges.append(callback.gauge.state()), **options
    )
    assert_same_bits(found, expected)
    first = exponents(make(), train)
    for tensor, step in make.first.items():
        # An evaluation sees a weight that is no longer zero before the next step does.
        is_seen_early = evaluates and tensor.endswith("weight") and name != "LateExpert"
        known = step - is_seen_early
        assert [tensor in gauge for gauge in gauges] == [
            index >= known for index in range(NUM_STEPS)
        ]
        if how == "plain":
            (exponent, *_) = [one for one in first[tensor] if one is not None]
            assert sum(gauges[step][tensor]) == exponent
    # No other tensor had to wait.
    assert gauges[0].keys() | make.first.keys() == gauges[-1].keys()
    text = callback.explain()
    assert "no unit yet" not in text and "none yet" not in text


class Steep(Annealed):
    """A second loss that begins at step 9 and grows tenfold in each step."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.body(x))
        weight = 0.0 if step < 9 else min(1e-9 * 10.0 ** (step - 9), 0.1)
        return (h - x).square().mean() + weight * (self.aux(h) * x).mean()


@pytest.mark.parametrize("format", ["simulated", "fp8"])
def test_units_follow_a_tensor_that_grows_from_zero(format: str) -> None:
    plain, found, start = Steep(), Steep(), Steep()
    train(plain, num_steps=20)
    train(found, [UnitScaleCallback(**FORMATS[format])], num_steps=20)
    change, error = (plain.aux.weight - each.aux.weight for each in (start, found))
    assert error.norm() < 0.15 * change.norm()


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("how", INTERRUPTED)
@pytest.mark.parametrize("format", ["simulated", "fp8"])
def test_formats_keep_first_nonzero_gradient(name: str, how: str, format: str) -> None:
    make, (num_parts, evaluates) = LATE[name], INTERRUPTED[how]
    options: Any = {"num_parts": num_parts, "evaluates": evaluates, "num_steps": 24}
    plain, _, expected = train(make(), **options)
    callback = UnitScaleCallback(**FORMATS[format])
    losses, _, first = train(make(), [callback], **options)
    assert first == expected
    # Each of the formats rounds to 2**-4 at best.
    torch.testing.assert_close(losses[-1], plain[-1], rtol=0.05, atol=0.0)
    assert not torch.equal(losses[-1], plain[-1])
    assert "no unit yet" not in callback.explain()


@pytest.mark.parametrize(
    ("options", "num_exact"),
    [
        ({"simulate": "fp8"}, 1),
        # The loss of a tensor to a format is measured in its unit, before the cast.
        ({"precision": "fp8"}, 2),
    ],
    ids=["simulated", "fp8"],
)
def test_gradient_without_unit_is_not_rounded(options: Any, num_exact: int) -> None:
    """The operands of its layer, and the gradient there, do not depend on other layers."""

    class Alone(Annealed):
        def loss(self, x: Tensor, step: int) -> Tensor:
            return 1e-4 * max(step - 2, 0) * (self.aux(torch.tanh(x)) * x).mean()

    step, gradients = Alone.first["aux.linear"], []
    for callbacks in ([], [UnitScaleCallback(**options, recalibrate=None)]):
        module, of_steps = Alone(), []
        optimizer = optimizer_of(module)
        with attach(module, optimizer, callbacks):
            for index, batch in enumerate(batches(step + 4)):
                module(batch, index).backward()
                of_steps.append(module.aux.weight.grad)
                optimizer.step()
                optimizer.zero_grad()
        gradients.append(of_steps)
    plain, found = gradients
    assert_same_bits(found[: step + num_exact], plain[: step + num_exact])
    for one, other in zip(found[step + num_exact :], plain[step + num_exact :], strict=True):
        error = torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other)
        assert 0.0 < error < 0.1


def test_zero_tensor_is_measured_with_one_row_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, count = Extent.of, 0

    def counted(tensor: Tensor, log2_unit: int = 0) -> Extent:
        nonlocal count
        count += 1
        return measure(tensor, log2_unit)

    monkeypatch.setattr(Extent, "of", staticmethod(counted))
    counts = []

    def note(_: int) -> None:
        nonlocal count
        counts.append(count)
        count = 0

    class Dead(Annealed):
        def loss(self, x: Tensor, step: int) -> Tensor:
            return super().loss(x, 0)

    for options in FORMATS.values():
        counts.clear()
        callback = UnitScaleCallback(recalibrate=None, **options)
        train(Dead(), [callback], after_step=note)
        # Two backward matmuls read the gradient.
        assert counts[0] > 1 and counts[1:] == [1] * (NUM_STEPS - 1)
        text = "1 operand has no unit yet (zero or not finite so far): the gradient at aux.linear"
        assert text in callback.coverage.line()
        explanation = callback.explain()
        assert text in explanation
        (table,) = [part for part in explanation.parts if not isinstance(part, str)]
        assert [row[-1] for row in table.rows if row[0] == "aux"] == ["none yet"]


class Trained(pl.LightningModule):
    """A module in a Trainer, by automatic or by manual optimization with two optimizers."""

    def __init__(self, make: Callable[[], Late], *, is_manual: bool = False) -> None:
        super().__init__()
        self.net, self.automatic_optimization = make(), not is_manual
        self.first: dict[str, int] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch, batch_idx // self.trainer.accumulate_grad_batches)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch, 10))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, param in self.named_parameters():
            if param.grad is not None and param.grad.any():
                self.first.setdefault(name, self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return optimizer_of(self)
        half = torch.optim.AdamW(self.net.body.parameters(), lr=3e-3)
        others = [one for name, one in self.named_parameters() if not name.startswith("net.body")]
        return [half, torch.optim.SGD(others, lr=0.1)]


TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "automatic": ({}, {}),
    "accumulating": ({}, {"accumulate_grad_batches": 2}),
    "manual": ({"is_manual": True}, {}),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["ZeroHead", "Annealed", "LateExpert", "DeadLayer"])
@pytest.mark.parametrize("how", TRAINERS)
def test_late_units_in_trainer(name: str, how: str) -> None:
    options, settings = TRAINERS[how]

    def fit(callbacks: list[Any]) -> Run:
        data = batches(16 * settings.get("accumulate_grad_batches", 1))
        return run(
            lambda: Trained(LATE[name], **options),
            callbacks,
            data=lambda: DataLoader(data, batch_size=None),
            max_steps=-1,
            max_epochs=1,
            val_check_interval=4,
            limit_val_batches=2,
            entry_options={"val_dataloaders": DataLoader(batches(2), batch_size=None)},
            **settings,
        )

    plain = fit([])
    for format, formats in FORMATS.items():
        callback = UnitScaleCallback(**formats)
        found = fit([callback])
        assert found.module.first == plain.module.first
        if format == "units":
            assert_same_bits(found.compared(), plain.compared())
        else:
            losses = [one.trainer.callback_metrics["val_loss"] for one in (found, plain)]
            torch.testing.assert_close(*losses, rtol=0.05, atol=0.0)
        assert {f"net.{tensor}" for tensor in LATE[name].first} <= callback.gauge.keys()


@pytest.mark.parametrize("format", FORMATS)
def test_overflowing_first_gradients_with_grad_scaler(format: str) -> None:
    """The scale of a ``GradScaler`` begins too high, so that the first steps are dropped."""

    def fit(callbacks: list[Any]) -> Run:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        with warnings.catch_warnings():
            # A scheduler or a CPU in FP16.
            warnings.simplefilter("ignore")
            return run(
                lambda: Trained(LATE["ZeroHead"]),
                callbacks,
                data=lambda: DataLoader(batches(24), batch_size=None),
                max_steps=24,
                plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            )

    gauges: list[Any] = []

    class Gauges(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gauges.append(callback.gauge)

    plain = fit([])
    callback = UnitScaleCallback(**FORMATS[format])
    found = fit([callback, Gauges()])
    # Nothing finite has arrived there at first.
    is_known = ["net.head.linear" in gauge for gauge in gauges]
    assert not is_known[0] and is_known[-1]
    assert found.module.first == plain.module.first
    last = [run.outputs[-1]["loss"] for run in (found, plain)]
    torch.testing.assert_close(*last, rtol=0.05, atol=0.0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["Lora", "Annealed", "LateExpert"])
def test_resuming_after_any_step_is_bit_identical(name: str, format: str) -> None:
    """This includes the steps between the first nonzero value and its unit."""

    def part(state: dict[str, Any], start: int, stop: int) -> list[Tensor]:
        module = LATE[name]()
        optimizer = optimizer_of(module)
        callback = UnitScaleCallback(**FORMATS[format])
        losses = []
        with attach(module, optimizer, [callback]) as attachment:
            if state:
                module.load_state_dict(state["module"])
                optimizer.load_state_dict(state["optimizer"])
                attachment.load_state_dict(state["attachment"])
            for step, batch in list(enumerate(batches(NUM_STEPS)))[start:stop]:
                loss = module(batch, step)
                loss.backward()
                losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            state["module"] = copy.deepcopy(module.state_dict())
            state["optimizer"] = copy.deepcopy(optimizer.state_dict())
            state["attachment"] = copy.deepcopy(attachment.state_dict())
        return losses

    whole = part({}, 0, NUM_STEPS)
    for stop in range(1, NUM_STEPS):
        state: dict[str, Any] = {}
        assert_same_bits(part(state, 0, stop) + part(state, stop, NUM_STEPS), whole)


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("format", FORMATS)
def test_late_units_of_transforms(name: str, format: str) -> None:
    def losses(module: nn.Module) -> list[Tensor]:
        optimizer, found = optimizer_of(module), []
        for step, batch in enumerate(batches(16)):
            loss = module(batch, step)
            loss.backward()
            found.append(loss.detach())
            drop_what_is_not_finite(module)
            optimizer.step()
            optimizer.zero_grad()
        return found

    plain = losses(LATE[name]())
    module = transforms.lossless_unit_scale(LATE[name](), batches(1)[0], 0)
    late = LATE[name].first.keys() - ({"body.linear"} if name == "Unfrozen" else set())
    assert not late & module.gauge().keys()
    if late:
        assert "no unit yet" not in module.explain()
    if format == "simulated":
        module = transforms.simulate_fp8(module)
    elif format == "fp8":
        module = transforms.fp8_linears(module)
    found = losses(module)
    if format == "units":
        assert_same_bits(found, plain)
    else:
        torch.testing.assert_close(found[-1], plain[-1], rtol=0.05, atol=0.0)
        assert not torch.equal(found[-1], plain[-1])
    assert LATE[name].first.keys() <= module.gauge().keys()
