"""Steps that fit into a memory size; each answer is profiled, traced or compared with FSDP2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_unitscale.memory.fitting import (
    Fit,
    Shards,
    SizedStep,
    _checked,
    byte_owners,
    divisors,
    owners_table,
)
from lightning_unitscale.memory.offload import HostLink
from lightning_unitscale.memory.traced_planner import traced_problem
from lightning_unitscale.profiler import fake_process_group, profile_graph

WIDTH, BATCH = 32, 96


class Blocks(nn.Module):
    """Blocks of equal size between an embedding and a head, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def _batch(size: int) -> Tensor:
    return torch.zeros(size, 8, device="meta")


def _step(device: str = "cpu") -> SizedStep:
    module = Blocks()
    return SizedStep(
        "32-true",
        BATCH,
        module,
        lambda size: profile_graph(
            module,
            _batch(size),
            device=device,  # type: ignore[arg-type]
            optimizer=torch.optim.AdamW,
        ),
        lambda size: traced_problem(module, _batch(size), device=device),
    )


@pytest.mark.slow_cases
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("remat", [False, True])
def test_largest_batch_fits_and_a_larger_one_does_not(remat: bool, device: str) -> None:
    step = _step(device)
    limit = 3 * step.planner(BATCH).default.peak_bytes
    fit = step.largest(limit, remat=remat)
    assert fit is not None and fit.is_checked
    assert fit.peak_bytes <= limit and (fit.budget is not None) == remat
    larger = round(1.01 * fit.microbatch)
    planner = step.planner(larger, exact=True)
    peak = (planner.floor if remat else planner.default).peak_bytes
    # An unplanned step holds tensors longer than its graph does, and in larger blocks on a GPU.
    assert peak + (0 if remat else step.held_bytes(larger, exact=True)) > limit
    if not remat:
        # Lightning holds the last step's gradients in the forward pass.
        profile = step.profile_at(fit.microbatch)
        assert profile.peak_bytes <= fit.peak_bytes + step.gradient_bytes


@pytest.mark.slow
def test_largest_batch_on_gpu_uses_reserved_bytes() -> None:
    step = _step("cuda")
    memory = step.profile.library_bytes + 40 * 2**20
    step.memory_bytes = memory

    def reserved(size: int) -> int:
        allocator = step.profile_at(size).allocator
        assert allocator is not None
        return allocator.reserved_bytes + step.gradient_bytes

    fit = step.largest(memory - 30 * 2**20)
    assert fit is not None and fit.budget is None
    assert reserved(fit.microbatch) <= memory < reserved(fit.microbatch + 1)


@pytest.mark.slow
def test_fits_end_at_first_microbatch_without_recomputation() -> None:
    step = _step()
    planner = step.planner(384)
    limit = (planner.floor.peak_bytes + planner.default.peak_bytes) // 2
    fits = list(step.fits(limit, 384, 1))
    assert all(fit.peak_bytes <= limit for fit in fits)
    assert [fit.microbatch for fit in fits] == sorted(
        (fit.microbatch for fit in fits), reverse=True
    )
    assert all(fit.microbatch * fit.num_microbatches == 384 for fit in fits)
    assert [fit.budget is None for fit in fits] == [False] * (len(fits) - 1) + [True]
    assert fits[0].extra_flops > 0 == fits[-1].extra_flops
    assert len({fit.flops for fit in fits}) == 1
    assert min(fits, key=lambda fit: fit.cost) is fits[-1]


@pytest.mark.slow
def test_fits_include_host_offload() -> None:
    step = _step("cuda:h100")
    step.link = HostLink(1e12)
    planner = step.planner(384)
    limit = (planner.floor.peak_bytes + planner.default.peak_bytes) // 2
    fits = list(step.fits(limit, 384, 1))
    moved = [fit for fit in fits if fit.offload == "host"]
    assert moved and all(fit.host_bytes > 0 and fit.peak_bytes <= limit for fit in moved)
    plain = next(fit for fit in fits if fit.offload is None and fit.microbatch == 384)
    whole = next(fit for fit in moved if fit.microbatch == 384)
    assert whole.extra_seconds < plain.extra_seconds and whole.extra_flops < plain.extra_flops
    assert all(fit.offload is None for fit in step.fits(limit, 384, 2))
    low = planner.floor.peak_bytes - 1
    assert step.fit(low, 384, 1, 1) is None
    found = step.fit(low, 384, 1, 1, exact=True, offload=True)
    assert found is not None and found.is_checked and found.peak_bytes <= low


@pytest.mark.slow
def test_no_fit_in_too_little_memory() -> None:
    step = _step()
    assert step.largest(1000) is None and step.largest(1000, remat=True) is None
    assert not list(step.fits(1000, 8, 1))


@pytest.mark.slow_cases
@pytest.mark.parametrize("ranks", [2, 4])
def test_predicted_rank_peak_matches_fsdp(ranks: int) -> None:
    step = _step()
    with fake_process_group(ranks):
        with torch.device("meta"):
            module = Blocks()
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
        profile = profile_graph(module, _batch(BATCH), optimizer=torch.optim.AdamW)
    fit = step.fit(10**9, BATCH, 1, ranks, exact=True)
    assert fit is not None
    # The gradients of the step before are not part of the profile.
    predicted = fit.peak_bytes - step.gradient_bytes // ranks
    assert predicted == pytest.approx(profile.peak_bytes, rel=0.1)


def test_gathered_bytes_of_shards() -> None:
    module = Blocks()
    block = 4 * (2 * WIDTH * 4 * WIDTH + 5 * WIDTH)
    rest = 4 * (8 * WIDTH + WIDTH + WIDTH * 4 + 4)
    assert Shards.of(module) == Shards(block, rest)
    assert Shards.of(nn.Linear(2, 2)) == Shards(0, 24)
    assert Shards(5, 7).gathered_bytes == 22


def test_owners_are_modules_of_equal_blocks() -> None:
    profile = profile_graph(Blocks(), _batch(1024), optimizer=torch.optim.AdamW)
    owners = dict(byte_owners(profile))
    assert len(owners) == 5
    assert next(iter(owners)) == "activations of blocks.*.1"
    assert owners["optimizer state"] == profile.optimizer_bytes
    assert owners["activations of blocks.*.1"] == 3 * 4 * 1024 * 4 * WIDTH
    assert "blocks.*.1" in owners_table(profile)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1] and divisors(49) == [1, 7, 49]


def test_fits_are_ordered_by_ranks_time_and_microbatches() -> None:
    def fit(**options: float) -> Fit:
        values = {"num_shards": 1, "num_microbatches": 1, "extra_flops": 0.0, **options}
        return Fit("32-true", microbatch=1, budget=None, peak_bytes=1, flops=1.0, **values)  # type: ignore[arg-type]

    cheapest = [fit(), fit(num_microbatches=2), fit(extra_seconds=1.0), fit(num_shards=2)]
    assert sorted(reversed(cheapest), key=lambda each: each.cost) == cheapest


@pytest.mark.parametrize("largest", [0, 1, 3, 900, 1000, 1400])
def test_batch_near_an_estimate_is_checked(largest: int) -> None:
    assert _checked(lambda size: size <= largest, 1000, 1000 // 16, 1) == largest
    assert _checked(lambda size: True, 2**31, 2**27, 1) == 2**31  # nothing grows with it
