"""Plans are plain data, and survive a checkpoint."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_unitscale.capture.graph_nodes import ATTENTION
from lightning_unitscale.rules.learning_rates import ParameterInfo, Role
from lightning_unitscale.rules.plan import Argument, Decision, ParameterPlan, RulePlan, key
from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import GPT, tokens
from tests.rules.oracle import plan_of

PLAN = RulePlan(
    {
        "forward:a": Decision("linear", ("", "w"), "rule", "why", 0.25, (Argument((0,), 2.0),)),
        "forward:b": Decision("sdpa", ("", "", ""), "rule", "why", kwargs=(("scale", 0.125),)),
        "validation:a": Decision(
            "add", ("", ""), "residual", "r", arguments=(Argument(("other", 1), 0.5),)
        ),
    },
    {
        "w": ParameterPlan(
            ParameterInfo("w", Role.HIDDEN, 8, 4, 8, num_residuals=6, sigma=0.02, is_tied=True),
            "scaled",
            "every use",
        )
    },
    {"v": "not read"},
)


@pytest.mark.parametrize("way", ["json", "torch"])
def test_state_round_trip_in_plain_types(way: str) -> None:
    if way == "json":
        state = json.loads(json.dumps(PLAN.state()))
    else:
        file = io.BytesIO()
        torch.save(PLAN.state(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    back = RulePlan.from_state(state)
    assert back == PLAN
    assert back["forward:a"].arguments[0].path == (0,)
    assert back["validation:a"].arguments[0].path == ("other", 1)
    assert back.parameters["w"].info.role is Role.HIDDEN
    assert hash(back["forward:b"]) == hash(PLAN["forward:b"])


def test_plan_of_model_survives_json_round_trip() -> None:
    scaled = unit_scale(GPT(32, 1))
    scaled(tokens())
    plan = plan_of(scaled)
    assert RulePlan.from_state(json.loads(json.dumps(plan.state()))) == plan
    assert len(plan) > 15
    assert len(plan.parameters) == len(dict(scaled.named_parameters()))


def test_updated_plan_keeps_earlier_decisions() -> None:
    other = RulePlan(
        {"forward:a": Decision("gelu", (), "kept", "later"), "forward:c": PLAN["forward:b"]},
        {"w": ParameterPlan(ParameterInfo("w", Role.BIAS, 1, 1, 1), "zeroed", "later")},
    )
    both = PLAN.updated(other)
    assert both["forward:a"] == PLAN["forward:a"]
    assert both["forward:c"] == PLAN["forward:b"]
    assert both.parameters == PLAN.parameters
    assert both.unseen == PLAN.unseen
    # Parameters that another step reads are no longer unseen.
    seen = RulePlan({}, {"v": PLAN.parameters["w"]})
    assert PLAN.updated(seen).unseen == {} and seen.updated(PLAN).unseen == {}
    # Another operation of the same name, of a branch that the step takes later.
    assert both["forward:a~2"] == other["forward:a"]
    assert both.find("forward", "a", ("gelu", ())) == other["forward:a"]
    assert both.find("forward", "a", ("tanh", ())) is None
    assert len(both.updated(other)) == len(both) == 5
    assert PLAN.steps() == {"forward", "validation"}
    assert list(PLAN) == ["forward:a", "forward:b", "validation:a"]
    assert key("forward", "a") in PLAN


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, False),
        ({"output": 2.0}, True),
        ({"arguments": (Argument((0,), 2.0),)}, True),
        ({"kwargs": (("scale", 1.0),)}, True),
    ],
)
def test_decision_changes_only_with_factors(changed: dict, expected: bool) -> None:
    assert Decision("op", (), "kept", "", **changed).changes is expected


def test_attention_parts_are_found_by_frame() -> None:
    matmul = "attention_matmul"
    scores = Decision(matmul, ("query", "key"), "rule", "", 0.5)
    result = Decision(matmul, ("softmax", "value"), "rule", "", 2.0)
    plan = RulePlan({f"step:{ATTENTION}.{matmul}": scores, f"step:{ATTENTION}": result})
    identity = matmul, ("", "")
    assert plan.find("step", f"{ATTENTION}@3.{matmul}", identity) is scores
    assert plan.find("step", f"{ATTENTION}@3", identity) is result
    assert plan.attentions == {ATTENTION: True}


def test_renumbered_operation_has_unique_matching_decision() -> None:
    first = Decision("linear", ("add", "w_1"), "rule", "", 0.5)
    parameters: Any = {"w_1": None, "w_2": None}
    plan = RulePlan({"step:linear": first}, parameters)
    for weight, is_matmul, expected in (("w_1", False, first), ("w_2", True, None)):
        identity = "linear", ("add_1", weight)
        assert plan.find_alike("step", "linear_2", identity, is_matmul=is_matmul) is expected
    two = RulePlan({"step:linear": first, "step:linear_1": replace(first, output=2.0)}, parameters)
    identity = "linear", ("add_1", "w_1")
    assert two.find_alike("step", "linear_2", identity, is_matmul=True) is None


def test_activation_matmuls_match_by_common_operand() -> None:
    scores = Decision("matmul", ("linear", "linear_1"), "rule", "", 0.5)
    result = Decision("matmul", ("softmax", "linear_2"), "rule", "", 2.0)
    fused = Decision(ATTENTION, ("linear", "linear_1", "linear_2"), "rule", "", 3.0)
    plan = RulePlan({"s:matmul": scores, "s:matmul_1": result, f"s:m.{ATTENTION}": fused})
    for reads, is_matmul, expected in (
        (("linear_3", "cat"), True, scores),
        (("softmax_1", "cat_1"), True, result),
        (("softmax_1", "cat_1"), False, None),
        (("cat", "cat_1"), True, None),
    ):
        identity = "matmul", reads
        assert plan.find_alike("s", "matmul_5", identity, is_matmul=is_matmul) is expected
    identity = ATTENTION, ("mul", "cat", "cat_1")
    assert plan.find_alike("s", f"m.{ATTENTION}_4", identity, is_matmul=True) is fused
