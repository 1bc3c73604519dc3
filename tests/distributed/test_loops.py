"""Loops on two CPU processes: the bits of the run without the callbacks."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.helpers import assert_same_bits, same_bits
from tests.loops import zoo

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]
Runs = list[str]

# All modules where a module is sharded in three ways.
_WHOLE = ("lightning:fsdp", "fabric:tensor")
_OTHERS = (
    *("attach:ddp", "attach:fsdp", "attach:fsdp-bf16", "attach:fsdp-checkpointed"),
    *["attach:fsdp-offloaded"],
    *("attach:fsdp1", "attach:tensor"),
    *("fabric:ddp", "fabric:fsdp", "fabric:fsdp1", "lightning:tensor", "lightning:fsdp1"),
    *(["accelerate:ddp"] if find_spec("accelerate") else []),
    *(["hugging_face:ddp"] if find_spec("transformers") else []),
)
_TWO_BY_TWO = ("attach:hsdp", "attach:fsdp-tensor", "lightning:fsdp-tensor")
# These compute the same; Fabric's loop skips synchronizations, and so adds in another order.
_SAME = {
    "lightning:fsdp": "attach:fsdp",
    "lightning:fsdp1": "attach:fsdp1",
    "lightning:tensor": "attach:tensor",
    "fabric:tensor": "attach:tensor",
}


# The first tier has each loop, and each way to distribute a module.
_QUICK = {
    *("attach:ddp", "attach:fsdp", "attach:fsdp1", "attach:tensor", "fabric:ddp"),
    *(*_WHOLE, "accelerate:ddp", "hugging_face:ddp"),
}
_KINDS = [
    pytest.param(kind, marks=[] if kind in _QUICK else [pytest.mark.slow])
    for kind in (*_WHOLE, *_OTHERS)
]


def _cases() -> list[tuple[str, str, str]]:
    whole = itertools.product(_WHOLE, ("plain", "both", "fp8"), zoo.ZOO)
    # Either callback by itself is tried on all modules in tests/loops/test_matrix.py.
    alone = itertools.product(_WHOLE, ("lossless",), ["Blocks"])
    monitored = itertools.product(
        ("attach:ddp", "attach:fsdp", "attach:tensor", *_WHOLE), ["monitor"], ["Blocks"]
    )
    others = itertools.product(_OTHERS, ("plain", "both", "fp8"), ["Blocks"])
    return [*whole, *alone, *monitored, *others]


_REFUSED = {
    "lightning:fsdp1:u-mup:Blocks": "method=.*with FSDPInTrainer each rank has only a part",
    "lightning:tensor:remat:Blocks": "budget=0.8 with tensor_parallel_size=2: captured steps",
    "lightning:fsdp1:remat:Blocks": "budget=0.8: .*with FSDPInTrainer each rank has only a part",
}


def _runs_of(test: str, kind: str = "", method: str = "", name: str = "", run: str = "") -> Runs:
    """The runs that a test reads."""
    if test == "test_two_by_two_mesh_is_bit_identical":
        return []
    if test == "test_unsupported_settings_are_an_error":
        return [run]
    if test == "test_ranks_may_have_different_numbers_of_batches":
        return [f"join:ddp:{one}:Blocks" for one in ("plain", "both")]
    kinds = [kind, *([_SAME[kind]] if kind in _SAME else [])]
    if test == "test_distributed_loop_is_bit_identical":
        others = [one for one in kinds[1:] if (one, method, name) in _cases()]
        return [f"{kind}:plain:{name}", *(f"{one}:{method}:{name}" for one in (kind, *others))]
    if test == "test_ranks_communicate_only_at_sampled_steps":
        return [f"{kind}:{one}:Blocks" for one in ("plain", "monitor")]
    whole = ["attach:whole:both:Blocks"] if kind.endswith("tensor") else []
    return [*whole, *(f"{one}:both:Blocks" for one in kinds)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank. Two processes run all cases that the tests read."""
    runs = runs_of_collected(request, _runs_of)
    module = "tests.distributed.loops_run"
    return results_of_ranks(module, tmp_path_factory.mktemp("loops"), runs)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "method", "name"), _cases())
def test_distributed_loop_is_bit_identical(
    kind: str, method: str, name: str, results: Results
) -> None:
    plain, found = results(f"{kind}:plain:{name}"), results(f"{kind}:{method}:{name}")
    for without, ours in zip(plain, found, strict=True):
        for part in ("losses", "weights"):
            if method == "fp8":
                assert not all(map(same_bits, *map(_tensors, (ours[part], without[part]))))
            else:
                assert_same_bits(ours[part], without[part])
    if kind in _SAME and (_SAME[kind], method, name) in _cases():
        for ours, other in zip(found, results(f"{_SAME[kind]}:{method}:{name}"), strict=True):
            assert_same_bits([*_tensors(ours["losses"])], [*_tensors(other["losses"])])
            assert_same_bits([*_tensors(ours["weights"])], [*_tensors(other["weights"])])
    # The ranks have seen other batches, and have one set of units.
    if not kind.endswith("tensor"):
        assert not torch.equal(plain[0]["losses"][0], plain[1]["losses"][0])
    for key in ("gauge", "names"):
        assert found[0].get(key) == found[1].get(key)


