"""UnitScaleCallback and ScaleMonitor under PipelineStrategy, on two CPU processes.

Every training is compared with accumulation of the same microbatches in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_unitscale.scales.snapshot import ScaleSnapshot
from tests.distributed.launch import run_ranks, runs_of_collected
from tests.pipeline.scaled_pipeline_run import NUM_MICROBATCHES, PARTS, REFUSED, STEPS

NUM_RANKS = 2
SCALED = ["matmuls", "matmuls-v", "looks", "rules-v", "u-mup", "fp8", "fp8-looks"]
CASES = [*SCALED, "simulated", "bf16", "monitored", "accumulated", "stops", "raises"]
REMATERIALIZED = ["min-cut", "share"]
PIPELINED = ["plain", *REMATERIALIZED, "refused"]
VALIDATED = {"rules-v", "monitored", "matmuls", "bf16", "fp8"}
# With two groups of gradients added to each other, one process adds up in another order.
OTHER_ORDER = {"accumulated"}

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


class Runs:
    """Folders in which the cases were trained on one device and on two."""

    def __init__(self, root: Path, read: Container[str]) -> None:
        self.folders: dict[int | str, Path] = {
            one: root / str(one) for one in (1, NUM_RANKS, "alone")
        }
        for one in self.folders.values():
            one.mkdir()
        parts = [[f"{name}-{part}" for name in PARTS if name in read] for part in range(3)]
        cases, pipelined = ([one for one in of if one in read] for of in (CASES, PIPELINED))
        with ThreadPoolExecutor() as pool:
            alone = pool.submit(
                self._run,
                *("alone", 1, str(self.folders["alone"])),
                [*itertools.chain.from_iterable(parts), *cases],
            )
            self._run(NUM_RANKS, NUM_RANKS, "-", parts[0])
            self._run(1, 1, str(self.folders[NUM_RANKS]), parts[1])
            # An error leaves no usable process group, so cases that raise come last.
            self._run(NUM_RANKS, NUM_RANKS, str(self.folders[1]), [*parts[2], *pipelined, *cases])
            alone.result()

    def found(self, folder: int | str, case: str, rank: int = 0) -> dict[str, Any]:
        """Return the results of a rank for a case."""
        path = self.folders[folder] / f"{case}-{rank}.pt"
        found: dict[str, Any] = torch.load(path, weights_only=False)
        return found

    def checkpoint(self, folder: int | str, case: str) -> dict[str, Any]:
        """Return the checkpoint of a case."""
        path = self.folders[folder] / f"{case}.ckpt"
        saved: dict[str, Any] = torch.load(path, weights_only=False)
        return saved

    def _run(
        self, folder: int | str, num_ranks: int, resume_from: str, cases: Sequence[str]
    ) -> None:
        if not cases:
            return
        run_ranks(
            "tests.pipeline.scaled_pipeline_run",
            self.folders[folder],
            str(num_ranks),
            resume_from,
            *cases,
            num_ranks=num_ranks,
            timeout=800,
        )


# Cases that tests without parameters read.
_READ = {
    "test_tied_weight_gradient_is_sum_over_stages": "matmuls",
    "test_only_one_rank_writes": "monitored",
    "test_incompatible_callbacks_are_an_error_on_all_ranks": "refused",
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All trainings that the tests read."""
    read = runs_of_collected(
        request,
        lambda test, case="": [
            _READ.get(test, case),
            *(["plain"] if test == "test_callback_changes_no_bit_of_pipeline" else []),
        ],
    )
    return Runs(tmp_path_factory.mktemp("scaled"), read)


def _accumulated(losses: list[float]) -> list[float]:
    """The losses of batches, from their microbatches', which Lightning has divided already."""
    parts = torch.tensor(losses).view(-1, NUM_MICROBATCHES)
    return parts.sum(1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_pipeline_matches_accumulation_in_one_process(case: str, runs: Runs) -> None:
    """Losses and gradients have the same bits; those of tied weights up to the order of sums."""
    expected = runs.found("alone", case)
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)
        assert found["steps"] == expected["steps"] == (3 if case in {"stops", "raises"} else STEPS)
        assert found["attributes"] == expected["attributes"]
        assert found["validated"] == pytest.approx(expected["validated"], rel=1e-5)
        assert bool(found["validated"]) == (case in VALIDATED)
        # After the first step the weights differ by what the sums' order made of tied ones.
        has_ties = "byte_embedding.weight" in expected["gradients"][0]
        losses = _accumulated(expected["losses"])
        for step, (loss, other) in enumerate(zip(found["losses"], losses, strict=True)):
            is_exact = case not in OTHER_ORDER and not (has_ties and step)
            assert loss == pytest.approx(other, rel=0 if is_exact else 1e-6, abs=0, nan_ok=True)
        for step, gradients in enumerate(found["gradients"]):
            assert gradients
            for name, one in gradients.items():
                other = expected["gradients"][step][name]
                is_exact = not has_ties or (step == 0 and name != "byte_embedding.weight")
                is_exact = is_exact and case not in OTHER_ORDER
                scale = other.square().mean().sqrt() if not is_exact else 0.0
                torch.testing.assert_close(
                    one, other, rtol=0, atol=1e-5 * float(scale), equal_nan=True
                )


