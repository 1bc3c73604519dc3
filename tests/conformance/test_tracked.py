"""The matrix with ``track_scales``, with and without units: same bits, metrics of an oracle."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_unitscale.transforms import Metrics, track_scales
from tests.conformance.cases import Case
from tests.conformance.harness import differences, plain, train
from tests.conformance.oracle import Oracle
from tests.conformance.test_conformance import CASES, INEXACT, THEMES
from tests.monitor.test_metrics import assert_close
from tests.monitor.tracked import metrics

METHODS = ("track_scales", "units, tracked", "tracked, in units")
_TINY = "elements of a gradient below 1e-37 may differ by a subnormal number"
# Of a copy, and of units as the example has them.
DIFFERENT = {
    "neighbors-an_exported_block": "its copy lacks attributes",
    "autograd-parameter_hooks": "a hook of the copy notes what it sees in the original",
}
DIFFERENT_IN_UNITS = {
    **INEXACT,
    "numbers-tiny_losses": _TINY,
    "numbers-bfloat16_of_tiny_numbers": _TINY,
}


def _trainings() -> list[Any]:
    params = []
    for index, case in enumerate(CASES):
        method = METHODS[index % 3]
        reason = DIFFERENT.get(case.name, "")
        if method != METHODS[0]:
            reason = reason or DIFFERENT_IN_UNITS.get(case.name, "")
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        if index % 10:  # each method in turn, as 10 and 3 have no common divisor
            marks.append(pytest.mark.slow)
        params.append(pytest.param(case, method, id=f"{case.name}-{method}", marks=marks))
    return params


@pytest.mark.parametrize(("case", "method"), _trainings())
def test_tracked_training_is_bit_identical(case: Case, method: str) -> None:
    found = differences(train(case, method), plain(case, "plain loop"))
    assert not found, "\n".join(found[:20])


# Where hooks on the plain module see something else.
OTHER = {
    "autograd-tensor_hooks": "its own hooks change gradients after those of the oracle",
    "autograd-module_hooks": "the same",
    "autograd-parameter_hooks": "the same, and the oracle's copy has none",
    "autograd-saved_tensors_are_rounded": "an input's gradient is of what was not rounded",
    "control_flow-random_numbers_of_all_kinds": "the oracle draws others",
    "derivatives-third_derivative": "hooks see a gradient that is differentiated",
    "derivatives-backward_within_the_step": "an input has the sum of two backward passes",
    "state-optimizer_in_the_step": "a gradient is put there",
    "writes-gradient_is_written_by_the_step": "the same",
}
# Inputs whose gradient comes through what is not looked into, and is left out.
UNKNOWN = {
    "control_flow-scan_of_torch",
    "derivatives-inner_steps_of_meta_learning",
    "functorch-forward_mode_duals",
    "functorch-gradients_per_sample_of_a_convolution",
    "functorch-jacobian_forward",
    "functorch-jacobian_of_autograd",
    "functorch-jvp_and_vjp",
    "layers-lstm",
    "layers-lstm_cell",
    "layers-lstm_of_one_sequence",
}


def _compared(case: Case) -> int:
    """The number of tensors with the oracle's statistics; all known tensors must have them."""
    torch.manual_seed(5)
    module, batch = case.module(), case.batches()[0]
    try:
        torch.manual_seed(6)
        oracle = Oracle(module, batch, case.loss)
    except Exception:  # it cannot be hooked, or its input cannot ask for a gradient
        return 0
    tracked = track_scales(module)
    torch.manual_seed(6)
    case.loss(tracked(*batch)).backward()
    found = metrics(tracked)
    is_reentrant = case.name.endswith("_reentrant")
    compared = 0
    for name, (value, gradient) in oracle.found.items():
        one = found.get(name)
        # Not read, or where nothing is seen; of a checkpoint the oracle sees no gradient, and
        # the gradient of a parameter comes in several parts.
        if one is None or value is None or (is_reentrant and gradient is None):
            continue
        assert_close(one.fwd, value)
        if not (is_reentrant and name in dict(module.named_parameters())):
            _assert_same(one.bwd, gradient)
        compared += 1
    given = [one for name, one in found.items() if name.startswith("input.") and one is not None]
    if len(given) == len(oracle.inputs) == 1:
        if case.name in UNKNOWN:
            assert given[0].bwd is None
        else:
            _assert_same(given[0].bwd, oracle.inputs[0])
            compared += 1
    return compared


def _assert_same(found: Metrics.Data | None, wanted: Metrics.Data | None) -> None:
    assert (found is None) == (wanted is None)
    if wanted is not None:
        assert_close(found, wanted)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("theme", "least"),
    [("autograd", 100), ("control_flow", 120), ("derivatives", 30), ("functorch", 50),
     ("layers", 400), ("state", 90), ("views", 100), ("writes", 120)],
)  # fmt: skip
def test_tracked_metrics_match_plain_step(theme: str, least: int) -> None:
    modules: list[ModuleType] = [one for one in THEMES if one.__name__.endswith(f"zoo_{theme}")]
    compared = 0
    for case in (case for module in modules for case in module.CASES):
        if case.name in OTHER:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                compared += _compared(case)
            except Exception as error:
                raise AssertionError(case.name) from error
    assert compared >= least, compared
