"""Loops on two CPU processes: the bits of the run without the callbacks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.launch import results_of_ranks
from tests.helpers import assert_same_bits, same_bits
from tests.loops import zoo
from tests.loops.methods import CAPTURED, METHODS

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]

# All methods and modules where a module is sharded in three ways.
_WHOLE = ("lightning:fsdp", "fabric:tensor")
_OTHERS = (
    *("attach:ddp", "attach:fsdp", "attach:fsdp-bf16", "attach:fsdp1", "attach:tensor"),
    *("fabric:ddp", "fabric:fsdp", "fabric:fsdp1", "lightning:tensor", "lightning:fsdp1"),
)
# These compute the same; Fabric's loop skips synchronizations, and so adds in another order.
_SAME = {
    "lightning:fsdp": "attach:fsdp",
    "lightning:fsdp1": "attach:fsdp1",
    "lightning:tensor": "attach:tensor",
    "fabric:tensor": "attach:tensor",
}


def _cases() -> list[tuple[str, str, str]]:
    methods = [method for method in METHODS if method not in CAPTURED]
    whole = itertools.product(_WHOLE, methods, zoo.ZOO)
    captured = itertools.product(("lightning:fsdp", "lightning:fsdp1"), ["all"], ["Blocks"])
    others = itertools.product(_OTHERS, ("plain", "both", "fp8"), ["Blocks"])
    return [*whole, *captured, *others]


_REFUSED = {
    "lightning:fsdp:u-mup:Blocks": "method=.*with ModelParallelStrategy a rank has a part",
    "lightning:fsdp1:u-mup:Blocks": "method=.*with FSDPInTrainer a rank has a part",
    "lightning:tensor:all:Blocks": "tensor_parallel_size=2: UnitScaleCallback rewrites",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What every rank computed; two processes run all of the cases."""
    runs = [*_REFUSED, *(":".join(case) for case in _cases())]
    module = "tests.distributed.loops_run"
    return results_of_ranks(module, tmp_path_factory.mktemp("loops"), runs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "method", "name"), _cases())
def test_the_same_bits(kind: str, method: str, name: str, results: Results) -> None:
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


@pytest.mark.parametrize("run", _REFUSED)
def test_what_cannot_be_is_refused(run: str, results: Results) -> None:
    for found in results(run):
        assert re.match(_REFUSED[run], found["refused"])


def _tensors(values: Any) -> list[Any]:
    return list(values.values()) if isinstance(values, dict) else values


@pytest.mark.parametrize("kind", (*_WHOLE, *_OTHERS))
def test_all_products_are_in_units(kind: str, results: Results) -> None:
    for found in results(f"{kind}:both:Blocks"):
        num_in_units, num_products = found["products"]
        # Six products forward, backward all but that for the gradient of the batch; accumulated
        # batches are counted one by one in a Trainer.
        assert num_in_units == num_products == (17 if kind.startswith("lightning") else 34)
        products = {name.partition(":")[0].removeprefix("net.") for name in found["gauge"]}
        assert {"first.linear", "blocks.1.down.linear", "matmul"} <= products
        names = {name.removeprefix("net.") for name in found["names"]}
        assert {"first.linear", "matmul"} <= names
        # A distributed tensor is shown where it is one in the eyes of this rank: see is_readable.
        assert ("blocks.0.up.linear" in names) == (not kind.endswith("tensor"))
