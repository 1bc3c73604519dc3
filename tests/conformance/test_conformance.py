"""Every odd module trains bit for bit as it does without the package."""

from __future__ import annotations

import pytest
import torch

from tests.conformance import (
    zoo_autograd,
    zoo_control_flow,
    zoo_derivatives,
    zoo_functorch,
    zoo_layers,
    zoo_neighbours,
    zoo_numbers,
    zoo_state,
    zoo_subclasses,
    zoo_types,
    zoo_views,
    zoo_writes,
)
from tests.conformance.cases import Case
from tests.conformance.harness import CALLBACKS, differences, plain, train

THEMES = (
    zoo_autograd,
    zoo_control_flow,
    zoo_derivatives,
    zoo_functorch,
    zoo_layers,
    zoo_neighbours,
    zoo_numbers,
    zoo_state,
    zoo_subclasses,
    zoo_types,
    zoo_views,
    zoo_writes,
)
CASES: list[Case] = [case for theme in THEMES for case in theme.CASES]
METHODS = [name for name in CALLBACKS if name != "plain"]


def test_there_are_enough_cases() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 220


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_repeats_itself(case: Case) -> None:
    expected = plain(case)
    assert not differences(train(case, "plain"), expected)
    gradients = [v for name, v in expected.values.items() if "gradient of" in name]
    assert any(gradient is not None and gradient.any() for gradient in gradients)
    if case.is_finite:
        losses = [v for name, v in expected.values.items() if name.endswith(": loss")]
        assert all(torch.isfinite(value).all() for value in losses)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_training(case: Case, method: str) -> None:
    found = differences(train(case, method), plain(case))
    assert not found, "\n".join(found[:20])
