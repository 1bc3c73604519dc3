"""Rules on CPU processes: FSDP2 trains the model of DDP, tensor parallelism that of a rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.helpers import assert_same_bits

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]
Results = Callable[[str], list[dict[str, Any]]]

# A run in parts, and the one of whole models that it must be.
_PAIRS = {
    "fsdp:Blocks:plain": "ddp:Blocks:plain",
    "fsdp:Transformer:plain": "ddp:Transformer:plain",
    "fsdp:Tied:plain": "ddp:Tied:plain",
    "fsdp:Odd:plain": "ddp:Odd:plain",
    "fsdp:Blocks:manual": "ddp:Blocks:manual",
    "fsdp-checkpointed:Blocks:plain": "ddp-checkpointed:Blocks:plain",
    "tensor:Blocks:unclipped": "alone:Blocks:unclipped",
    "tensor:Transformer:unclipped": "alone:Transformer:unclipped",
    "fsdp-tensor:Blocks:unclipped": "ddp:Blocks:unclipped",
}
_BF16 = "fsdp-bf16:Blocks:plain"
_SAVED = (
    *("fsdp:Blocks:distributed", "fsdp:Blocks:file", "tensor:Blocks:distributed"),
    "fsdp-tensor:Blocks:distributed",
)
# How tensors get from the layout of a module to that of the next one: operations of the graph.
_LAYOUTS = {"from_local", "redistribute", "to_local"}
_REFUSED = {
    "fsdp:Metric:plain": (
        r"Module\.validation_step cannot be captured in one graph, as rules with "
        r"ModelParallelStrategy ask: .*zoo\.py:\d+ breaks the graph\. .*`Tensor\.item\(\)`"
    ),
    "fsdp:Blocks:compiled": r"compile=True with method=.*Expected compile=False",
    "fsdp:Blocks:budget": r"method=.*'u-mup'.* with RematCallback: .*Expected only one",
    "tensor:Blocks:compiled": r"compile=True with tensor_parallel_size=2: captured steps would",
    "tensor:Blocks:budget": r"method=.*'u-mup'.* with RematCallback: .*Expected only one",
}


def _runs_of(test: str, run: str = "") -> list[str]:
    """The runs that a test reads."""
    if test == "test_mixed_precision_is_close_to_fp32":
        return [_BF16, "ddp:Blocks:plain"]
    if test == "test_blocks_are_gathered_one_at_a_time":
        return ["fsdp:Blocks:plain"]
    return [run, _PAIRS[run]] if test == "test_sharded_model_matches_ddp" else [run]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank. Two processes run most cases. Four run those sharded in two ways."""
    runs = runs_of_collected(request, _runs_of)
    of_four = [run for run in runs if _is_in_two_ways(run)]
    of_two = [run for run in runs if run not in of_four]
    module, folder = "tests.distributed.rules_sharded_run", tmp_path_factory.mktemp("sharded")
    by_two = results_of_ranks(module, folder, of_two)
    by_four = results_of_ranks(module, folder, of_four, num_ranks=4)
    return lambda run: (by_four if _is_in_two_ways(run) else by_two)(run)


def _is_in_two_ways(run: str) -> bool:
    return run.startswith("fsdp-tensor")


@pytest.mark.slow
@pytest.mark.parametrize("run", _PAIRS)
def test_sharded_model_matches_ddp(run: str, results: Results) -> None:
    of_ranks, expected_of_ranks = results(run), results(_PAIRS[run])
    num_parts = len(of_ranks) // len(expected_of_ranks)
    for rank, found in enumerate(of_ranks):
        expected = expected_of_ranks[rank // num_parts]
        # Each operation's factors and each parameter's role, sizes and initial scale.
        decisions = found["plan"]["decisions"]
        layouts = [name for name, made in decisions.items() if made["op"] in _LAYOUTS]
        assert bool(layouts) == ("tensor" in run)
        assert {decisions.pop(name)["output"] for name in layouts} <= {1.0}
        assert found["plan"] == expected["plan"]
        assert len(decisions) > 5
        assert _forward_units(found) == _forward_units(expected)
        # Of distributed tensors, backward matmuls are named by their autograd nodes.
        assert found["gauge"] == expected["gauge"] or "tensor" in run
        found["rms"], found["names"] = _without(_LAYOUTS, found)
        assert found["names"] == expected["names"]
        for part in ("losses", "val_losses", "rms"):
            assert found[part]
            torch.testing.assert_close(
                found[part], expected[part], rtol=1e-10, atol=1e-10, equal_nan=True
            )
        torch.testing.assert_close(_weights(found), _weights(expected), rtol=0.0, atol=1e-13)


def _forward_units(found: dict[str, Any]) -> dict[str, Any]:
    return {name: pair for name, pair in found["gauge"].items() if ":" in name and "@" not in name}


def _without(operations: set[str], found: dict[str, Any]) -> tuple[list[torch.Tensor], list[str]]:
    """The monitor's rows and names but for those of some operations."""
    kept = [i for i, name in enumerate(found["names"]) if name.split(".")[-1] not in operations]
    return [rows[kept] for rows in found["rms"]], [found["names"][i] for i in kept]


def _weights(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All but the bias of an attention's keys: its gradient is rounding, which Adam makes large."""
    weights = dict(found["weights"])
    if (bias := weights.pop("net.attention.in_proj_bias", None)) is not None:
        queries, _, values = bias.chunk(3)
        weights |= {"queries": queries, "values": values}
    return weights


@pytest.mark.parametrize("run", _PAIRS)
def test_ranks_have_same_model_and_different_data(run: str, results: Results) -> None:
    first, *_, last = results(run)
    assert_same_bits(first["weights"], last["weights"])
    assert first["plan"] == last["plan"]
    # Ranks that have a part each of a tensor have the same batches.
    assert torch.equal(first["losses"][0], last["losses"][0]) == run.startswith("tensor")


def test_blocks_are_gathered_one_at_a_time(results: Results) -> None:
    for found in results("fsdp:Blocks:plain"):
        for path in ("net", "net.blocks.0", "net.blocks.1"):
            assert f"{path}: gathered once" in found["explanation"]


def test_mixed_precision_is_close_to_fp32(results: Results) -> None:
    for found, expected in zip(results(_BF16), results("ddp:Blocks:plain"), strict=True):
        losses = [loss.double() for loss in found["losses"]]
        torch.testing.assert_close(losses, expected["losses"], rtol=0.02, atol=0.02)
        casts = [
            name
            for name in found["plan"]["decisions"]
            if name.startswith("training_step:") and name.endswith(".to")
        ]
        assert len(casts) == 3  # the root's input, and that of both blocks


@pytest.mark.parametrize("run", _SAVED)
def test_resumed_run_is_bit_identical(run: str, results: Results) -> None:
    for found in results(run):
        assert found["is_folder"] == run.endswith("distributed")
        resumed = found["resumed"]
        count = len(resumed["losses"])
        assert 0 < count < len(found["losses"])
        assert_same_bits(resumed["losses"], found["losses"][-count:])
        for part in ("weights", "rms"):
            assert_same_bits(resumed[part], found[part])
        for part in ("plan", "gauge"):
            assert resumed[part] == found[part]
        for refused in found["refused"]:  # that of all state, and that of the weights alone
            assert re.match("method='lossless': the checkpoint was trained", refused)


@pytest.mark.parametrize("run", _REFUSED)
def test_unsupported_settings_are_an_error(run: str, results: Results) -> None:
    for found in results(run):
        assert re.match(_REFUSED[run], found["refused"])
