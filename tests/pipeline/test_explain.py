"""What a pipeline is predicted to cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.pipeline import explain_pipeline
from lightning_unitscale.pipeline.explain_step import explain_step
from lightning_unitscale.pipeline.simulate import simulate_1f1b


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [7, 8, 32])
def test_the_bubble_of_equal_stages(num_stages: int, num_microbatches: int) -> None:
    timeline = simulate_1f1b([1.0] * num_stages, [2.0] * num_stages, num_microbatches)
    expected = (num_stages - 1) / (num_microbatches + num_stages - 1)
    assert timeline.bubble == pytest.approx(expected)
    assert timeline.seconds == pytest.approx(3 * (num_microbatches + num_stages - 1))
    assert len(timeline.work) == 2 * num_stages * num_microbatches


def test_a_slow_stage_sets_the_pace() -> None:
    timeline = simulate_1f1b([1.0, 3.0], [2.0, 6.0], 4)
    # The second stage is busy from the first microbatch's arrival to its last backward pass.
    assert timeline.seconds == 1 + 4 * 9 + 2
    assert timeline.picture().splitlines()[1].startswith("stage 1 |.")


def test_a_plan() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))
    plan = explain_pipeline(module, torch.ones(128, 256), 2)
    assert [one.parameter_bytes for one in plan.stages] == [526336, 526336]
    assert [one.sent_bytes for one in plan.stages] == [128 * 256 * 4, 0]
    assert plan.stages[0].peak_saved_bytes == 2 * plan.stages[0].saved_bytes > 0
    assert 1 <= plan.imbalance < 1.15
    text = str(plan)
    assert "bubble" in text
    assert "stage 1 |" in text
    with pytest.raises(ValueError, match="num_microbatches=1"):
        explain_pipeline(module, torch.ones(128, 256), 2, num_microbatches=1)


class Stepping(nn.Module):
    """A module with a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        self.logged: list[Tensor] = []

    def log(self, name: str, value: Tensor) -> None:
        self.logged.append(value)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return {"loss": loss}

    def printing_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        return loss * 2 if loss.item() > 1 else loss


def test_a_plan_of_a_step() -> None:
    module = Stepping()
    batch = [torch.ones(64, 64), torch.ones(64, 64)]
    plan = explain_step(module, batch, 2, batch_idx=0)
    # No weight is in both stages.
    assert sum(one.parameter_bytes for one in plan.stages) == 4 * 16640
    assert min(one.parameter_bytes for one in plan.stages) >= 16640
    # Microbatches of 16 samples.
    assert plan.stages[0].sent_bytes == 16 * 64 * 4
    assert plan.timeline.num_stages == 2
    assert plan.pipe.info().has_loss
    assert module.logged == []
    assert "training_step" not in module.__dict__
    with pytest.raises(RuntimeError, match="printing_step is not one graph"):
        explain_step(module, batch, 2, batch_idx=0, method="printing_step")
    with pytest.raises(ValueError, match="num_microbatches=5: a batch of 64"):
        explain_step(module, batch, 2, batch_idx=0, num_microbatches=5)
    assert "printing_step" not in module.__dict__
