"""Errors of the user's code are the same in captured steps; hooks on autograd nodes."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import run
from tests.helpers import assert_same_bits


class HooksNodes(Regression):
    """Which are others in a captured graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.first(batch[0])
        hidden.grad_fn.register_prehook(lambda gradients: (0.5 * gradients[0],))
        return self.second(hidden).square().mean()


def test_step_that_hooks_nodes_is_not_captured() -> None:
    with pytest.warns(UserWarning, match="registers a hook on a node of autograd's graph at "):
        planned = run(HooksNodes, [RematCallback("min_cut")])
    assert_same_bits(planned.compared(), run(HooksNodes).compared())
    with pytest.raises(RuntimeError, match="cannot be unit-scaled by rules: it registers a hook"):
        run(HooksNodes, [UnitScaleCallback("u-mup")])


class Calls:
    """A count that undoing a step does not reach."""

    number = 0


class FailsOnce(Regression):
    """Because of state outside the module, such as a file."""

    fails_at = 0
    error: type[Exception] = ValueError

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def fail(self) -> None:
        self.calls.number += 1
        if self.calls.number == self.fails_at + 1:
            raise self.error("once")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.fail()
        return loss


class FailsOnceLater(FailsOnce):
    fails_at = 2
    error = AssertionError


class FailsOnceToRead(FailsOnce):
    def fail(self) -> None:
        self.calls.number += 1
        _ = {2: 1, 3: 1}[self.calls.number]


class FailsOnceInBackward(FailsOnce):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def backward(self, loss: Tensor) -> None:
        self.fail()
        loss.backward()


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("kind", [FailsOnce, FailsOnceLater, FailsOnceToRead, FailsOnceInBackward])
def test_user_error_is_raised_once_at_same_step(kind: type[FailsOnce]) -> None:
    found = []
    for callbacks in ([], [RematCallback("min_cut")]):
        made: list[FailsOnce] = []

        def make(made: list[FailsOnce] = made) -> FailsOnce:
            made.append(kind())
            return made[0]

        with pytest.raises((ValueError, AssertionError, KeyError)) as caught:
            run(make, callbacks)
        found.append((repr(caught.value), made[0].calls.number, made[0].global_step))
    assert found[1] == found[0]


class LooksUp(Regression):
    """Its own lookup raises another error than ``AttributeError``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_orig_mod", "_compiler_ctx"):
                raise KeyError(name) from None
            raise


def test_handled_key_errors_do_not_escape() -> None:
    ours = run(LooksUp, [UnitScaleCallback()], max_steps=1)
    assert_same_bits(ours.weights, run(LooksUp, max_steps=1).weights)
