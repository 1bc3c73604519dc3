"""Manual optimization: the step itself does the backward passes and the updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from tests.callbacks.modules import Regression
from tests.callbacks.runs import assert_same_run, both, loader, monitor_of, unit_scale_of


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        self.log("loss", loss)


class Accumulating(Manual):
    """Several losses a step, a step of the optimizer every second batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for part in range(2):
            loss = self.loss((batch[0][part::2], batch[1][part::2])) / 4
            self.manual_backward(loss)
            self.log(f"loss_{part}", loss, prog_bar=True)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss.detach()}


class Adversarial(Regression):
    """Two optimizers in turn, with toggled parameters, on generated data."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        maker = [*self.first.parameters(), *self.norm.parameters(), *self.second.parameters()]
        return [
            torch.optim.Adam(maker, lr=1e-2),
            torch.optim.SGD(self.judge.parameters(), lr=1e-1, momentum=0.5),
        ]

    def judged(self, y: Tensor, answer: float) -> Tensor:
        score = self.judge(y)
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, answer))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        maker, judge = self.optimizers()
        x, y = batch

        self.toggle_optimizer(maker)
        made = self.forward(x + torch.randn_like(x))
        loss = self.judged(made, 1.0)
        maker.zero_grad()
        self.manual_backward(loss)
        maker.step()
        self.untoggle_optimizer(maker)

        self.toggle_optimizer(judge)
        other = (self.judged(y, 1.0) + self.judged(made.detach(), 0.0)) / 2
        judge.zero_grad()
        self.manual_backward(other)
        judge.step()
        self.untoggle_optimizer(judge)
        self.log_dict({"maker": loss, "judge": other}, prog_bar=True, on_epoch=True)


class Scheduled(Manual):
    """A schedule stepped by hand, and a toggled optimizer as a context."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=True):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.lr_schedulers().step()
        return loss


class Closing(Manual):
    """The model runs in a closure that the optimizer calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Any:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.log("loss", loss)
            return loss

        with optimizer.toggle_model(sync_grad=True):
            optimizer.step(closure=closure)


class OnTorch(Manual):
    """The optimizer without Lightning's wrapping, and ``backward`` called on the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for one in self.parameters():
                one.mul_(0.99)
        return {"loss": loss.detach(), "rate": optimizer.param_groups[0]["lr"]}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


KINDS = [Manual, Accumulating, Adversarial, Scheduled, Closing, OnTorch]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("kind", "captured"),
    [
        *((one, {}) for one in KINDS),
        (Manual, {"remat": "min_cut"}),
        (Adversarial, {"remat": "min_cut"}),
    ],
)
def test_manual_optimization_is_bit_identical(
    kind: type[Regression], captured: dict[str, Any]
) -> None:
    _, callbacks = assert_same_run(
        kind,
        lambda: [UnitScaleCallback(**captured), both()[1]],
        data=lambda: loader(32),
        max_epochs=1,
        max_steps=-1,
    )
    gauge = unit_scale_of(callbacks).gauge
    assert gauge.pair("first.linear:input").log2_sigma or kind is Adversarial
    assert any(pair.log2_gamma for pair in gauge.values())
    # Seen in the backward pass, too, although the step itself has run it.
    snapshot = monitor_of(callbacks).snapshots[0]
    assert "first.linear" in snapshot.names
    measured = snapshot.log2_rms("backward")[snapshot.names.index("first.linear")]
    assert measured == measured


@pytest.mark.parametrize("how", [lambda: both(), lambda: both()[::-1]])
def test_manual_optimization_with_mixed_precision(how: Any) -> None:
    assert_same_run(Manual, how, precision="bf16-mixed")
