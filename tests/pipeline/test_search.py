"""The search for cuts with one stage per rank, against all choices that there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch

from lightning_unitscale.pipeline.search import Cut, choose_cuts, thinned
from lightning_unitscale.pipeline.simulate import simulate_1f1b

RATE = 100.0


def _graph(seed: int, num_cuts: int = 8) -> tuple[list[Cut], float]:
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.rand(num_cuts + 1, generator=generator).cumsum(0).tolist()
    sizes = torch.randint(1, 40, (num_cuts,), generator=generator).tolist()
    return [Cut(str(i), seconds[i], sizes[i]) for i in range(num_cuts)], seconds[-1]


def _stages(cuts: Sequence[Cut], total: float, chosen: Sequence[int]) -> list[float]:
    places = [Cut("", 0.0, 0), *(cuts[one] for one in chosen), Cut("", total, 0)]
    return [
        b.seconds_before - a.seconds_before + (a.boundary_bytes + b.boundary_bytes) / RATE
        for a, b in pairwise(places)
    ]


def _step(cuts: Sequence[Cut], total: float, chosen: Sequence[int], num: int) -> float:
    stages = _stages(cuts, total, chosen)
    return (num - 1) * max(stages) + sum(stages)


@pytest.mark.parametrize("num_microbatches", [1, 4, 64])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_step_is_as_short_as_it_can_be(num_stages: int, num_microbatches: int) -> None:
    for seed in range(8):
        cuts, total = _graph(seed)
        found = choose_cuts(cuts, total, num_stages, RATE, num_microbatches)
        best = min(
            _step(cuts, total, one, num_microbatches)
            for one in combinations(range(len(cuts)), num_stages - 1)
        )
        assert _step(cuts, total, found, num_microbatches) == pytest.approx(best)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_under_1f1b_a_step_takes_no_longer(num_stages: int) -> None:
    cuts, total = _graph(0)
    for chosen in combinations(range(len(cuts)), num_stages - 1):
        stages = _stages(cuts, total, chosen)
        forward, backward = [one / 3 for one in stages], [2 * one / 3 for one in stages]
        for num in (num_stages, 64):
            ratio = simulate_1f1b(forward, backward, num).seconds / _step(cuts, total, chosen, num)
            assert (0.98 if num == 64 else 0.75) < ratio < 1 + 1e-9


def test_with_many_microbatches_the_slowest_stage_counts_and_with_few_what_is_sent() -> None:
    # Cut in the middle both stages take 60 seconds, 20 of them to send; in front of it 41.
    cuts = [Cut("before", 35.0, 100), Cut("middle", 40.0, 2000)]
    many = choose_cuts(cuts, 80.0, 2, RATE, 1000)
    assert [cuts[one].before for one in many] == ["before"]
    cuts = [Cut("before", 35.0, 100), Cut("middle", 40.0, 500)]
    assert choose_cuts(cuts, 80.0, 2, RATE, 1000) == [1], "45 seconds against 46"
    assert choose_cuts(cuts, 80.0, 2, RATE, 2) == [0], "82 in all against 90"


def test_operations_that_cost_nothing() -> None:
    assert choose_cuts([Cut("a", 0.0, 0), Cut("b", 0.0, 0)], 0.0, 2, RATE, 4) == [0]


def test_only_allowed_stages() -> None:
    cuts, total = _graph(0)

    def allowed(stage: int) -> object:
        table = torch.zeros(10, 10, dtype=torch.bool)
        # The first of two stages ends behind the third cut, or nowhere.
        table[0, 3] = stage == 0
        table[3, 9] = stage == 1
        return table.numpy()

    assert choose_cuts(cuts, total, 2, RATE, 4, allowed) == [2]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_stages=3: none of the 8 possible cuts"):
        choose_cuts(cuts, total, 3, RATE, 4, allowed)  # type: ignore[arg-type]


def test_of_cuts_close_to_each_other_the_one_that_sends_least_is_kept() -> None:
    cuts = [Cut("a", 1.0, 5), Cut("b", 1.0, 3), Cut("c", 1.0, 3), Cut("d", 2.0, 9)]
    assert [one.before for one in thinned(cuts, 3.0, 10)] == ["b", "d"]
    many = [Cut(str(i), i / 1000, 1 + (i - 4) % 10) for i in range(1, 1000)]
    kept = thinned(many, 1.0, 100)
    assert len(kept) == 100
    assert {one.boundary_bytes for one in kept} == {1}
    assert [one.seconds_before for one in kept] == sorted(one.seconds_before for one in kept)
