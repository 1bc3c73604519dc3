"""Every conformance module trains bit-identically with and without the package."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch

from tests.conformance import (
    zoo_autograd,
    zoo_control_flow,
    zoo_derivatives,
    zoo_functorch,
    zoo_layers,
    zoo_neighbors,
    zoo_numbers,
    zoo_state,
    zoo_subclasses,
    zoo_types,
    zoo_views,
    zoo_writes,
)
from tests.conformance.cases import Case
from tests.conformance.harness import Mixtures, differences, loss_on, plain, train

THEMES = (
    zoo_autograd,
    zoo_control_flow,
    zoo_derivatives,
    zoo_functorch,
    zoo_layers,
    zoo_neighbors,
    zoo_numbers,
    zoo_state,
    zoo_subclasses,
    zoo_types,
    zoo_views,
    zoo_writes,
)
CASES: list[Case] = [case for theme in THEMES for case in theme.CASES]
# The first tier has every fifth case of each theme.
QUICK = {case.name for theme in THEMES for case in theme.CASES[::5]}
ALONE = ("lossless", "monitor")

_LATER = (
    "numbers are checked when units are measured, at steps 8, 16, 32, 64 and every 128th: "
    "between them, "
)
# Differences that a user sees in these cases, by name, only with units.
INEXACT = {
    "numbers-attention_that_saturates_later": _LATER
    + "elements of a gradient below 1e-38 may differ by a subnormal number",
    "numbers-shrinking_to_nothing": _LATER
    + "a batch 1e50 times smaller than the measured one may become zero",
    "numbers-half_near_its_largest": "FP16 has no units in which subnormal numbers keep their "
    "bits: a batch 100 times smaller than the measured one may lose a gradient's last bits",
}


def _trainings() -> list[Any]:
    """Cases with both callbacks together, and in the second tier with one of them, in turn."""
    params = []
    for index, case in enumerate(CASES):
        for method in ("both", ALONE[index % len(ALONE)]):
            is_inexact = case.name in INEXACT and method != "monitor"
            mark = pytest.mark.xfail(reason=INEXACT.get(case.name, ""), strict=True)
            marks = [mark] if is_inexact else []
            if method != "both" or case.name not in QUICK:
                marks.append(pytest.mark.slow)
            params.append(pytest.param(case, method, id=f"{case.name}-{method}", marks=marks))
    return params


def test_there_are_enough_cases() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 220


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if case.name in QUICK else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_case_has_gradients_and_finite_losses(case: Case) -> None:
    """A case is reproducible if it has the bits of another training, which other tests check."""
    expected = plain(case)
    gradients = [v for name, v in expected.values.items() if "gradient of" in name]
    assert any(gradient is not None and gradient.any() for gradient in gradients)
    if case.is_finite:
        losses = [v for name, v in expected.values.items() if name.endswith(": loss")]
        assert all(torch.isfinite(value).all() for value in losses)


@pytest.mark.slow
def test_cases_do_not_mix_devices() -> None:
    """A case that creates a tensor on the CPU instead fails on torch's meta device."""
    runs, mixed = 0, {}
    for case in CASES:
        # Numbers are not there to be read, and some operators are not either.
        with suppress(AssertionError, RuntimeError, TypeError, ValueError), Mixtures() as mixtures:
            loss_on(case, "meta").backward()
            runs += 1
        if mixtures.operators:
            mixed[case.name] = mixtures.operators
    assert mixed == {}
    assert runs >= 390


@pytest.mark.parametrize(("case", "method"), _trainings())
def test_training_is_bit_identical(case: Case, method: str) -> None:
    record = train(case, method)
    found = differences(record, plain(case))
    assert not found, "\n".join(found[:20])
    if method != "monitor":
        assert record.coverage.num_matmuls > 0
