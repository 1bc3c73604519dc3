"""The harness detects the differences that it should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.conformance import harness
from tests.conformance.cases import Zoo, linear, rows
from tests.conformance.harness import Record, differences, plain, train

zoo = Zoo("harness")


@zoo.step(rows(4, 8, grad=True), a=linear(), seen=lambda: torch.zeros(8))
def layer(m: Any, x: Tensor) -> Tensor:
    m.seen += x.detach().mean(0)
    m.count = getattr(m, "count", 0) + 1
    return m.a(x)


(CASE,) = zoo.cases


class Meddling(pl.Callback):
    """Changes one thing before the second step."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        self.change = change

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                self.change(pl_module.module, batch)


def _next(tensor: Tensor) -> None:
    tensor[0].copy_(torch.nextafter(tensor[0], torch.tensor(torch.inf)))


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "weight": (lambda module, batch: _next(module.a.weight), "call 1: parameter a.weight"),
    "buffer": (lambda module, batch: _next(module.seen), "call 1: buffer seen"),
    "input": (lambda module, batch: _next(batch[0]), "call 1: input 0"),
    "attribute": (lambda module, batch: setattr(module, "count", 7), "call 1: attribute count"),
    "gradient": (
        lambda module, batch: module.a.weight.register_hook(_next),
        "call 1: gradient of a.weight",
    ),
    "input's gradient": (
        lambda module, batch: batch[0].register_hook(_next),
        "call 1: gradient of input 0",
    ),
    "random state": (lambda module, batch: torch.rand(1), "random state of torch"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_harness_detects_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, expected = CHANGES[name]
    monkeypatch.setitem(harness.CALLBACKS, "meddling", lambda: [Meddling(change)])
    found = differences(train(CASE, "meddling"), plain(CASE))
    assert any(line.startswith(expected) for line in found), found
    assert not any(line.startswith("call 0") for line in found)


def test_plain_loop_matches_trainer() -> None:
    assert not differences(train(CASE, "plain loop"), plain(CASE))


def test_nan_matches_nan_and_zeros_have_signs() -> None:
    def record(tensor: Tensor) -> Record:
        found = Record()
        found.values["x"] = harness._kept(tensor)
        return found

    nan = torch.tensor([torch.nan, 1.0])
    assert not differences(record(nan), record(torch.tensor([-torch.nan, 1.0])))
    zeros = differences(record(torch.tensor([0.0])), record(torch.tensor([-0.0])))
    assert zeros == ["x: 1 of 1 elements differ in their bits, by up to 0 where the largest is 0"]
    assert differences(Record(), record(nan)) == ["x: is missing"]


@pytest.mark.parametrize("method", ["lossless_unit_scale", "track_scales"])
def test_transformed_modules_match_plain_loop(method: str) -> None:
    assert not differences(train(CASE, method), plain(CASE, "plain loop"))
