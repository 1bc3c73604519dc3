"""Minimum cuts against all plans of small problems, and the flow networks below them."""

import numpy as np
import pytest

from lightning_unitscale.remat.min_cut import CutNetwork, FlowNetwork
from lightning_unitscale.remat.problem import recomputed
from tests.remat.programs import all_plans, random_problem


def _costs(network, problem):
    for saved in all_plans(problem):
        cut = network.priced(saved)
        yield cut.seconds, cut.saved_bytes


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_is_as_good_as_the_best_of_all_plans(seed: int) -> None:
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
def test_the_hull_is_the_hull_of_all_plans(seed: int) -> None:
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


def test_capacities_beyond_32_bits_do_not_wrap() -> None:
    network = FlowNetwork(4, np.array([0, 0, 1, 2]), np.array([1, 2, 3, 3]), 0, 3)
    side = network.source_side(np.array([5e12, 7e12, 6e12, 4e12]))
    assert side.tolist() == [True, False, True, False]


def test_of_two_equal_cuts_the_one_near_the_sink_is_taken() -> None:
    network = FlowNetwork(4, np.array([0, 1, 2]), np.array([1, 2, 3]), 0, 3)
    side = network.source_side(np.array([2.0, 2.0, 2.0]))
    assert side.tolist() == [True, True, True, False]


def test_an_infinite_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="no finite cut"):
        FlowNetwork(2, np.array([0]), np.array([1]), 0, 1).source_side(np.array([np.inf]))


def test_a_network_is_cut_again_at_other_capacities() -> None:
    network = FlowNetwork(4, np.array([2, 0, 1, 0]), np.array([3, 2, 3, 1]), 0, 3)
    first = network.source_side(np.array([1.0, 2.0, 5.0, 3.0]))
    assert first.tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="no finite cut"):
        network.source_side(np.full(4, np.inf))
    assert network.source_side(np.array([9.0, 2.0, 5.0, 3.0])).tolist() == [True] + [False] * 3
