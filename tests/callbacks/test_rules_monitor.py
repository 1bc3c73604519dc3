"""The scale monitor of a model that is scaled by rules."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale import ScaleMonitor
from tests.callbacks.rule_runs import Classifier, Gradients, fit, plan_of, rms, unit_scale
from tests.callbacks.runs import MemoryLogger, monitor_of


class Batches(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.seen.append(batch)


def by_hand(weights: dict[str, Tensor], plan: Any, batch: Any) -> dict[str, Tensor]:
    """The scaled classifier in plain FP64, with the factors of its plan; tensors by name."""
    weights = {name: one.double().requires_grad_() for name, one in weights.items()}
    made: dict[str, Tensor] = dict(weights)

    def decided(name: str) -> Any:
        return plan[f"training_step:{name}"]

    def factor(name: str, place: int) -> float:
        return math.prod(one.factor for one in decided(name).arguments if one.path == (place,))

    def keep(name: str, value: Tensor) -> Tensor:
        value.retain_grad()
        made[name] = value
        return value

    def linear(path: str, x: Tensor) -> Tensor:
        name = f"{path}.linear"
        w, b = weights[f"{path}.weight"], weights[f"{path}.bias"]
        return keep(name, F.linear(x * factor(name, 0), w, b) * decided(name).output)

    def norm(path: str, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        w, b = weights[f"{path}.weight"], weights[f"{path}.bias"]
        return keep(f"{path}.layer_norm", F.layer_norm(x, shape, w, b))

    h = linear("first", batch[0].double())
    for index, add in enumerate(("add", "add_1")):
        path = f"blocks.{index}"
        x = keep(f"{path}.2.gelu", F.gelu(linear(f"{path}.1", norm(f"{path}.0", h))))
        h = keep(add, h * factor(add, 0) + linear(f"{path}.4", x) * factor(add, 1))
    F.cross_entropy(linear("readout", norm("norm", h)), batch[1]).backward()
    return made


@pytest.mark.parametrize("accumulated", [1, 2])
def test_monitor_shows_values_of_scaled_model(accumulated: int) -> None:
    pl.seed_everything(3, verbose=False)
    module, gradients, batches = Classifier(), Gradients(), Batches()
    callbacks = [unit_scale("u-mup"), ScaleMonitor(every_n_steps=1), gradients, batches]
    options = {"accumulate_grad_batches": accumulated, "max_steps": 1}
    fit(module, *callbacks, logger=MemoryLogger(), **options)
    (snapshot,) = monitor_of(callbacks).snapshots
    runs = [by_hand(gradients.weights[0], plan_of(module), one) for one in batches.seen]
    assert len(runs) == accumulated
    forward = 2.0 ** snapshot.log2_rms("forward")
    backward = 2.0 ** snapshot.log2_rms("backward")
    shown = [name for name in snapshot.names if name in runs[0]]
    assert len(shown) == 18 + 13, "every parameter, and what maps, norms, activations and adds make"
    for place, name in enumerate(snapshot.names):
        if name not in shown:
            continue
        of_all = torch.stack([run[name].detach() for run in runs])
        grads = torch.stack([run[name].grad for run in runs]) / accumulated
        assert forward[place] == pytest.approx(rms(of_all), rel=1e-3), name
        assert backward[place] == pytest.approx(rms(grads), rel=1e-3), name


@pytest.mark.slow
def test_matmul_operands_are_shown_as_stored() -> None:
    pl.seed_everything(3, verbose=False)
    module, callbacks = Classifier(), [unit_scale("u-mup"), ScaleMonitor(every_n_steps=1)]
    fit(module, *callbacks, logger=MemoryLogger(), max_steps=2)
    # The first step measures the units.
    _, snapshot = monitor_of(callbacks).snapshots
    place = {name: index for index, name in enumerate(snapshot.names)}
    forward = 2.0 ** snapshot.log2_rms("forward", stored=True)
    backward = 2.0 ** snapshot.log2_rms("backward", stored=True)
    true = 2.0 ** snapshot.log2_rms("backward")
    matmuls = [name for name in place if name.endswith(".linear")]
    assert len(matmuls) == 6
    for name in matmuls:
        # A rule's factor need not be a power of two, and the optimizer has stepped since.
        assert 0.3 <= backward[place[name]] <= 3, name
        assert 0.49 <= forward[place[f"{name.removesuffix('.linear')}.weight"]] <= 2.01, name
    # As it is, none of them is.
    assert all(true[place[name]] < 0.1 for name in matmuls)
