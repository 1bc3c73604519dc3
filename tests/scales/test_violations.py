"""Violations found in snapshots: NaN in graph order, thresholds."""

import math
from dataclasses import replace

import pytest
import torch

from lightning_unitscale.formats import E4M3FN, E5M2, FP16, get_format
from lightning_unitscale.scales.alerts import (
    ScaleAlert,
    TensorScale,
    alerts_from_json,
    alerts_to_json,
)
from lightning_unitscale.scales.violations import (
    Threshold,
    default_thresholds,
    first_nonfinite,
    format_violations,
    infinite_names,
    parse_thresholds,
)
from tests.scales.snapshots import of
from tests.tensorboard.runs import NAMES, snapshot, with_nan

INF, NAN = math.inf, math.nan


def found(one, **options):
    alert = first_nonfinite(one, **options)
    return None if alert is None else (alert.tensor, alert.direction)


def test_first_nan_in_computation_order():
    good, bad = [1.0, 2.0], [1.0, NAN]
    assert found(of([good, good])) is None
    assert found(of([good, bad, bad], [bad, bad, bad])) == ("m.b", "forward")
    # The backward pass begins with the last tensor.
    assert found(of([good, good, good], [bad, bad, good])) == ("m.b", "backward")
    assert found(of([good, good, good], [bad, bad, good]), gradients=False) is None


def test_infinities_without_effect_are_ignored():
    good, infinite = [1.0, 2.0], [1.0, -INF]
    assert found(of([good, infinite, good])) is None
    assert infinite_names(of([good, infinite, [NAN, INF]])) == ("m.b",)
    # Of these something came: an infinite result, a NaN, a gradient.
    assert found(of([good, infinite, infinite])) == ("m.b", "forward")
    assert found(of([good, infinite, [NAN]])) == ("m.b", "forward")
    assert found(of([good, infinite, good], [good, [INF], good])) == ("m.b", "forward")
    # A mask is not what a NaN comes from.
    known = found(of([good, infinite, [NAN]]), known_infinite={"m.b"})
    assert known == ("m.c", "forward")
    masked = replace(of([good, infinite, [NAN]]), names=("m.a", "m.masked_fill_2", "m.c"))
    assert found(masked) == ("m.c", "forward")


def test_nan_alert_has_count_and_inputs():
    inputs = ((), ("m.a",), ("m.b", "m.a"))
    one = of([[4.0, -8.0], [0.0], [NAN, NAN, INF, 1.0]], [[NAN], [1.0], [2.0]], inputs=inputs)
    alert = first_nonfinite(one)
    assert alert.value == 3 and "2 NaN and 1 infinite among 4 elements" in alert.text
    assert "(1 more tensor or gradient" in alert.text
    zero, plain = alert.inputs
    assert (zero.tensor, zero.log2_rms) == ("m.b", -INF) and str(zero) == "m.b (zero)"
    assert plain == TensorScale("m.a", math.log2(math.sqrt(40)), 3.0)
    backward = of([[1.0]] * 3, [[NAN], [4.0], [16.0]], inputs=inputs)
    assert [(i.tensor, i.log2_rms) for i in first_nonfinite(backward).inputs] == [
        ("m.b", 2.0),
        ("m.c", 4.0),
    ]


def test_thresholds_are_parsed():
    assert parse_thresholds({"half": 0.25, "e4m3": {"subnormal": 1}}) == (
        Threshold(FP16, "overflow", 0.25),
        Threshold(FP16, "flushed", 0.25),
        Threshold(get_format("E4M3"), "subnormal", 1.0),
    )
    assert default_thresholds((FP16, E4M3FN, E5M2)) == (
        Threshold(FP16, "overflow", 0.0),
        Threshold(E4M3FN, "overflow", 1e-3),
        Threshold(E5M2, "overflow", 0.0),
    )


def test_value_equal_to_threshold_is_allowed():
    one = of([[500.0, 1.0, 1.0, 1.0], [500.0, 500.0, 1.0, 1e-9]])
    for fraction, tensors in ((0.25, ["m.b"]), (0.2, ["m.a", "m.b"]), (0.5, [])):
        alerts = format_violations(one, [Threshold(E4M3FN, "overflow", fraction)])
        assert [alert.tensor for alert in alerts] == tensors
    (alert,) = format_violations(one, [Threshold(E4M3FN, "flushed", 0.1)])
    assert (alert.value, alert.threshold, alert.kind) == (0.25, 0.1, "flushed")
    assert alert.text == "25 % of the elements become zero in E4M3FN (allowed: 10 %)"


