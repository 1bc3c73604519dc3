"""The profile of a sharded module against the allocators of two real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_unitscale.profiler import fake_process_group, profile_graph
from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.distributed.memory_run import CASES, NUM_RANKS, batch, sharded
from tests.memory.oracles import sum_of

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]
# Of 16-bit matmuls oneDNN's memory is known roughly. What Gloo's threads have sent they let go of
# when they come to it: an activation or two of the tensor-parallel layers.
TOLERANCES = {"mixed": 0.03, "tensor": 0.05}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Measurements of every rank. Two processes run all cases that the tests read."""
    runs = runs_of_collected(request, lambda test, case: [case])
    folder = tmp_path_factory.mktemp("memory")
    return results_of_ranks("tests.distributed.memory_run", folder, runs, NUM_RANKS)


@pytest.mark.slow_cases
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_profile_matches_memory_of_rank(case: str, results: Results) -> None:
    with fake_process_group(NUM_RANKS):
        profile = profile_graph(sharded(case), batch(), optimizer=torch.optim.AdamW, loss=sum_of)
    first, second = results(case)
    parts = profile.parameter_bytes, profile.gradient_bytes, profile.optimizer_bytes
    assert parts == (first["parameters"], first["gradients"], first["optimizer"])
    assert profile.peak_bytes == pytest.approx(first["peak"], rel=TOLERANCES.get(case, 0))
    assert second["optimizer"] <= first["optimizer"]  # of the odd sizes it has the smaller half
