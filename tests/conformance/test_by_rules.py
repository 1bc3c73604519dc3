"""The conformance matrix under rules: units change no bit, and failed captures raise errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from lightning_unitscale import RematCallback
from lightning_unitscale.capture.module_steps import matmuls_of
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.transforms import unit_scale
from tests.conformance.cases import Case
from tests.conformance.harness import CALLBACKS, TRANSFORMS, differences, plain, train
from tests.conformance.test_conformance import CASES
from tests.helpers import IS_TORCH_2_11, IS_TORCH_2_14, assert_same_bits, sampled

TRANSFORMS["rules"] = lambda module, *batch: unit_scale(module)
TRANSFORMS["rules alone"] = lambda module, *batch: _without_units(unit_scale(module))


def _without_units(scaled: nn.Module) -> nn.Module:
    matmuls_of(scaled).detach()
    return scaled


CALLBACKS["remat"] = lambda: [RematCallback(1.0)]
_IN_FORWARD = "Step.forward cannot be captured" if IS_TORCH_2_11 else ""  # torch says less there
# Dynamo fails on them, and plain code between graphs would be another model.
REFUSED = {
    "autograd-layers_thaw": "requires_grad_",
    "autograd-straight_through": _IN_FORWARD or "Expected fwd_out to be a BaseListVariable",
    "functorch-linearized": "ran other graphs",
    "subclasses-a_counted_batch": "a Counted",
    "subclasses-cached_parametrizations": "registers a.parametrizations.weight.original",
}
_UNTIL_2_13 = {
    "control_flow-exceptions_are_caught": "must have same reduction dim",
    "neighbors-a_layer_that_fails_and_goes_on": "must have same reduction dim",
    "subclasses-a_named_batch_is_written": _IN_FORWARD or "Source must be None",
}
if not IS_TORCH_2_14:
    REFUSED.update(_UNTIL_2_13)
# torch refuses each of them somewhere else than other modules.
ODD = {
    *REFUSED,
    *_UNTIL_2_13,
    "autograd-inference_tensors_are_cloned",
    "functorch-functionalized",
    "neighbors-a_scripted_block",
    "neighbors-a_traced_block",
    "subclasses-a_wrapped_batch_and_plain_layers",
    "types-nested_rows",
}


def _cases() -> list[Any]:
    params = []
    for index, case in enumerate(CASES):
        if case.name in REFUSED:
            continue
        is_quick = case.name in ODD or index % 80 == 0
        marks = [] if is_quick else [pytest.mark.slow]
        params.append(pytest.param(case, id=case.name, marks=marks))
    return params


def _named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("case", _cases())
def test_units_under_rules_change_no_bit(case: Case) -> None:
    found = differences(train(case, "rules"), train(case, "rules alone"))
    assert not found, "\n".join(found[:20])


def _state(module: nn.Module) -> dict[str, Any]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors}


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_failed_capture_is_a_clear_error_without_changes(name: str) -> None:
    case = _named(name)
    scaled = unit_scale(case.module())
    before, classes = _state(scaled), [type(one) for one in scaled.modules()]
    with pytest.raises(CaptureError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in case.batches():
            case.loss(scaled(*batch)).backward()
            # A step that is refused in a later call was trained until then.
            before = _state(scaled)
    text = str(caught.value)
    assert REFUSED[name] in text and text.count(". ") >= 2, text
    assert type(scaled).__name__ in text
    after = _state(scaled)
    assert before.keys() == after.keys()
    assert_same_bits(list(before.values()), list(after.values()))
    assert classes == [type(one) for one in scaled.modules()]


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", sampled(sorted(ODD), 3))
def test_training_continues_without_plan(name: str) -> None:
    case = _named(name)
    found = differences(train(case, "remat"), plain(case))
    assert not found, "\n".join(found[:20])


def test_missing_plan_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(warnings, "warn", lambda text, *args, **kwargs: told.append(str(text)))
    train(_named("autograd-straight_through"), "remat")
    (text,) = [text for text in told if "without a plan" in text]
    expected = "captured, it fails" if IS_TORCH_2_11 else REFUSED["autograd-straight_through"]
    assert expected in text
