"""Units of what is zero, empty or not finite when it is first met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.dispatch.tensors import Extent
from tests.callbacks.late import (
    LATE,
    Annealed,
    Late,
    batches,
    drop_what_is_not_finite,
    exponents,
    optimizer_of,
)
from tests.helpers import assert_same_bits

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


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("how", INTERRUPTED)
@pytest.mark.parametrize("recalibrate", ["auto", None])
def test_units_are_those_of_the_first_value(name: str, how: str, recalibrate: Any) -> None:
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
        known = step - (evaluates and tensor.endswith("weight"))
        assert [tensor in gauge for gauge in gauges] == [index >= known for index in range(NUM_STEPS)]
        if how == "plain":
            (exponent, *_) = [one for one in first[tensor] if one is not None]
            assert sum(gauges[step][tensor]) == exponent
    # No other tensor had to wait.
    assert gauges[0].keys() | make.first.keys() == gauges[-1].keys()
    text = callback.explain()
    assert "no unit yet" not in text and "none yet" not in text


@pytest.mark.parametrize("name", LATE)
@pytest.mark.parametrize("how", INTERRUPTED)
@pytest.mark.parametrize("format", ["simulated", "fp8"])
def test_formats_lose_no_first_gradient(name: str, how: str, format: str) -> None:
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
        # What a tensor loses is measured in its unit before it is cast.
        ({"precision": "fp8"}, 2),
    ],
    ids=["simulated", "fp8"],
)
def test_a_gradient_without_a_unit_is_not_rounded(options: Any, num_exact: int) -> None:
    """What its layer reads, and what arrives there, does not depend on other layers."""

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


def test_a_tensor_that_stays_zero_costs_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
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
        # Two backward products read the gradient.
        assert counts[0] > 1 and counts[1:] == [1] * (NUM_STEPS - 1)
        text = str(callback.explain())
        assert "1 operand has no unit yet (zero or not finite so far): the gradient at aux" in text
