"""Ranks that have captured different steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_another_course_of_the_step_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks("tests.pipeline.checks_run", tmp_path, num_ranks=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.startswith("rank(s) [1] of the pipeline have other stages than the")
