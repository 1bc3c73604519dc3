"""Trainings under PipelineStrategy beside those of one device: many steps, callbacks, restarts."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import codes_of_ranks, run_ranks
from tests.pipeline.long_run import CHAIN_STEPS

RUN = "tests.pipeline.long_run"
# Each goes on where the one before has stopped: number of ranks, and the schedule.
CHAIN = [(1, "-"), (2, "DualPipeV"), (4, "InterleavedZeroBubble"), (1, "-")]
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(560)]


class Runs:
    """Folders of the runs on one device and on two, and of the chain."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with ThreadPoolExecutor() as pool:
            chain = pool.submit(self._chain)
            pair = pool.submit(self._run, "two", 2, "1F1B", "many", "callbacks", "killed")
            self._run("one", 1, "-", "many", "callbacks", "chain4")
            pair.result()
            chain.result()

    def found(self, folder: str, case: str, rank: int = 0) -> dict[str, Any]:
        """Return the results of a rank."""
        return torch.load(self.root / folder / f"{case}-{rank}.pt", weights_only=False)

    def _chain(self) -> None:
        before = ""
        for number, (num_ranks, schedule) in enumerate(CHAIN, 1):
            case = f"chain{number}"
            self._run(case, num_ranks, schedule, f"{case}={before}")
            before = str(self.root / case / f"{case}.ckpt")

    def _run(self, name: str, num_ranks: int, schedule: str, *cases: str) -> None:
        folder = self.root / name
        folder.mkdir()
        run_ranks(RUN, folder, str(num_ranks), schedule, *cases, num_ranks=num_ranks, timeout=500)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All trainings but those that are killed."""
    return Runs(tmp_path_factory.mktemp("long"))


def test_many_steps_match_one_device(runs: Runs) -> None:
    """Runs with accumulation, clipping, a learning-rate schedule and tied weights."""
    expected, found = runs.found("one", "many"), runs.found("two", "many")
    assert found["step"] == expected["step"] == 40
    assert len(found["losses"]) == 80
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert runs.found("two", "many", 1)["losses"] == found["losses"]


def test_resuming_on_other_devices_and_schedules(runs: Runs) -> None:
    whole = runs.found("one", "chain4")
    losses: list[float] = []
    for number, _ in enumerate(CHAIN, 1):
        case = f"chain{number}"
        found = runs.found(case, case)
        assert found["step"] == number * CHAIN_STEPS
        losses += found["losses"]
        saved, expected = (
            torch.load(runs.root / folder / f"{one}.ckpt", weights_only=False)
            for folder, one in ((case, case), ("one", "chain4"))
        )
        assert saved.keys() == expected.keys()
        assert saved["state_dict"].keys() == expected["state_dict"].keys()
        for ours, theirs in zip(
            saved["optimizer_states"], expected["optimizer_states"], strict=True
        ):
            assert ours["state"].keys() == theirs["state"].keys()
            assert all(one.keys() == theirs["state"][i].keys() for i, one in ours["state"].items())
    assert losses == pytest.approx(whole["losses"], rel=1e-5)


def test_callbacks_and_loggers(runs: Runs) -> None:
    """Early stopping, the best checkpoint, validation within the epoch, the bar, TensorBoard."""
    expected, found = runs.found("one", "callbacks"), runs.found("two", "callbacks")
    other = runs.found("two", "callbacks", 1)
    # Of the 120 steps that twenty epochs have; validation is every four steps.
    assert 8 <= expected["step"] < 100 and expected["step"] % 4 == 0
    assert found["step"] == other["step"] == expected["step"]
    for one in (found, other):
        assert Path(one["best"]).name == Path(expected["best"]).name
        assert one["best_score"].item() == pytest.approx(expected["best_score"].item(), rel=1e-5)
        assert one["shown"].keys() == expected["shown"].keys()
    assert found["shown"] == pytest.approx(expected["shown"], rel=1e-5)
    assert [one.name for one in (runs.root / "two" / "best").iterdir()] == [
        Path(expected["best"]).name
    ]
    events = [list((runs.root / one / "logs").rglob("*tfevents*")) for one in ("one", "two")]
    assert len(events[0]) == len(events[1]) == 1
    assert _scalars(events[1][0]) == pytest.approx(_scalars(events[0][0]), rel=1e-5)
    bars = [(runs.root / "two" / f"{rank}.txt").read_text().count("Epoch 0") for rank in (0, 1)]
    assert bars[0] > 0 and bars[1] == 0


def _scalars(path: Path) -> dict[str, float]:
    """Every logged value, by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path)).Reload()
    return {
        f"{tag} {one.step}": one.value
        for tag in events.Tags()["scalars"]
        for one in events.Scalars(tag)
    }


@pytest.mark.parametrize(("rank", "step"), [(0, 4), (1, 10)])
def test_run_resumes_after_killed_rank(rank: int, step: int, tmp_path: Path, runs: Runs) -> None:
    folders = {one: tmp_path / one for one in ("killed", "resumed")}
    for one in folders.values():
        one.mkdir()
    codes, _ = codes_of_ranks(
        RUN, folders["killed"], "2", "1F1B", f"killed@{rank}:{step}", num_ranks=2, timeout=120
    )
    # The other one does not wait for its timeout, which is a minute.
    assert codes[rank] == -signal.SIGKILL and codes[1 - rank] == 1
    last = f"epoch={step // 3 - 1}.ckpt"
    assert sorted(one.name for one in folders["killed"].glob("*.ckpt"))[-1] == last
    case = f"killed={folders['killed'] / last}"
    run_ranks(RUN, folders["resumed"], "2", "1F1B", case, num_ranks=2)
    expected = runs.found("two", "killed")
    found = torch.load(folders["resumed"] / "killed-0.pt", weights_only=False)
    assert found["losses"] == expected["losses"][-len(found["losses"]) :]
    assert found["step"] == expected["step"] == 15
