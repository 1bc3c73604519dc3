import numpy as np
import pytest

from lightning_unitscale.remat.flow import FlowNetwork, source_side


def test_capacities_beyond_32_bits_do_not_wrap() -> None:
    tails, heads = np.array([0, 0, 1, 2]), np.array([1, 2, 3, 3])
    capacities = np.array([5e12, 7e12, 6e12, 4e12])
    for use_scipy in (True, False):
        side = source_side(4, tails, heads, capacities, 0, 3, use_scipy=use_scipy)
        assert side.tolist() == [True, False, True, False]


def test_of_two_equal_cuts_the_one_near_the_sink_is_taken() -> None:
    tails, heads = np.array([0, 1, 2]), np.array([1, 2, 3])
    side = source_side(4, tails, heads, np.array([2.0, 2.0, 2.0]), 0, 3)
    assert side.tolist() == [True, True, True, False]


def test_an_infinite_path_is_an_error() -> None:
    with pytest.raises(ValueError, match="no finite cut"):
        source_side(2, np.array([0]), np.array([1]), np.array([np.inf]), 0, 1)


@pytest.mark.parametrize("use_scipy", [True, False])
def test_a_network_is_cut_again_at_other_capacities(use_scipy: bool) -> None:
    tails, heads = np.array([2, 0, 1, 0]), np.array([3, 2, 3, 1])
    network = FlowNetwork(4, tails, heads, 0, 3, use_scipy=use_scipy)
    first = network.source_side(np.array([1.0, 2.0, 5.0, 3.0]))
    assert first.tolist() == [True, False, True, False]
    with pytest.raises(ValueError, match="no finite cut"):
        network.source_side(np.full(4, np.inf))
    assert network.source_side(np.array([9.0, 2.0, 5.0, 3.0])).tolist() == [True] + [False] * 3