@pytest.fixture(scope="module")
def results_of_four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Results of each of four processes, two by two."""
    runs = runs_of_collected(
        request,
        lambda test, kind="", **_: (
            [f"{kind}:{method}:Blocks" for method in ("plain", "both")]
            if test == "test_two_by_two_mesh_is_bit_identical"
            else []
        ),
    )
    module, folder = "tests.distributed.loops_run", tmp_path_factory.mktemp("two_by_two")
    return results_of_ranks(module, folder, runs, num_ranks=4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", _TWO_BY_TWO)
def test_two_by_two_mesh_is_bit_identical(kind: str, results_of_four: Results) -> None:
    plain, found = (results_of_four(f"{kind}:{method}:Blocks") for method in ("plain", "both"))
    for without, ours in zip(plain, found, strict=True):
        for part in ("losses", "weights"):
            assert_same_bits(ours[part], without[part])
        num_in_units, num_matmuls = ours["matmuls"]
        assert num_in_units == num_matmuls > 0
        assert (ours["gauge"], ours["names"]) == (found[0]["gauge"], found[0]["names"])
        for way in ("forward", "backward"):
            assert_same_bits(ours["rms"][way], found[0]["rms"][way])


@pytest.mark.slow
@pytest.mark.parametrize("run", _REFUSED)
def test_unsupported_settings_are_an_error(run: str, results: Results) -> None:
    for found in results(run):
        assert re.match(_REFUSED[run], found["refused"])


def _tensors(values: Any) -> list[Any]:
    return list(values.values()) if isinstance(values, dict) else values


@pytest.mark.parametrize("kind", _KINDS)
def test_all_matmuls_are_scaled(kind: str, results: Results) -> None:
    for found in results(f"{kind}:both:Blocks"):
        num_in_units, num_matmuls = found["matmuls"]
        # Six matmuls forward, backward all but that for the gradient of the batch; accumulated
        # batches are counted one by one in a Trainer.
        expected = 17 if kind.startswith("lightning") else 34
        if kind.endswith("checkpointed"):
            expected += 4  # one of both blocks runs again, twice
        assert num_in_units == num_matmuls == expected
        matmuls = {name.partition(":")[0].removeprefix("net.") for name in found["gauge"]}
        assert {"first.linear", "blocks.1.down.linear", "matmul"} <= matmuls
        names = {name.removeprefix("net.") for name in found["names"]}
        assert {"first.linear", "matmul"} <= names
        # Those that are distributed, too, and what torch calls a part of them is their own.
        assert {"blocks.0.up.linear", "blocks.1.silu"} <= names
        assert not any("FromTorch" in name for name in names)


@pytest.mark.parametrize("kind", _KINDS)
def test_statistics_cover_tensors_of_all_ranks(kind: str, results: Results) -> None:
    first, second = (found["rms"] for found in results(f"{kind}:both:Blocks"))
    for way in ("forward", "backward"):
        assert_same_bits(first[way], second[way])
    if kind in _SAME:
        (attached, _) = (found["rms"] for found in results(f"{_SAME[kind]}:both:Blocks"))
        for way in ("forward", "backward"):
            inner = {name.removeprefix("net."): value for name, value in first[way].items()}
            shared = [name for name in attached[way] if not name.startswith("input.")]
            assert_same_bits(
                [inner[name] for name in shared], [attached[way][name] for name in shared]
            )
    if kind.endswith("tensor"):  # what each rank has computed is a term of it
        sums = [f"blocks.{block}.down.linear" for block in (0, 1)]
        whole = results("attach:whole:both:Blocks")[0]["rms"]["forward"]
        made = {name.removeprefix("net."): rms for name, rms in first["forward"].items()}
        for name in sums:
            torch.testing.assert_close(made[name], whole[name], rtol=0.0, atol=1e-3)
    if not kind.endswith("fsdp1"):  # where weights are parts of one tensor
        gradients = {name.removeprefix("net."): rms for name, rms in first["backward"].items()}
        assert all(
            gradients[f"blocks.{block}.{layer}.{name}"].isfinite()
            for block, layer, name in itertools.product((0, 1), ("up", "down"), ("weight", "bias"))
        )


@pytest.mark.parametrize("kind", ["attach:ddp", "attach:fsdp", "attach:tensor", "lightning:fsdp"])
def test_ranks_communicate_only_at_sampled_steps(kind: str, results: Results) -> None:
    """Steps 0, 1 and 2: a hash of the names, and the sum and the extremes of all rows."""
    runs = (results(f"{kind}:{method}:Blocks") for method in ("plain", "monitor"))
    for plain, found in zip(*runs, strict=True):
        more = Counter(found["collectives"]) - Counter(plain["collectives"])
        assert more == {"all_reduce": 9}


def test_ranks_may_have_different_numbers_of_batches(results: Results) -> None:
    """In torch's Join context, ranks without a batch wait for no others."""
    plain, found = (results(f"join:ddp:{method}:Blocks") for method in ("plain", "both"))
    assert [len(one["losses"]) for one in plain] == [6, 2]
    for without, ours in zip(plain, found, strict=True):
        for part in ("losses", "weights"):
            assert_same_bits(ours[part], without[part])
        assert ours["matmuls"] == (34, 34)
