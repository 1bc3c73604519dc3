"""A memory budget under FSDP2 on two CPU processes: kept on each rank, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.distributed.remat_fsdp_run import SETTINGS
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]
Results = Callable[[str], list[dict[str, Any]]]
SHARES = {setting: "0.8" if setting == "mixed" else "0.7" for setting in SETTINGS}
PLANNED = [
    *("plain:1.0", "plain:0.0", "plain:bytes", "plain:min_cut"),
    *(f"{setting}:{share}" for setting, share in SHARES.items()),
]
# The memory of oneDNN's 16-bit matmuls is known only roughly.
TOLERANCES = {"mixed": 1.05}
REFUSED = {
    "compile": "compile=True: with ModelParallelStrategy",
    "profiled": "Expected a Trainer without PyTorchProfiler",
}
# Sizes of the two weights of a block, in either order: nothing else in the step has them.
WEIGHT = (32, 136)


# Cases that tests without parameters read. A budget in bytes is a share of an earlier prediction.
_READ = {
    "test_matmuls_in_planned_graphs_are_scaled": ["plain:none", "plain:units"],
    "test_relative_budget_spans_smallest_to_default_peak": [
        *("plain:0.0", "plain:0.7", "plain:1.0")
    ],
    "test_budget_in_bytes_is_kept_by_all_ranks": ["plain:1.0", "plain:bytes"],
    "test_gathered_weights_are_freed_after_forward": [
        *("plain:1.0", "plain:0.7", "plain:bytes", "accumulated:0.7", "kept:0.7")
    ],
    "test_budget_below_minimum_of_one_rank_is_an_error_on_all": [
        *("ranks:0.7", "ranks:too little for one")
    ],
}


def _runs_of(
    test: str, run: str = "", setting: str = "", share: str = "", name: str = ""
) -> list[str]:
    """The runs that a test reads."""
    if test in _READ:
        return _READ[test]
    if name:
        return [f"plain:{name}"]
    if setting:
        return [f"{setting}:none", f"{setting}:{share}"]
    before = ["plain:1.0"] if run == "plain:bytes" else []
    return [f"{run.split(':')[0]}:none", *before, run]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank. Two processes run all cases that the tests read."""
    folder = tmp_path_factory.mktemp("fsdp")
    runs = sorted(runs_of_collected(request, _runs_of), key=lambda run: run == "plain:bytes")
    return results_of_ranks("tests.distributed.remat_fsdp_run", folder, runs)


@pytest.mark.slow
@pytest.mark.parametrize("run", PLANNED)
def test_budget_is_bit_identical(run: str, results: Results) -> None:
    plain = results(f"{run.split(':')[0]}:none")
    planned = results(run)
    for without, ours in zip(plain, planned, strict=True):
        assert_same_bits(ours["losses"], without["losses"])
        assert_same_bits(ours["weights"], without["weights"])
        assert ours["num_planned"] == 2


def test_matmuls_in_planned_graphs_are_scaled(results: Results) -> None:
    for without, ours in zip(results("plain:none"), results("plain:units"), strict=True):
        assert_same_bits(ours["losses"], without["losses"])
        assert_same_bits(ours["weights"], without["weights"])
        assert ours["scaled"] == 1.0
        assert ours["measured"] == pytest.approx(ours["predicted"], rel=1e-4)


@pytest.mark.parametrize(("setting", "share"), SHARES.items())
def test_relative_budget_is_kept_by_all_ranks(setting: str, share: str, results: Results) -> None:
    for without, ours in zip(
        results(f"{setting}:none"), results(f"{setting}:{share}"), strict=True
    ):
        assert ours["peak"] < TOLERANCES.get(setting, 1) * without["peak"]


def test_relative_budget_spans_smallest_to_default_peak(results: Results) -> None:
    named = ("plain:0.0", "plain:0.7", "plain:1.0")
    for ranks in zip(*map(results, named), strict=True):
        least, some, whole = (rank["predicted"] for rank in ranks)
        assert least < some <= least + 0.7 * (whole - least)


def test_budget_in_bytes_is_kept_by_all_ranks(results: Results) -> None:
    # The runs take 0.8 of what the first of them predicts.
    budget = int(0.8 * results("plain:1.0")[0]["predicted"])
    assert all(ours["peak"] <= budget for ours in results("plain:bytes"))


@pytest.mark.parametrize("run", [run for run in PLANNED if not run.startswith("sizes")])
def test_predicted_peak_matches_measured_peak(run: str, results: Results) -> None:
    for ours in results(run):
        # Of an accumulated step the last batch comes after gradients that were there before.
        assert ours["measured"] == pytest.approx(ours["predicted"], rel=1e-4)
        assert ours["peak"] == pytest.approx(ours["predicted"], rel=3e-3)


def test_gathered_weights_are_freed_after_forward(results: Results) -> None:
    for run in ("plain:1.0", "plain:0.7", "plain:bytes", "accumulated:0.7"):
        for ours in results(run):
            sizes = [num_bytes for shape, num_bytes in ours["saved"] if shape == WEIGHT]
            # They are saved, or their transposes, and their memory is free until the backward pass.
            assert len(sizes) == 6
            assert set(sizes) == {0}
            assert not ours["alive"]  # what graphs were captured with is not kept either
    kept = results("kept:0.7")[0]["saved"]
    assert all(num_bytes for shape, num_bytes in kept if shape == WEIGHT)


def test_budget_below_minimum_of_one_rank_is_an_error_on_all(results: Results) -> None:
    first, second = results("ranks:too little for one")
    assert first["error"] == second["error"]
    floor = int(first["error"].split("achievable peak is")[1].split("(")[1].split()[0])
    assert "of a step that was measured" in first["error"]
    assert floor <= results("ranks:0.7")[1]["peak"] < results("ranks:0.7")[0]["peak"]


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_an_error(name: str, results: Results) -> None:
    assert REFUSED[name] in results(f"plain:{name}")[0]["error"]
