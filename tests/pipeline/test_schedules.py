"""The stages of each rank, and the requirements of the schedules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from lightning_unitscale.pipeline import SCHEDULES, PipelineRunner, SplitPoint, pipeline
from lightning_unitscale.pipeline.program import split_batch
from lightning_unitscale.pipeline.schedules import find_schedule


def test_stages_are_placed_on_ranks_by_schedule() -> None:
    assert SCHEDULES["1F1B"].stages_of(1, 2, 2) == (1,)
    assert SCHEDULES["LoopedBFS"].stages_of(1, 2, 6) == (1, 3, 5)
    assert [SCHEDULES["DualPipeV"].stages_of(r, 3, 6) for r in range(3)] == [(0, 5), (1, 4), (2, 3)]
    for one in SCHEDULES.values():
        num_stages = 3 if one.placement == "single" else 6
        for rank in range(3):
            stages = one.stages_of(rank, 3, num_stages)
            assert [one.rank_of(stage, 3) for stage in stages] == [rank] * len(stages)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "microbatches", "match"),
    [
        ("1F1B", 4, 2, 8, "num_stages=4: 1F1B runs one stage"),
        ("1F1B", 4, 4, 3, "num_microbatches=3"),
        ("DualPipeV", 4, 2, 3, "num_microbatches=3"),
        ("ZBVZeroBubble", 2, 2, 8, "Expected 4 stages"),
        ("LoopedBFS", 3, 2, 8, "num_stages=3"),
        ("Interleaved1F1B", 4, 2, 5, "Expected a multiple of 2"),
        ("GPipe", 2, 2, 0, "num_microbatches=0"),
    ],
)
def test_invalid_schedule_settings_are_an_error(
    name: str, stages: int, ranks: int, microbatches: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        find_schedule(name.lower()).check(stages, ranks, microbatches)


def test_unknown_schedule_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"schedule='1f2b': unknown. Expected one of GPipe"):
        find_schedule("1f2b")


def test_batch_is_split_along_first_dimension() -> None:
    module = nn.Bilinear(3, 3, 2)
    whole = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.module = whole, module

        def forward(self, x: torch.Tensor, mask: torch.Tensor, power: int) -> torch.Tensor:
            return self.module(self.whole(x), self.whole(x) * mask) ** power

    mask = torch.ones(3)
    pipe = pipeline(
        Two(), (torch.randn(2, 3), mask, 2), split_spec={"module": SplitPoint.BEGINNING}
    )
    x = torch.randn(6, 3)
    parts = split_batch(pipe.program, (x, mask, 2), {}, 3)
    assert torch.equal(torch.cat([one[0] for one in parts]), x)
    assert all(one[1] is mask and one[2] == 2 for one in parts)
    with pytest.raises(ValueError, match=r"x: a tensor float32\[5, 3\]. Expected 3 microbatches"):
        split_batch(pipe.program, (x[:5], mask, 2), {}, 3)
    with pytest.raises(RuntimeError, match="there is no process group"):
        PipelineRunner(pipe, num_microbatches=2)


class _Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x).tanh()).squeeze(-1) - y).square().mean()


def test_stages_run_in_torch_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages of one rank, driven by torch's own schedule."""
    module = _Scored()
    x, y = torch.randn(8, 3), torch.randn(8)
    pipe = pipeline(module, (x[:2], y[:2]), split_spec={"second": SplitPoint.BEGINNING})
    with pytest.raises(RuntimeError, match=r"Pipe.build_stage: there is no process group"):
        pipe.build_stage(0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stages = [pipe.build_stage(index) for index in range(2)]
        with pytest.raises(ValueError, match="stage_index=2"):
            pipe.build_stage(2)
        schedule = ScheduleInterleaved1F1B(
            stages, 4, loss_fn=lambda loss, _: loss / 4, scale_grads=False
        )
        losses: list[torch.Tensor] = []
        schedule.step(x=x, y=y, target=torch.zeros(4), losses=losses, return_outputs=False)
    finally:
        dist.destroy_process_group()
    found = {name: one.grad for name, one in pipe.named_parameters()}
    module.zero_grad(set_to_none=True)
    expected = [module(a, b) / 4 for a, b in zip(x.split(2), y.split(2), strict=True)]
    for one in expected:
        one.backward()
    assert [one.item() for one in losses] == [one.item() for one in expected]
    for name, one in module.named_parameters():
        gradient = found[name]
        assert gradient is not None and torch.equal(gradient, one.grad)
    with pytest.raises(ValueError, match="Expected the module's arguments by name"):
        stages[0].forward_maybe_with_nosync(x)
