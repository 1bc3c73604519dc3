"""Two pipelines of two stages on four CPU processes: what DDP of two processes computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_unitscale.strategies import PipelineStrategy
from tests.distributed.launch import run_ranks

REPLICAS = 2
CASES = ["measured", "gpt", "gpt-v", "accumulated"]
TIED = "byte_embedding.weight"


class Runs:
    """Folders in which the cases were trained by DDP and by pipelines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._run("first", dict.fromkeys(("ddp", "pipeline"), "-"), CASES)
        # Each goes on from the other's checkpoint.
        other = {"ddp": "pipeline", "pipeline": "ddp"}
        saved = {kind: str(root / "first" / one) for kind, one in other.items()}
        self._run("on", saved, ["resumed"])

    def found(self, kind: str, case: str) -> list[dict[str, Any]]:
        """Return the results of the ranks."""
        folder = self.root / ("on" if case == "resumed" else "first") / kind
        count = len(list(folder.glob(f"{case}-?.pt")))
        assert count == (REPLICAS if kind == "ddp" else 2 * REPLICAS)
        return [torch.load(folder / f"{case}-{rank}.pt") for rank in range(count)]

    def _run(self, stage: str, given: dict[str, str], cases: list[str]) -> None:
        with ThreadPoolExecutor() as pool:
            running = []
            for kind, resume_from in given.items():
                folder = self.root / stage / kind
                folder.mkdir(parents=True)
                count = REPLICAS if kind == "ddp" else 2 * REPLICAS
                running.append(
                    pool.submit(
                        run_ranks,
                        "tests.pipeline.data_parallel_run",
                        folder,
                        *(kind, resume_from, *cases),
                        num_ranks=count,
                        timeout=500,
                    )
                )
            for one in running:
                one.result()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All trainings."""
    return Runs(tmp_path_factory.mktemp("data-parallel"))


distributed = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(560)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=distributed) for one in (*CASES, "resumed")]
)
def test_training_matches_ddp(case: str, runs: Runs) -> None:
    expected, found = runs.found("ddp", case), runs.found("pipeline", case)
    for rank, one in enumerate(found):
        theirs = expected[rank % REPLICAS]
        assert one["step"] == theirs["step"]
        assert one["sampler"] == theirs["sampler"] == "DistributedSampler"
        assert one["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        if case != "accumulated":
            # The mean of eight microbatches is not, to the last bit, that of two means of four.
            assert one["losses"][0] == theirs["losses"][0]
        assert one["metrics"].keys() == theirs["metrics"].keys()
        # DDP's step is a microbatch, and the last value of one.
        for name in one["metrics"].keys() - {"train_loss", "train_loss_step"}:
            value = one["metrics"][name]
            assert value.item() == pytest.approx(theirs["metrics"][name].item(), rel=1e-5), name
        assert one["gathered"] == theirs["gathered"]
        assert one["weights"].keys() == theirs["weights"].keys()
        for name, value in one["weights"].items():
            # AdamW makes much of the last bits of a small gradient.
            assert torch.allclose(value, theirs["weights"][name], rtol=1e-4, atol=1e-5), name
            assert torch.equal(value, found[0]["weights"][name]), "one weight on all ranks"
    losses = [one["losses"] for one in found]
    assert losses[0] == losses[REPLICAS], "the ranks of a pipeline have one batch"
    assert losses[0] != losses[1], "the pipelines have not"


@pytest.mark.parametrize("case", [pytest.param(one, marks=distributed) for one in CASES])
def test_gradients_match_ddp(case: str, runs: Runs) -> None:
    expected = runs.found("ddp", case)[0]["gradients"][0]
    names: list[set[str]] = []
    for one in runs.found("pipeline", case):
        gradients = one["gradients"][0]
        names.append(set(gradients))
        for name, gradient in gradients.items():
            difference = (gradient - expected[name]).abs().max().item()
            # Halves, sums of two, and the same microbatches: the same bits, but where the parts of
            # a tied weight, or of accumulated batches, are added up in another order.
            exact = name != TIED and case != "accumulated"
            assert difference == 0.0 if exact else difference <= 1e-7, name
    assert names[0] == names[1] and names[2] == names[3], "replicas own the same"
    assert names[0] | names[2] == expected.keys()
    # A schedule in the form of a V has the first and the last stage on one rank.
    assert names[0] & names[2] == ({TIED} if case == "gpt" else set())


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(560)
def test_one_checkpoint_is_written(runs: Runs) -> None:
    ddp, pipelines = (
        torch.load(runs.root / "first" / kind / "first-epoch=0.ckpt", weights_only=False)
        for kind in ("ddp", "pipeline")
    )
    written = sorted(one.name for one in (runs.root / "first" / "pipeline").glob("*.ckpt"))
    assert written == ["first-epoch=0.ckpt", "first-epoch=1.ckpt"]
    assert pipelines.keys() == ddp.keys()
    assert pipelines["state_dict"].keys() == ddp["state_dict"].keys()
    for ours, theirs in zip(pipelines["optimizer_states"], ddp["optimizer_states"], strict=True):
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()


def test_data_parallel_of_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="data_parallel=0"):
        PipelineStrategy(num_microbatches=2, data_parallel=0)