@pytest.mark.parametrize("case", sorted(VALIDATED))
def test_validation_uses_stages_unless_rules_change_it(case: str, runs: Runs) -> None:
    """With rules it runs whole, with all weights. Otherwise each rank uses only its own weights."""
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)
        ((present, number),) = found["validated with"]
        assert (present == number) == (case == "rules-v")
        expected = runs.found("alone", case)
        if case in {"monitored", "bf16"}:
            assert found["validated"] == expected["validated"], "no weight is tied: the same bits"


@pytest.mark.parametrize("case", ["matmuls", *REMATERIALIZED])
def test_callback_changes_no_bit_of_pipeline(case: str, runs: Runs) -> None:
    """Unit scaling in FP32, and running again, change no bit, those of tied weights included."""
    for rank in range(NUM_RANKS):
        plain, changed = (runs.found(NUM_RANKS, one, rank) for one in ("plain", case))
        assert changed["losses"] == plain["losses"]
        for ours, theirs in zip(changed["gradients"], plain["gradients"], strict=True):
            assert ours.keys() == theirs.keys(), "the cuts are the same"
            assert all(torch.equal(one, theirs[name]) for name, one in ours.items())


@pytest.mark.parametrize("case", REMATERIALIZED)
def test_memory_budget_within_stage(case: str, runs: Runs) -> None:
    """Every rank has a plan that recomputes something, and its peak is the predicted one."""
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)
        (report,) = found["reports"]
        assert sum(report.recomputed.values()) > 0
        # The measuring does not see the buffers to receive in: they are there before it begins.
        assert 0.75 < found["measured"] / report.peak_bytes < 1.02


@pytest.mark.parametrize("case", SCALED)
def test_all_ranks_have_units_of_one_process(case: str, runs: Runs) -> None:
    """All ranks have the units that one process has, those taken later included."""
    expected = runs.found("alone", case)
    assert any(any(pair) for pair in expected["gauge"].values())
    gauge = runs.found(NUM_RANKS, case)["gauge"]
    assert gauge.keys() == expected["gauge"].keys()
    most = 0
    for name, pair in gauge.items():
        assert np.abs(np.subtract(pair, expected["gauge"][name])).max() <= most, name
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)
        assert found["gauge"] == gauge
        events = [_events(one["explained"]) for one in (found, expected)]
        assert events[0] == events[1]
        assert case.endswith("looks") == any("at RMS" in one for one in events[0])


def _events(explained: str) -> list[str]:
    return [line for line in explained.splitlines() if line.startswith(("New units", "Out of FP8"))]


def _assert_same(
    found: ScaleSnapshot, expected: ScaleSnapshot, *, exact: bool, in_units: bool
) -> None:
    assert (found.step, found.names, found.modules) == (
        expected.step, expected.names, expected.modules)  # fmt: skip
    assert found.inputs == expected.inputs
    layout = found.layout
    sums = [layout.index(one) for one in ("sum", "abs_sum", "square_sum")]
    others = [one for one in range(layout.num_columns) if one not in sums]
    if in_units:
        assert np.array_equal(found.log2_sigma, expected.log2_sigma)
        assert np.array_equal(found.log2_gamma, expected.log2_gamma)
    else:
        # Formats are a question about what is stored.
        formats = tuple(f"{one.name}." for one in layout.formats)
        others = [one for one in others if not layout.columns[one].startswith(formats)]
    for direction in ("forward", "backward"):
        ours, theirs = found.rows(direction), expected.rows(direction)
        assert np.array_equal(ours[:, 0], theirs[:, 0], equal_nan=True)
        if exact:
            assert np.array_equal(ours[:, others], theirs[:, others], equal_nan=True)
        # A sum of signed numbers may be near 0, so its error is relative to the terms.
        size = theirs[:, [sums[1], sums[1], sums[2]]]
        error = np.abs(ours[:, sums] - theirs[:, sums])
        assert np.all((error <= 1e-6 * size) | (np.isnan(error) & np.isnan(size)))


