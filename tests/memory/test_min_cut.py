"""Minimum cuts against all plans of small problems, and the flow networks below them."""

import numpy as np
import pytest

from lightning_unitscale.memory.min_cut import CutNetwork, source_side
from lightning_unitscale.memory.problem import recomputed
from tests.memory.programs import all_plans, random_problem


def _costs(network, problem):
    for saved in all_plans(problem):
        cut = network.priced(saved)
        yield cut.seconds, cut.saved_bytes


@pytest.mark.parametrize("seed", range(12))
def test_cut_matches_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 9)
    network = CutNetwork(problem)
    costs = np.array(list(_costs(network, problem)))
    for price in (1e-3, 0.1, 0.5, 1.0, 3.0, 1e3):
        cut = network.cut(price)
        recomputed(problem, cut.saved)  # raises if it does not suffice
        best = (costs[:, 0] + price * costs[:, 1]).min()
        assert cut.seconds + price * cut.saved_bytes == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_hull_matches_brute_force(seed: int) -> None:
    problem = random_problem(np.random.default_rng(100 + seed), 9)
    network = CutNetwork(problem)
    hull = network.hull()
    costs = np.array(list(_costs(network, problem)))
    for price in np.geomspace(1e-2, 1e2, 50):
        best = (costs[:, 0] + price * costs[:, 1]).min()
        found = min(cut.seconds + price * cut.saved_bytes for cut in hull)
        assert found == pytest.approx(best, rel=1e-4, abs=1e-3)
    assert [cut.seconds for cut in hull] == sorted(cut.seconds for cut in hull)
    assert len({cut.saved_bytes for cut in hull}) == len(hull)


def _side(edges: list[tuple[int, int]], capacities: list[float]) -> list[bool]:
    tails, heads = np.array(edges).T
    sink = int(heads.max())
    return source_side(sink + 1, tails, heads, np.array(capacities), 0, sink).tolist()


def test_capacities_above_32_bits_do_not_overflow() -> None:
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert _side(edges, [5e12, 7e12, 6e12, 4e12]) == [True, False, True, False]


def test_equal_cuts_prefer_sink_side() -> None:
    assert _side([(0, 1), (1, 2), (2, 3)], [2.0, 2.0, 2.0]) == [True, True, True, False]


@pytest.mark.parametrize("num_paths", [1, 3, 8, 64])
def test_infinite_path_is_an_error(num_paths: int) -> None:
    sink = num_paths + 1
    edges = [edge for i in range(1, sink) for edge in ((0, i), (i, sink))]
    with pytest.raises(ValueError, match="no finite cut"):
        _side(edges, [np.inf] * len(edges))
    with pytest.raises(ValueError, match="no finite cut"):
        _side(edges, [5.0, *[np.inf] * (len(edges) - 1)] if num_paths > 1 else [np.inf] * 2)
    assert _side([(0, 1), *[(i + 1, j + 1) for i, j in edges]], [1.0, *[np.inf] * len(edges)]) == [
        True, *[False] * (sink + 1)
    ]  # fmt: skip


def test_order_of_edges_does_not_matter() -> None:
    edges = [(2, 3), (0, 2), (1, 3), (0, 1)]
    assert _side(edges, [1.0, 2.0, 5.0, 3.0]) == [True, False, True, False]
    assert _side(edges, [9.0, 2.0, 5.0, 3.0]) == [True] + [False] * 3
