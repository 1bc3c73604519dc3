"""Plain loops and Fabric on two CPU processes: the bits of the run without the callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.launch import results_of_ranks
from tests.distributed.loops_run import HOWS, KINDS
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank computed; two processes run all of the cases."""
    runs = [f"{kind}:{how}" for kind in KINDS for how in HOWS]
    module = "tests.distributed.loops_run"
    return results_of_ranks(module, tmp_path_factory.mktemp("loops"), runs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [how for how in HOWS if how != "without"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_with_and_without(kind: str, how: str, results: Results) -> None:
    without, found = results(f"{kind}:without"), results(f"{kind}:{how}")
    for plain, ours in zip(without, found, strict=True):
        assert_same_bits(ours["losses"], plain["losses"])
        assert_same_bits(ours["weights"], plain["weights"])
        # Six products forward; backward all but that for the gradient of the batch.
        assert ours["products"] == (17, 17)
    # The ranks have seen other batches and have one set of units.
    assert not KINDS[kind] or not torch.equal(without[0]["losses"], without[1]["losses"])
    assert found[0]["gauge"] == found[1]["gauge"]
    products = {name.partition(":")[0] for name in found[0]["gauge"]}
    assert {"first.linear", "blocks.1.down.linear", "matmul"} <= products
    if how == "both":
        assert found[0]["names"] == found[1]["names"]
        assert {"first.linear", "matmul"} <= set(found[0]["names"])
