"""``UnitScaledPrecision`` on two CPU processes has the bits of the callback's run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.distributed.plugin_run import STRATEGIES
from tests.helpers import assert_same_bits


@pytest.mark.slow_cases
@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spread", STRATEGIES)
def test_plugin_matches_callback(spread: str, tmp_path: Path) -> None:
    runs = [f"{spread}:plugin", f"{spread}:callback"]
    run_ranks("tests.distributed.plugin_run", tmp_path, *runs, num_ranks=2)
    for rank in range(2):
        plugin, callback = (
            torch.load(tmp_path / f"{run}-{rank}.pt", weights_only=True) for run in runs
        )
        assert_same_bits(plugin, callback)
        assert len(plugin["gauge"]) >= 4
