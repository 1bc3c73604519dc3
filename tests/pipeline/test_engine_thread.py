"""A pipeline whose stages run their backward passes on a thread of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.helpers import assert_same_bits
from tests.process import ENGINE_THREAD

NUM_RANKS = 2
CASE = "gpt-v"


@pytest.mark.slow
@pytest.mark.distributed
def test_engine_thread_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("here", None), ("there", "1")):
        if value is not None:
            monkeypatch.setenv(ENGINE_THREAD, value)
        (tmp_path / name).mkdir()
        arguments = (str(NUM_RANKS), "-", CASE)
        run_ranks("tests.pipeline.pipeline_run", tmp_path / name, *arguments, num_ranks=NUM_RANKS)
    for rank in range(NUM_RANKS):
        here, there = (
            torch.load(tmp_path / name / f"{CASE}-{rank}.pt") for name in ("here", "there")
        )
        assert_same_bits(there["losses"], here["losses"])
        assert_same_bits(there["weights"], here["weights"])
