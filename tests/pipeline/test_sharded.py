"""Optimizers that are sharded over pipelines: the training of one device, and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_unitscale.pipeline.checks import refuse_optimizers
from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import run_ranks
from tests.pipeline.pipeline_run import Groups
from tests.pipeline.sharded_run import REPLICAS, STEPS

NUM_RANKS = 2 * REPLICAS
CASES = ["groups", "gpt", "keeps"]

distributed = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(560)]
every_case = [pytest.param(case, marks=distributed) for case in (*CASES, "resumed")]


class Runs:
    """Folders in which the cases were trained on one device and on four."""

    def __init__(self, root: Path) -> None:
        self.folders = {num_ranks: root / str(num_ranks) for num_ranks in (1, NUM_RANKS)}
        for folder in self.folders.values():
            folder.mkdir()
        # Each goes on from the other's checkpoint.
        self._run(1, CASES)
        self._run(NUM_RANKS, [*CASES, "gpt-whole", "resumed"])
        self._run(1, ["resumed"])

    def found(self, run: str, num_ranks: int = NUM_RANKS) -> list[dict[str, Any]]:
        """What the ranks wrote."""
        folder = self.folders[num_ranks]
        paths = [folder / f"{run}-{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(path, weights_only=False) for path in paths]

    def checkpoint(self, run: str, num_ranks: int = NUM_RANKS) -> dict[str, Any]:
        """The checkpoint at the end."""
        path = self.folders[num_ranks] / f"{run}.ckpt"
        saved: dict[str, Any] = torch.load(path, weights_only=False)
        return saved

    def _run(self, num_ranks: int, runs: list[str]) -> None:
        other = self.folders[1 if num_ranks > 1 else NUM_RANKS]
        run_ranks(
            "tests.pipeline.sharded_run",
            self.folders[num_ranks],
            *(str(num_ranks), str(other), *runs),
            num_ranks=num_ranks,
            timeout=500,
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All trainings."""
    return Runs(tmp_path_factory.mktemp("sharded"))


@pytest.mark.slow
@pytest.mark.parametrize("case", every_case)
def test_the_training_of_one_device(case: str, runs: Runs) -> None:
    found, (expected,) = runs.found(case), runs.found(case, 1)
    # Of the whole batch a pipeline sees its part.
    losses = np.mean([rank["losses"] for rank in found[:REPLICAS]], axis=0)
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    assert found[0]["losses"] != found[1]["losses"]
    for rank in found:
        assert rank["weights"].keys() == expected["weights"].keys()
        for name, value in rank["weights"].items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=1e-4, atol=1e-5)
            assert torch.equal(value, found[0]["weights"][name]), "one weight on all ranks"


@pytest.mark.parametrize("case", every_case)
def test_the_checkpoint_of_one_device(case: str, runs: Runs) -> None:
    found, expected = runs.checkpoint(case), runs.checkpoint(case, 1)
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    (ours,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        torch.testing.assert_close(ours["state"][index], state, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_bits_of_whole_optimizers(runs: Runs) -> None:
    """With units, a tied weight and clipping; and of the monitor's statistics."""
    for sharded, whole in zip(runs.found("gpt"), runs.found("gpt-whole"), strict=True):
        assert sharded["losses"] == whole["losses"]
        for name, value in sharded["weights"].items():
            assert torch.equal(value, whole["weights"][name]), name
        (ours,), (theirs,) = sharded["scales"], whole["scales"]
        assert np.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("case", every_case)
def test_each_parameter_is_stepped_in_one_pipeline(case: str, runs: Runs) -> None:
    found, (expected,) = runs.found(case), runs.found(case, 1)
    pipelines = [
        found[column]["stepped"] | found[column + REPLICAS]["stepped"] for column in (0, 1)
    ]
    assert pipelines[0] | pipelines[1] == expected["stepped"]
    assert not pipelines[0] & pipelines[1]
    # The elements of all of them count, each once.
    sizes = {name: expected["weights"][name].numel() for name in expected["stepped"]}
    assert {count for rank in found for count in rank["elements"]} == {sum(sizes.values())}
    for rank in found:
        memory, num_bytes = rank["memory"], 4 * sum(sizes[name] for name in rank["stepped"])
        # Until the last batch of an optimizer step gradients are whole.
        assert min(memory["gradients"]) == num_bytes
        assert memory["gradients"][-1] == num_bytes
        # Adagrad has state of the layer that no step uses, too.
        unused = {"never.weight": 4 * 8 * 8, "never.bias": 4 * 8} if case == "keeps" else {}
        assert memory["owned"] == num_bytes + sum(unused.values())
        assert memory["num_owned"] == len(rank["stepped"]) + len(unused)
        # Adagrad has a sum of squares; AdamW two moments. Both count the steps of each parameter.
        moments = memory["owned"] * (1 if case == "keeps" else 2)
        assert set(memory["optimizer"][-STEPS:]) == {moments + 4 * memory["num_owned"]}
    for row in (found[:REPLICAS], found[REPLICAS:]):
        # One parameter of the GPT, its tied embedding, is more than half of a stage.
        shares = [sum(map(sizes.__getitem__, rank["stepped"])) for rank in row]
        assert max(shares) <= 0.6 * sum(shares) or len(row[np.argmax(shares)]["stepped"]) == 1


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_a_memory_budget_counts_the_share_of_a_rank(runs: Runs) -> None:
    for sharded, whole in zip(runs.found("gpt"), runs.found("gpt-whole"), strict=True):
        (ours,), (theirs,) = sharded["reports"], whole["reports"]
        elsewhere = whole["memory"]["owned"] - sharded["memory"]["owned"]
        # Gradients of the step before, and two moments; beside them numbers of steps.
        saved = theirs.peak_bytes - ours.peak_bytes
        assert saved == pytest.approx(3 * elsewhere, abs=4 * len(whole["weights"]))
        # The measuring does not see the buffers to receive in: they are there before it begins.
        for run, report in ((sharded, ours), (whole, theirs)):
            assert 0.75 < run["measured"] / report.peak_bytes < 1.02
        assert whole["measured"] - sharded["measured"] == pytest.approx(saved, rel=0.02)


def test_a_single_pipeline_has_nothing_to_shard() -> None:
    with pytest.raises(ValueError, match=r"shard_optimizer=True with data_parallel=1: .* Raise"):
        PipelineStrategy(num_microbatches=2, shard_optimizer=True)


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
def test_optimizers_that_need_all_parameters_are_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weight = [nn.Parameter(torch.ones(2))]
    zero = ZeroRedundancyOptimizer(weight, torch.optim.AdamW, lr=0.1)
    for optimizer, match in ((zero, "shard_optimizer=True"), (torch.optim.LBFGS(weight), "AdamW")):
        with pytest.raises(MisconfigurationException, match=match):
            refuse_optimizers([optimizer])
    refuse_optimizers([Groups().configure_optimizers()["optimizer"]])
