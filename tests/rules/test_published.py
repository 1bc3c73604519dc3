"""Published language models at random weights, which public rule-based transforms crash on."""

import pytest

pytest.importorskip("transformers")

import torch

from benchmarks.architectures import observe_step, run_step, seed_everything
from benchmarks.model_zoo import ZOO
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.rules.unit_weights import ParameterGradients
from tests.helpers import same_bits
from tests.rules.oracle import (
    decided,
    only_rules,
    parameters_of,
    pass_of,
    plan_of,
    share_within,
)

# Warnings of other packages while a model is traced.
_EXPECTED = ("Dynamo detected a call to a `functools.lru_cache`", "To copy construct from a tensor")


@pytest.mark.slow
@pytest.mark.filterwarnings(*(f"ignore:{text}" for text in _EXPECTED))
@pytest.mark.parametrize(
    ("name", "readout"),
    [
        ("Llama", "lm_head.weight"),
        ("GPT-2", "transformer.wte.weight"),
        ("BERT", "bert.embeddings.word_embeddings.weight"),
    ],
)
def test_published_model_is_near_unit_scale(name: str, readout: str) -> None:
    seed_everything()
    model, inputs = ZOO[name]()
    model.config._attn_implementation = "sdpa"
    scaled = unit_scale(model)
    seed_everything()
    run_step(scaled, inputs)  # in which units are measured
    ours = observe_step(scaled, inputs)
    assert share_within(ours.forward + ours.stored, 2) >= 0.95
    assert share_within(ours.gradients, 4) >= 0.9
    given = run_step(scaled, inputs)
    with only_rules(scaled):
        expected = run_step(scaled, inputs)
    assert same_bits(given.loss, expected.loss)
    exponents = pass_of(scaled, ParameterGradients).log2_factors
    for fqn, gradient in expected.gradients.items():
        assert gradient is not None
        other = given.gradients[fqn]
        assert other is not None and same_bits(gradient * 2.0 ** exponents[fqn], other), fqn

    residuals = [decision for decision in plan_of(scaled).values() if decision.origin == "residual"]
    assert len(residuals) == 4  # two layers of two branches
    assert [residual.reason.split()[0] for residual in residuals] == [
        "attention",
        "feed-forward",
    ] * 2
    assert [decision.reason.startswith("readout") for decision in plan_of(scaled).values()].count(
        True
    ) == 1
    plans = parameters_of(scaled)
    assert set(plans) == {fqn for fqn, _ in scaled.named_parameters()}
    assert plans[readout].action == "scaled"
    assert plans[readout].info.is_tied == (name != "Llama")
    assert all(plan.info.role.value != "other" for plan in plans.values())
    # Each layer's logits are (1 / 16) q.k, whether torch runs one kernel or matmuls.
    fused = decided(scaled, "scaled_dot_product_attention")
    matmuls = [
        decision for decision in decided(scaled, "attention_matmul") if "m/d" in decision.reason
    ]
    assert len(fused) + len(matmuls) == 2
    assert all(dict(value.kwargs)["scale"] == 1 / 16 for value in fused)
    # (What the composite multiplies queries and keys by is undone where they are read.)
    assert all(matmul.output == pytest.approx(1 / 16) for matmul in matmuls)
    assert torch.isfinite(given.loss)


@pytest.mark.slow
@pytest.mark.filterwarnings(*(f"ignore:{text}" for text in _EXPECTED))
def test_weights_of_experts_are_set_to_unit_scale() -> None:
    # transformers calls its operator for a grouped matmul without an overload.
    model, inputs = ZOO["Mixtral"]()
    scaled = unit_scale(model)
    run_step(scaled, inputs)
    experts = {fqn: plan for fqn, plan in parameters_of(scaled).items() if ".experts." in fqn}
    assert len(experts) == 4
    assert all(plan.action == "scaled" for plan in experts.values())
    assert len(decided(scaled, "grouped_mm_fallback")) == 4
