"""FSDP2 and tensor parallel on two CPU processes: the bits of the run without the callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.launch import results_of_ranks
from tests.distributed.sharded_run import HOWS, SIZES
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank computed; two processes run all of the cases."""
    runs = [f"{kind}:{how}" for kind in SIZES for how in HOWS]
    module = "tests.distributed.sharded_run"
    return results_of_ranks(module, tmp_path_factory.mktemp("sharded"), runs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [how for how in HOWS if how != "without"])
@pytest.mark.parametrize("kind", SIZES)
def test_the_same_with_and_without(kind: str, how: str, results: Results) -> None:
    without, found = results(f"{kind}:without"), results(f"{kind}:{how}")
    for plain, ours in zip(without, found, strict=True):
        assert_same_bits(ours["losses"], plain["losses"])
        assert_same_bits(ours["weights"], plain["weights"])
        # Seven products forward; backward all but that for the gradient of the batch.
        assert ours["products"] == (20, 20)
    assert found[0]["gauge"] == found[1]["gauge"]
    products = {name.partition(":")[0] for name in found[0]["gauge"]}
    # That of the root module after its blocks is among them.
    assert {"first.linear", "blocks.1.down.linear", "head.linear"} <= products
    assert len(products) == 7 - 1 + 1
    if how == "both":
        assert found[0]["names"] == found[1]["names"]
        assert {"first.linear", "matmul", "head.linear"} <= set(found[0]["names"])
        # A distributed tensor is shown where it is one in the eyes of this rank: see is_readable.
        assert ("blocks.0.up.linear" in found[0]["names"]) == (kind == "fsdp")