@pytest.mark.parametrize("case", ["matmuls", "rules-v", "monitored", "accumulated", "stops"])
def test_all_ranks_have_report_of_whole_graph(case: str, runs: Runs) -> None:
    """Statistics of the joint batch: of all stages, in the order of the whole graph."""
    expected = runs.found("alone", case)["snapshots"]
    assert [one.step for one in expected] == [0, 1, 2, 3][: 3 if case == "stops" else 4]
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)["snapshots"]
        assert len(found) == len(expected)
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            # Tied weights have other last bits after a step.
            exact = place == 0 or case in {"monitored", "stops"}
            if exact:
                # The first step of one process has no units yet, unless it would be another one.
                in_units = place > 0 or case not in {"matmuls", "accumulated", "rules-v"}
                _assert_same(ours, theirs, exact=True, in_units=in_units)
            else:
                assert ours.names == theirs.names
                for direction in ("forward", "backward"):
                    rms = [one.log2_rms(direction) for one in (ours, theirs)]
                    seen = np.isfinite(rms[1]) & (rms[1] > -20)
                    assert np.allclose(rms[0][seen], rms[1][seen], atol=1e-3)


def test_tied_weight_gradient_is_sum_over_stages(runs: Runs) -> None:
    """In the first step it is exactly the sum over the stages, microbatch by microbatch."""
    first = runs.found(NUM_RANKS, "matmuls")["snapshots"][0]
    owned = [runs.found(NUM_RANKS, "matmuls", rank)["gradients"][0] for rank in range(NUM_RANKS)]
    assert all("byte_embedding.weight" in one for one in owned), "both ranks have it"
    place = first.names.index("byte_embedding.weight")
    count = first.column("numel", "backward")[place]
    assert count == NUM_MICROBATCHES * owned[0]["byte_embedding.weight"].numel()


def test_only_one_rank_writes(runs: Runs) -> None:
    """One rank writes."""
    files = {n: list(one.rglob("events.out*")) for n, one in runs.folders.items()}
    assert {n: len(one) for n, one in files.items()} == {1: 0, NUM_RANKS: 1, "alone": 1}


@pytest.mark.parametrize("case", ["stops", "raises"])
def test_alerts_act_on_all_ranks(case: str, runs: Runs) -> None:
    """An infinity on the rank of the last stage ends the training of both, as on one device."""
    expected = runs.found("alone", case)
    (alert,) = expected["alerts"]
    assert "head.weight" in alert
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, case, rank)
        assert found["alerts"] == expected["alerts"]
        assert found["raised"] == expected["raised"]
        assert (found["raised"] is not None) == (case == "raises")


@pytest.mark.parametrize("case", PARTS)
def test_resume_on_one_device_and_on_two_again(case: str, runs: Runs) -> None:
    """A run that goes on with one device and then with two again is the run on one device."""
    gauge = runs.found(NUM_RANKS, f"{case}-0")["gauge"]
    for part, folder in enumerate((NUM_RANKS, 1, NUM_RANKS)):
        found, expected = (runs.found(one, f"{case}-{part}") for one in (folder, "alone"))
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["gauge"] == gauge, "nothing was measured again"
        ours, theirs = (runs.checkpoint(one, f"{case}-{part}") for one in (folder, "alone"))
        assert ours.keys() == theirs.keys()
        assert ours["state_dict"].keys() == theirs["state_dict"].keys()
        (state,), (other,) = (list(one["callbacks"].values()) for one in (ours, theirs))
        assert _shape(state) == _shape(other)
        for optimizer, another in zip(
            ours["optimizer_states"], theirs["optimizer_states"], strict=True
        ):
            assert optimizer["param_groups"] == another["param_groups"]
            assert optimizer["state"].keys() == another["state"].keys()


def _shape(state: Any) -> Any:
    """Keys and types of a callback's state, without its numbers."""
    if isinstance(state, dict):
        return {key: _shape(value) for key, value in state.items()}
    return type(state)


def test_incompatible_callbacks_are_an_error_on_all_ranks(runs: Runs) -> None:
    """All ranks raise the reason before anything runs, and the module is unchanged."""
    for rank in range(NUM_RANKS):
        found = runs.found(NUM_RANKS, "refused", rank)
        for name in REFUSED:
            assert name in found[name]
            assert found[f"{name} left"] == "[]"
            # The last of them is found out in the middle of a step.
            assert found[f"{name} lost"] == "False"
