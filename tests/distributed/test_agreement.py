"""Ranks exchange objects, and raise the error of one rank together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_unitscale.loops import ranks
from tests.distributed.launch import run_ranks

NUM_RANKS = 3


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_three_ranks_exchange_values_and_errors(tmp_path: Path) -> None:
    run_ranks("tests.distributed.agreement_run", tmp_path, num_ranks=NUM_RANKS, timeout=90)
    for own in range(NUM_RANKS):
        found = torch.load(tmp_path / f"agreement-{own}.pt")
        assert found["size"] == NUM_RANKS
        assert found["gathered"] == [{"rank": rank} for rank in range(NUM_RANKS)]
        assert found["any"] == [True, False]
        assert found["differing"] == [[2], []]
        assert found["broadcast"] == "of 1"
        assert found["problems"] == ["rank 1 refuses", ""]
        assert found["handed"].tolist() == [float(min(own, 1))] * 2


def test_single_process_needs_no_process_group() -> None:
    assert ranks.gathered("own") == ["own"]
    assert not ranks.is_distributed()
    assert ranks.any_rank(True) and not ranks.any_rank(False)
    assert ranks.differing_ranks("own") == []
    with pytest.raises(ValueError, match="mine"), ranks.failing_together():
        raise ValueError("mine")
