"""The search for cuts with several stages per rank, against all choices that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
import torch

from lightning_unitscale.pipeline.rank_search import balance_ranks
from lightning_unitscale.pipeline.search import Cut, choose_cuts

RATE = 1e9


def _loads(
    cuts: Sequence[Cut],
    total: float,
    chosen: Sequence[int],
    rank_of: Callable[[int], int],
    rate: float,
) -> list[float]:
    places = [Cut("", 0.0, 0), *(cuts[one] for one in chosen), Cut("", total, 0)]
    loads = [0.0] * (1 + max(map(rank_of, range(len(places) - 1))))
    for stage, (a, b) in enumerate(pairwise(places)):
        sent = (a.boundary_bytes + b.boundary_bytes) / rate
        loads[rank_of(stage)] += b.seconds_before - a.seconds_before + sent
    return loads


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("placement", ["V", "loop"])
def test_the_slowest_rank_is_nearly_as_fast_as_it_can_be(num_ranks: int, placement: str) -> None:
    def rank_of(stage: int) -> int:
        mirrored = placement == "V" and stage >= num_ranks
        return 2 * num_ranks - 1 - stage if mirrored else stage % num_ranks

    missed = 0
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        seconds = torch.rand(13, generator=generator).square().cumsum(0).tolist()
        sizes = torch.randint(1, 40, (12,), generator=generator).tolist()
        cuts, total = [Cut(str(i), seconds[i], sizes[i]) for i in range(12)], seconds[-1]
        found = balance_ranks(cuts, total, 2 * num_ranks, 1e3, rank_of, 8)
        best = min(
            max(_loads(cuts, total, one, rank_of, 1e3))
            for one in combinations(range(12), 2 * num_ranks - 1)
        )
        reached = max(_loads(cuts, total, found, rank_of, 1e3))
        assert best * (1 - 1e-9) <= reached <= 1.02 * best
        missed += reached > best * (1 + 1e-9)
        again = balance_ranks(cuts, total, 2 * num_ranks, 1e3, rank_of, 8)
        assert again == found, "every rank searches for itself"
    assert missed <= 1


def test_a_rank_with_one_large_stage_gets_less_of_the_others() -> None:
    """Of sixteen equal operations and one of four times their cost, in four stages in a V."""
    cuts = [Cut(str(i), float(one), 1) for i, one in enumerate(range(1, 17))]
    ranks = [0, 1, 1, 0]
    chosen = balance_ranks(cuts, 20.0, 4, RATE, ranks.__getitem__, 8)
    assert _loads(cuts, 20.0, chosen, ranks.__getitem__, RATE) == pytest.approx([10.0, 10.0])
    # The last operation alone is as much as a stage should be, of 20 in 5 stages on 3 ranks.
    five = [0, 1, 2, 1, 0]
    chosen = balance_ranks(cuts, 20.0, 5, RATE, five.__getitem__, 8)
    assert max(_loads(cuts, 20.0, chosen, five.__getitem__, RATE)) == pytest.approx(7.0)
    by_stage = choose_cuts(cuts, 20.0, 5, RATE, 8)
    assert max(_loads(cuts, 20.0, by_stage, five.__getitem__, RATE)) >= 8.0
    single = balance_ranks(cuts, 20.0, 5, RATE, lambda stage: stage, 8)
    assert single == by_stage
