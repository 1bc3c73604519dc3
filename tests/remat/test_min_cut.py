import numpy as np
import pytest

from lightning_unitscale.remat.min_cut import CutNetwork
from lightning_unitscale.remat.problem import recomputed
from tests.remat.programs import all_plans, random_problem


def _costs(network, problem):
    for saved in all_plans(problem):
        cut = network.priced(saved)
        yield cut.seconds, cut.saved_bytes


@pytest.mark.parametrize("use_scipy", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_a_cut_is_as_good_as_the_best_of_all_plans(seed: int, use_scipy: bool) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 9)
    network = CutNetwork(problem, use_scipy=use_scipy)
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
