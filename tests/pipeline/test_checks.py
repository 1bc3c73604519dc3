"""Errors for ranks that have captured different steps, and for optimizers of whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_unitscale.pipeline.checks import refuse_optimizers
from tests.distributed.launch import run_ranks
from tests.pipeline.pipeline_run import Groups


@pytest.mark.distributed
@pytest.mark.timeout(240)
def test_different_step_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_ranks("tests.pipeline.checks_run", tmp_path, num_ranks=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.startswith("the stages of rank(s) [1] differ")


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_optimizers_that_need_all_parameters_are_an_error() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weight = [nn.Parameter(torch.ones(2))]
    zero = ZeroRedundancyOptimizer(weight, torch.optim.AdamW, lr=0.1)
    for optimizer, match in ((zero, "More stages"), (torch.optim.LBFGS(weight), "AdamW")):
        with pytest.raises(MisconfigurationException, match=match):
            refuse_optimizers([optimizer])
    refuse_optimizers([Groups().configure_optimizers()["optimizer"]])
