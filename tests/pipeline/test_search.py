"""The search for cuts, against all possible choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
import torch

from lightning_unitscale.pipeline.balance import CutCandidate, choose_cuts, thinned
from lightning_unitscale.pipeline.schedules import simulate_1f1b

RATE = 100.0
FAST = 1e9


def _graph(seed: int, num_cuts: int = 8) -> tuple[list[CutCandidate], float]:
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.rand(num_cuts + 1, generator=generator).cumsum(0).tolist()
    sizes = torch.randint(1, 40, (num_cuts,), generator=generator).tolist()
    return [CutCandidate(str(i), seconds[i], sizes[i]) for i in range(num_cuts)], seconds[-1]


def _stages(
    cuts: Sequence[CutCandidate], total: float, chosen: Sequence[int], rate: float = RATE
) -> list[float]:
    places = [CutCandidate("", 0.0, 0), *(cuts[one] for one in chosen), CutCandidate("", total, 0)]
    return [
        b.seconds_before - a.seconds_before + (a.boundary_bytes + b.boundary_bytes) / rate
        for a, b in pairwise(places)
    ]


def _step(cuts: Sequence[CutCandidate], total: float, chosen: Sequence[int], num: int) -> float:
    stages = _stages(cuts, total, chosen)
    return (num - 1) * max(stages) + sum(stages)


@pytest.mark.parametrize("num_microbatches", [1, 4, 64])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_chosen_cuts_match_brute_force(num_stages: int, num_microbatches: int) -> None:
    for seed in range(8):
        cuts, total = _graph(seed)
        found = choose_cuts(cuts, total, num_stages, RATE, num_microbatches)
        best = min(
            _step(cuts, total, one, num_microbatches)
            for one in combinations(range(len(cuts)), num_stages - 1)
        )
        assert _step(cuts, total, found, num_microbatches) == pytest.approx(best)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_step_estimate_bounds_1f1b_simulation(num_stages: int) -> None:
    cuts, total = _graph(0)
    for chosen in combinations(range(len(cuts)), num_stages - 1):
        stages = _stages(cuts, total, chosen)
        forward, backward = [one / 3 for one in stages], [2 * one / 3 for one in stages]
        for num in (num_stages, 64):
            ratio = simulate_1f1b(forward, backward, num).seconds / _step(cuts, total, chosen, num)
            assert (0.98 if num == 64 else 0.75) < ratio < 1 + 1e-9


def test_microbatches_trade_slowest_stage_for_sent_bytes() -> None:
    # CutCandidate in the middle both stages take 60 seconds, 20 of them to send; in front of it 41.
    cuts = [CutCandidate("before", 35.0, 100), CutCandidate("middle", 40.0, 2000)]
    many = choose_cuts(cuts, 80.0, 2, RATE, 1000)
    assert [cuts[one].before for one in many] == ["before"]
    cuts = [CutCandidate("before", 35.0, 100), CutCandidate("middle", 40.0, 500)]
    assert choose_cuts(cuts, 80.0, 2, RATE, 1000) == [1], "45 seconds against 46"
    assert choose_cuts(cuts, 80.0, 2, RATE, 2) == [0], "82 in all against 90"


def test_free_operations_can_be_cut() -> None:
    assert choose_cuts([CutCandidate("a", 0.0, 0), CutCandidate("b", 0.0, 0)], 0.0, 2, RATE, 4) == [
        0
    ]


def test_only_allowed_stages_are_chosen() -> None:
    cuts, total = _graph(0)

    # The first of two stages ends after the third cut, or nowhere.
    allowed = torch.zeros(3, 10, 10, dtype=torch.bool).numpy()
    allowed[0, 0, 3] = allowed[1, 3, 9] = True
    assert choose_cuts(cuts, total, 2, RATE, 4, allowed=allowed) == [2]
    with pytest.raises(ValueError, match="num_stages=3: none of the 8 possible cuts"):
        choose_cuts(cuts, total, 3, RATE, 4, allowed=allowed)


def test_thinning_keeps_cut_with_fewest_sent_bytes() -> None:
    cuts = [
        CutCandidate("a", 1.0, 5),
        CutCandidate("b", 1.0, 3),
        CutCandidate("c", 1.0, 3),
        CutCandidate("d", 2.0, 9),
    ]
    assert [one.before for one in thinned(cuts, 3.0, 10)] == ["b", "d"]
    many = [CutCandidate(str(i), i / 1000, 1 + (i - 4) % 10) for i in range(1, 1000)]
    kept = thinned(many, 1.0, 100)
    assert len(kept) == 100
    assert {one.boundary_bytes for one in kept} == {1}
    assert [one.seconds_before for one in kept] == sorted(one.seconds_before for one in kept)


def _loads(
    cuts: Sequence[CutCandidate],
    total: float,
    chosen: Sequence[int],
    rank_of: Callable[[int], int],
    rate: float,
) -> list[float]:
    stages = _stages(cuts, total, chosen, rate)
    loads = [0.0] * (1 + max(map(rank_of, range(len(stages)))))
    for stage, seconds in enumerate(stages):
        loads[rank_of(stage)] += seconds
    return loads


@pytest.mark.slow_cases
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("placement", ["V", "loop"])
def test_slowest_rank_is_within_2_percent_of_brute_force(num_ranks: int, placement: str) -> None:
    def rank_of(stage: int) -> int:
        mirrored = placement == "V" and stage >= num_ranks
        return 2 * num_ranks - 1 - stage if mirrored else stage % num_ranks

    missed = 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        seconds = torch.rand(13, generator=generator).square().cumsum(0).tolist()
        sizes = torch.randint(1, 40, (12,), generator=generator).tolist()
        cuts, total = [CutCandidate(str(i), seconds[i], sizes[i]) for i in range(12)], seconds[-1]
        found = choose_cuts(cuts, total, 2 * num_ranks, 1e3, 8, rank_of=rank_of)
        best = min(
            max(_loads(cuts, total, one, rank_of, 1e3))
            for one in combinations(range(12), 2 * num_ranks - 1)
        )
        reached = max(_loads(cuts, total, found, rank_of, 1e3))
        assert best * (1 - 1e-9) <= reached <= 1.02 * best
        missed += reached > best * (1 + 1e-9)
        again = choose_cuts(cuts, total, 2 * num_ranks, 1e3, 8, rank_of=rank_of)
        assert again == found, "every rank searches for itself"
    assert missed <= 1


def test_rank_with_large_stage_gets_smaller_other_stage() -> None:
    """Sixteen equal operations, and one of four times their cost, in four stages in a V."""
    cuts = [CutCandidate(str(i), float(one), 1) for i, one in enumerate(range(1, 17))]
    ranks = [0, 1, 1, 0]
    chosen = choose_cuts(cuts, 20.0, 4, FAST, 8, rank_of=ranks.__getitem__)
    assert _loads(cuts, 20.0, chosen, ranks.__getitem__, FAST) == pytest.approx([10.0, 10.0])
    # The last operation alone is as much as a stage should be, of 20 in 5 stages on 3 ranks.
    five = [0, 1, 2, 1, 0]
    chosen = choose_cuts(cuts, 20.0, 5, FAST, 8, rank_of=five.__getitem__)
    assert max(_loads(cuts, 20.0, chosen, five.__getitem__, FAST)) == pytest.approx(7.0)
    by_stage = choose_cuts(cuts, 20.0, 5, FAST, 8)
    assert max(_loads(cuts, 20.0, by_stage, five.__getitem__, FAST)) >= 8.0
    single = choose_cuts(cuts, 20.0, 5, FAST, 8, rank_of=lambda stage: stage)
    assert single == by_stage
