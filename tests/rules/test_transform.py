"""``unit_scale`` of many modules, combined with other transforms, and its errors."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture import executors
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import compile, lossless_unit_scale, simulate_fp8, track_scales
from tests.helpers import assert_same_bits, run, sampled
from tests.rules.models import GPT, MODELS, Block, Of, labels, tokens
from tests.rules.oracle import (
    decided,
    decisions_of,
    differing_parameters,
    parameters_of,
    plan_of,
    rms,
    rules_alone,
)
from tests.zoo import MATMULS, NETWORKS

W = 16
X = torch.randn(8, 6, W, generator=torch.Generator().manual_seed(2))
SMALL = {**MATMULS, **NETWORKS}


# A module of all tests is captured again in each of them, which forget what Dynamo knows.
pytestmark = pytest.mark.filterwarnings("ignore:.*captured again in:UserWarning")


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", SMALL)
def test_all_operands_and_gradients_are_scaled(name: str) -> None:
    module, inputs = SMALL[name]()
    scaled = unit_scale(module)
    before = [tensor.detach().clone() for tensor in inputs]
    scaled(*inputs)
    assert differing_parameters(scaled, *inputs) == []
    assert all(torch.equal(first, other) for first, other in zip(inputs, before, strict=True))
    if name not in {"autocast", "bfloat16"}:
        assert torch.isfinite(scaled(*inputs)).all()


def test_dropout_factor_depends_on_its_probability() -> None:
    """An input of the graph had another value in an earlier module."""
    factors = []
    for share in (0.3, 0.4):
        layers = nn.Linear(W, W), nn.Dropout(share), nn.Linear(W, W)
        scaled = unit_scale(nn.Sequential(*layers))
        scaled(X)
        arguments = [argument for each in plan_of(scaled).values() for argument in each.arguments]
        factors += [argument.factor for argument in arguments]
    assert factors == pytest.approx([0.7**0.5, 0.6**0.5])


TRAPS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "softmax_module": lambda: (
        Of(lambda m, x: m[1](nn.Softmax(-1)(m[0](x))).sum(), nn.Linear(W, W), nn.Linear(W, 3)),
        (X,),
    ),
    "conv1d_with_tuples": lambda: (
        Of(lambda m, x: m[0](x.mT).square().sum(), nn.Conv1d(W, 8, (3,), (2,), (1,))),
        (X,),
    ),
    "three_dimensional_cross_entropy": lambda: (
        Of(lambda m, x: F.cross_entropy(m[0](x).mT, torch.ones(8, 6).long()), nn.Linear(W, 5)),
        (X,),
    ),
    "label_smoothing_and_weights": lambda: (
        Of(
            lambda m, x: nn.CrossEntropyLoss(torch.arange(1.0, 6.0), label_smoothing=0.1)(
                m[0](x[:, 0]), labels(8)
            ),
            nn.Linear(W, 5),
        ),
        (X,),
    ),
    "attention_module": lambda: (
        Of(
            lambda m, x: m[0](x, x, x)[0].square().mean(),
            nn.MultiheadAttention(W, 4, dropout=0.1, batch_first=True),
        ),
        (X,),
    ),
    "linear_without_a_bias_argument": lambda: (
        Of(lambda m, x: F.linear(x, m[0].weight).square().mean(), nn.Linear(W, W, bias=False)),
        (X,),
    ),
    "learned_positions": lambda: (
        Of(
            lambda m, x: m[2](m[0](x) + m[1](torch.arange(6))).square().mean(),
            nn.Embedding(5, W), nn.Embedding(6, W), nn.Linear(W, 3),
        ),
        (labels(8)[:, None].expand(8, 6).contiguous(),),
    ),
    "sixteen_bits": lambda: (
        Of(lambda m, x: m[1](m[0](x).relu()).square().mean(),
           nn.Linear(W, W).bfloat16(), nn.Linear(W, 3).bfloat16()),
        (X.bfloat16(),),
    ),
    "recurrent_kernel": lambda: (
        Of(lambda m, x: m[1](m[0](m[2](x))[0]).square().mean(),
           nn.GRU(W, W), nn.Linear(W, 3), nn.Linear(W, W)),
        (X,),
    ),
    "frozen_backbone": lambda: (
        Of(
            lambda m, x: m[1](m[0](x).relu()).square().mean(),
            nn.Linear(W, W).requires_grad_(False),
            nn.Linear(W, 3),
        ),
        (X,),
    ),
    "parametrized": lambda: (
        Of(
            lambda m, x: m[1](m[0](x).relu()).square().mean(),
            nn.utils.parametrizations.weight_norm(nn.Linear(W, W)),
            nn.Linear(W, 3),
        ),
        (X,),
    ),
    "checkpointed_blocks": lambda: (
        Of(
            lambda m, x: checkpoint(m[1], checkpoint(m[0], x, use_reentrant=False),
                                    use_reentrant=False).square().mean(),
            Block(W), Block(W),
        ),
        (X,),
    ),
}  # fmt: skip


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("name", sampled(TRAPS, 2))
def test_unusual_models_are_near_unit_scale(name: str) -> None:
    module, inputs = TRAPS[name]()
    scaled = unit_scale(module)
    scaled(*inputs)
    assert differing_parameters(scaled, *inputs) == []
    gradients = [rms(param.grad) for param in scaled.parameters() if param.requires_grad]
    assert sum(0.6 <= gradient <= 1.7 for gradient in gradients) >= 0.8 * len(gradients)
    assert sum(decision.changes for decision in plan_of(scaled).values()) >= 1


def test_attention_module_output_is_at_unit_scale() -> None:
    torch.manual_seed(0)
    scaled = unit_scale(
        Of(lambda m, x: m[0](x, x, x, need_weights=False)[0], nn.MultiheadAttention(64, 4))
    )
    y = scaled(torch.randn(16, 4, 64))
    assert 0.7 < rms(y) < 1.4
    assert rms(scaled.parts[0].in_proj_weight) == pytest.approx(1.0, rel=0.02)


@pytest.mark.slow
def test_checkpoints_are_recomputed_and_have_the_same_factors() -> None:
    def blocks(wrap: Callable[..., Tensor]) -> nn.Module:
        torch.manual_seed(0)
        return Of(lambda m, x: wrap(m[1], wrap(m[0], x)).square().mean(), Block(W), Block(W))

    with_checkpoints = unit_scale(blocks(lambda f, x: checkpoint(f, x, use_reentrant=False)))
    without = unit_scale(blocks(lambda f, x: f(x)))
    results = []
    for value in (with_checkpoints, without):
        value(X)
        results.append(run(value, X))
    torch.testing.assert_close(results[0]["output"], results[1]["output"], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(
        results[0]["parameters"], results[1]["parameters"], rtol=1e-2, atol=1e-3
    )
    kinds = [
        with_checkpoint.origin for with_checkpoint in plan_of(with_checkpoints).values()
    ].count("residual")
    assert kinds == 4


@pytest.fixture(scope="module")
def planned() -> tuple[nn.Module, nn.Module, Tensor]:
    """A plain model, its unit-scaled copy after a call, and their input."""
    torch.manual_seed(0)
    module, ids = GPT(32, 1), tokens()
    scaled = unit_scale(module)
    scaled(ids)
    return module, scaled, ids


def _inductor_is_aot_eager(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    real = executors.execute_with

    def execute(executor: Any, *args: Any, **options: Any) -> Any:
        seen.append(executor)
        return real("aot_eager" if executor == "inductor" else executor, *args, **options)

    monkeypatch.setattr(executors, "execute_with", execute)
    return seen


COMPOSITIONS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "alone": lambda m, x: unit_scale(m),
    "tracked_after": lambda m, x: track_scales(unit_scale(m)),
    "tracked_before": lambda m, x: unit_scale(track_scales(m)),
    "lossless_after": lambda m, x: lossless_unit_scale(unit_scale(m), x),
    "lossless_before": lambda m, x: unit_scale(lossless_unit_scale(m, x)),
    "compiled_after": lambda m, x: compile(unit_scale(m)),
    "compiled_before": lambda m, x: unit_scale(compile(m)),
    "copied": lambda m, x: copy.deepcopy(unit_scale(m)),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composes_with_function_preserving_transforms(
    name: str, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executors = _inductor_is_aot_eager(monkeypatch)
    module, scaled, ids = planned
    other = COMPOSITIONS[name](module, ids)
    other(ids)
    given, expected = run(other, ids), run(scaled, ids)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
    if "compiled" in name:
        assert "inductor" in executors
    else:
        assert_same_bits(given, expected)
    if name == "tracked_after":
        graph = other.scales_graph()
        assert {"head.linear", "blocks.0.add"} <= {n.meta["tensor_name"] for n in graph.nodes}


@pytest.mark.slow
def test_composes_with_simulated_formats_in_any_order(planned: Any) -> None:
    module, scaled, ids = planned
    orders: list[Callable[[nn.Module], nn.Module]] = [
        lambda m: simulate_fp8(unit_scale(m)),
        lambda m: unit_scale(simulate_fp8(m)),
        lambda m: track_scales(simulate_fp8(unit_scale(m))),
        lambda m: simulate_fp8(unit_scale(track_scales(m))),
    ]
    results = []
    for order in orders:
        other = order(module)
        other(ids)
        results.append(run(other, ids))
        assert decisions_of(other) == decisions_of(scaled)
    for result in results[1:]:
        assert_same_bits(result, results[0])
    exact = run(scaled, ids)["output"]
    assert 0 < float((results[0]["output"] - exact).abs().detach()) < 0.05


@pytest.mark.slow
def test_copied_planned_module_is_independent(planned: Any) -> None:
    _, scaled, ids = planned
    copied = copy.deepcopy(scaled)
    assert_same_bits(run(copied, ids), run(scaled, ids))
    with torch.no_grad():
        copied.head.weight.mul_(2)
    assert not torch.equal(copied(ids), scaled(ids))
    assert plan_of(copied) == plan_of(scaled)


def test_pickling_is_an_error(planned: Any) -> None:
    with pytest.raises(TypeError, match=r"GPT\.forward is captured and cannot be pickled"):
        pickle.dumps(planned[1])


def test_original_module_is_not_changed() -> None:
    module, inputs = MODELS["res_net"]()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attributes = set(module.__dict__)
    scaled = unit_scale(module)
    scaled(*inputs).backward()
    assert_same_bits(dict(module.state_dict()), before)
    assert set(module.__dict__) == attributes
    assert all(param.grad is None for param in module.parameters())
    assert steps_of(module) is None
    pairs = zip(module.parameters(), scaled.parameters(), strict=True)
    assert all(pair.data_ptr() != other.data_ptr() for pair, other in pairs)


@pytest.mark.slow
def test_first_call_runs_forward_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(W, W), nn.BatchNorm1d(W), nn.Linear(W, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(F.dropout(self.norm(self.one(x)).relu(), 0.3)).square().mean()

    module, x = Model(), X[:, 0]
    scaled = unit_scale(module)
    after = []
    for value in (module, scaled):
        torch.manual_seed(7)
        value(x)
        after.append(torch.rand(4))
    assert torch.equal(*after)
    assert scaled.norm.num_batches_tracked == module.norm.num_batches_tracked == 1
    h = x @ scaled.one.weight.T * W**-0.5
    torch.testing.assert_close(scaled.norm.running_mean, 0.1 * h.mean(0).detach())
    assert all(param.grad is None for param in scaled.parameters())
    # The dropout of the first call is that of any later call from the same state.
    fresh = unit_scale(module)
    torch.manual_seed(7)
    first = fresh(x)
    torch.manual_seed(7)
    assert_same_bits(fresh(x), first)


def test_module_without_loss_called_without_gradients() -> None:
    with torch.no_grad():
        scaled = unit_scale(Of(lambda m, x: m[1](m[0](x).relu()), nn.Linear(W, W), nn.Linear(W, 5)))
        y = scaled(X)
    assert not y.requires_grad
    assert decided(scaled, "linear")[1].output == pytest.approx(W**-0.5)
    assert 0.7 < rms(y) < 1.4
    scaled(X).backward(torch.randn(8, 6, 5))
    assert all(0.4 < rms(param.grad) < 2.5 for param in scaled.parameters())


def test_graph_breaks_do_not_change_scaling() -> None:
    def model(breaks: bool) -> nn.Module:
        torch.manual_seed(0)

        def function(m: nn.ModuleList, x: Tensor) -> Tensor:
            h = m[0](x)
            branch = m[1](F.layer_norm(h, (W,)))
            if breaks:
                torch._dynamo.graph_break()
            h = h + branch
            if breaks:
                torch._dynamo.graph_break()
            return m[2](h).square().mean()

        return Of(function, nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, 3))

    whole, broken = unit_scale(model(False)), unit_scale(model(True))
    for value in (whole, broken):
        value(X)
        assert differing_parameters(value, X) == []
    assert steps_of(broken).steps["forward"].num_graph_calls == 3
    torch.testing.assert_close(run(broken, X), run(whole, X))
    assert "tau = 1.414" in broken.explain() and "readout" in broken.explain()


def test_partly_unknown_parameter_is_unscaled_and_reported() -> None:
    module = Of(
        lambda m, x: m[1](m[0](x)).square().mean() + torch.linalg.svdvals(m[0].weight).sum(),
        nn.Linear(W, W),
        nn.Linear(W, 3),
    )
    scaled = unit_scale(module)
    scaled(X)
    assert torch.equal(scaled.parts[0].weight, module.parts[0].weight)
    assert parameters_of(scaled)["parts.0.weight"].action == "left"
    assert "read by linalg_svdvals, which no rule rewrites" in scaled.explain()
    # Its matmul is brought to RMS 1 all the same.
    h = X @ scaled.parts[0].weight.T
    alone = rules_alone(scaled)
    expected = (h / rms(h) @ scaled.parts[1].weight.T / W).square().mean()
    expected = expected + torch.linalg.svdvals(scaled.parts[0].weight).sum()
    torch.testing.assert_close(alone(X), expected, rtol=0.05, atol=0.0)


@pytest.mark.slow
def test_loaded_scaled_weights_are_not_scaled_again(planned: Any) -> None:
    module, scaled, ids = planned
    state = {name: tensor + 0.1 for name, tensor in scaled.state_dict().items()}
    called = unit_scale(module)
    called(ids)
    called.load_state_dict(state)
    expected = called(ids)
    fresh = unit_scale(module)
    fresh.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"RMS near 1 already.*call the module once before load"):
        given = fresh(ids)
    torch.testing.assert_close(given, expected, rtol=0.01, atol=0.0)
    assert_same_bits(dict(fresh.state_dict()), state)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"on_unknown": "guess"}, r"on_unknown='guess': unknown choice. Expected 'calibrate'"),
        ({"residual": (0.1,)}, r"residual=\(0\.1,\): .*Expected two positive numbers.*Pass"),
        ({"residual": (0.1, -1)}, r"residual=\(0\.1, -1\): .*Expected two positive numbers"),
        ({"residual": 0.5}, r"residual=0\.5: .*Expected two positive numbers"),
        ({"attention_mult": 0}, r"attention_mult=0: .*Expected a positive number. Pass"),
        ({"loss_mult": float("inf")}, r"loss_mult=inf: .*Expected a positive number"),
        ({"residual_mult": float("nan")}, r"residual_mult=nan: .*Expected a positive number"),
        ({"activation_mult": "2"}, r"activation_mult='2': .*Expected a positive number"),
        ({"residual_attn_ratio": True}, r"residual_attn_ratio=True: .*Expected a positive"),
    ],
)
def test_options_out_of_range_are_an_error(option: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        unit_scale(nn.Linear(2, 2), **option)


def test_compiled_or_scaled_modules_are_an_error(planned: Any) -> None:
    with pytest.raises(ValueError, match=r"module=\w+: it is compiled already. Expected an unc"):
        unit_scale(torch.compile(nn.Linear(2, 2)))
    for module in (planned[1], unit_scale(nn.Linear(2, 2)), track_scales(planned[1])):
        with pytest.raises(ValueError, match=r"module=\w+: it is unit-scaled by rules already"):
            unit_scale(module)
