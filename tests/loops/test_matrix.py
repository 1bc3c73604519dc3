"""Every training loop with every method on every module keeps the promised bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_unitscale.transforms import unit_scale
from tests.helpers import assert_same_bits, same_bits
from tests.loops import zoo
from tests.loops.every_loop import LOOPS, TRAINERS, Outcome
from tests.loops.methods import CHANGING, METHODS

Results = Callable[[str, str, str], Outcome]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger"),
]


def train(loop: str, method: str, name: str, folder: Path) -> Outcome:
    module, callbacks = zoo.new(name), METHODS[method]()
    if method == "u-mup" and loop not in TRAINERS:
        module, callbacks = unit_scale(module), []
    return LOOPS[loop](module, zoo.batches(name, 8), callbacks, folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the outcome of a method in a loop, trained once for each model."""
    known: dict[tuple[str, str, str], Outcome] = {}

    def of(loop: str, method: str, name: str) -> Outcome:
        key = loop, method, name
        if key not in known:
            known[key] = train(*key, tmp_path_factory.mktemp(loop))
        return known[key]

    return of


def _cases() -> Iterator[Any]:
    methods = [method for method in METHODS if method != "captured"]
    names = [name for name in zoo.ZOO if name != "Blocks"]
    for loop, method, name in itertools.product(LOOPS, methods, names):
        # The first tier has each method and each module in every loop.
        is_quick = name == "Tied" or method == "both"
        # The two Trainers are one code under two names.
        if loop != "pytorch_lightning" or name == "Tied":
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(loop, method, name, marks=marks)


# A metric has other values at each step, of which Dynamo makes constants by rules.
@pytest.mark.filterwarnings("ignore:.*captured again in:UserWarning")
@pytest.mark.parametrize(("loop", "method", "name"), list(_cases()))
def test_every_loop_is_bit_identical(
    loop: str, method: str, name: str, expected: Results, tmp_path: Path
) -> None:
    found = train(loop, method, name, tmp_path)
    if method not in CHANGING:
        assert_same_bits(found, expected("plain", "plain", name))
        return
    # Rules know the number of accumulated batches only in a Trainer. Elsewhere gradients differ by
    # powers of two, which matter relative to AdamW's eps.
    is_rules_in_trainer = method == "u-mup" and loop in TRAINERS
    assert_same_bits(found, expected(TRAINERS[0] if is_rules_in_trainer else "plain", method, name))
    assert not same_bits(found[0][-1], expected("plain", "plain", name)[0][-1])
    assert_same_bits(found[0][:2], expected("plain", method, name)[0][:2])


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop not in TRAINERS])
def test_rules_are_an_error_in_other_loops(loop: str, tmp_path: Path) -> None:
    callbacks = METHODS["u-mup"]()
    with pytest.raises(ValueError, match=r"method=.*u-mup.*Use lightning_unitscale\.transforms"):
        LOOPS[loop](zoo.new("Tied"), zoo.batches("Tied", 2), callbacks, tmp_path)