def test_gradient_alerts_follow_backward_order():
    large = [1e6, 1.0]
    alerts = format_violations(
        of([large, [1.0, 1.0], large], [large] * 3), default_thresholds((FP16,))
    )
    assert [(alert.tensor, alert.direction) for alert in alerts] == [
        ("m.a", "forward"),
        ("m.c", "forward"),
        ("m.c", "backward"),
        ("m.b", "backward"),
        ("m.a", "backward"),
    ]


@pytest.mark.parametrize(
    ("name", "elements", "num_merged"),
    [
        ("loss.sum", [1e6], 1),
        ("loss.sum", [1e6, 1e6, 1e6], 3),  # of three batches
        ("criterion.mse_loss_2", [1e6, 1e6], 1),  # a loss for each element
        ("cross_entropy", [1e6, 1e6], 1),
        ("head.binary_cross_entropy_with_logits@2", [1e6, 1e6], 1),
    ],
)
def test_scalars_and_losses_have_no_format_alerts(name, elements, num_merged):
    limits = default_thresholds((FP16,))
    one = of([elements], [elements], names=(name,))
    assert format_violations(one, limits, num_merged) == ()
    assert len(format_violations(replace(one, names=("m.linear",)), limits)) == 2 * (
        len(elements) > 1
    )
    assert found(of([[NAN]], names=(name,))) == (name, "forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_with_largest_numbers_is_not_an_overflow(dtype):
    masked = [1e-9, torch.finfo(dtype).min]
    assert format_violations(of([masked]), [Threshold(FP16, "overflow", 0.0)]) == ()
    (small,) = format_violations(of([masked]), [Threshold(FP16, "flushed", 0.1)])
    assert small.kind == "flushed"
    # The gradients of what a mask is added to are like any others.
    (large,) = format_violations(of([masked], [[1e6, 0.0]]), [Threshold(FP16, "overflow", 0.0)])
    assert large.direction == "backward"


def test_masked_fill_is_not_an_overflow():
    limits = [Threshold(FP16, "overflow", 0.0)]
    filled = of([[1.0, -1e9]], names=("attention.masked_fill",))
    assert format_violations(filled, limits) == ()
    assert format_violations(replace(filled, names=("attention.add",)), limits)


def test_unmeasured_direction_has_no_alerts():
    one = snapshot(0, backward=False)
    limits = parse_thresholds({"FP16": 0.0})
    assert {alert.direction for alert in format_violations(one, limits)} <= {"forward"}
    assert first_nonfinite(one) is None
    assert format_violations(one, ()) == ()


def test_alerts_survive_json_round_trip():
    alerts = (
        first_nonfinite(with_nan(snapshot(3), 1)),
        ScaleAlert("loss", 4, "loss", "", "forward", "is NaN"),
        ScaleAlert(
            "overflow", 5, "a.b_1", "a", "backward", "x", "FP16", 0.5, 0.1,
            (TensorScale("a.c", -INF, -INF),),
        ),
    )  # fmt: skip
    text = alerts_to_json(alerts)
    again = alerts_from_json(text)
    assert again[0] == alerts[0] and str(again[1]) == str(alerts[1])
    assert again[0].tensor == NAMES[1] and again[2].op == "b"
    assert again[2].inputs == (TensorScale("a.c", -INF, -INF),)
    assert math.isnan(again[1].value) and again[2].value == 0.5
    with pytest.raises(ValueError, match="not a list of alerts"):
        alerts_from_json('[{"kind": "loss"}]')


@pytest.mark.parametrize(
    ("name", "module", "op"),
    [
        ("a.b.linear_12", "a.b", "linear"),
        ("a.b.linear@2", "a.b", "linear"),
        ("a.b.log_softmax_1@3", "a.b", "log_softmax"),
        ("add", "", "add"),
        ("a.weight", "a", "weight"),
    ],
)
def test_operation_is_parsed_from_name(name, module, op):
    assert ScaleAlert("nonfinite", 0, name, module, "forward", "").op == op
