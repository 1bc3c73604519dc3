"""Parameters are set to RMS 1 once, and their gradients are brought there."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.rules.learning_rates import ParameterInfo, Role
from lightning_unitscale.rules.plan import ParameterPlan
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.rules.unit_weights import (
    ParameterGradients,
    already_at_unit_scale,
    parameter_rms,
    set_to_unit_scale,
)
from lightning_unitscale.transforms import track_scales
from tests.rules.models import MODELS
from tests.rules.oracle import parameters_of, pass_of, rms


def plan(fqn: str, action: str, role: Role = Role.HIDDEN, fan_in: int = 64) -> ParameterPlan:
    return ParameterPlan(ParameterInfo(fqn, role, fan_in, 8, fan_in), action, "because")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["post_norm", "u_net", "experts"])
def test_weights_are_at_rms_one_and_biases_zero(name: str) -> None:
    module, inputs = MODELS[name]()
    before = {fqn: param.detach().clone() for fqn, param in module.named_parameters()}
    scaled = unit_scale(module)
    scaled(*inputs)
    plans = parameters_of(scaled)
    seen = set()
    for fqn, item in scaled.named_parameters():
        action, sigma = plans[fqn].action, plans[fqn].info.sigma
        seen.add(action)
        if action == "scaled":
            values = item[item != 0]  # a padding row stays zero
            assert rms(values) == pytest.approx(1.0, rel=0.02), fqn
            torch.testing.assert_close(item * sigma, before[fqn])
        elif action == "zeroed":
            assert not item.any(), fqn
        else:
            assert torch.equal(item, before[fqn]), fqn
    assert seen >= {"scaled", "left"}
    # And once only.
    values = {fqn: param.detach().clone() for fqn, param in scaled.named_parameters()}
    scaled(*inputs)
    assert all(torch.equal(param, values[fqn]) for fqn, param in scaled.named_parameters())


def test_init_weights_false_changes_no_parameter() -> None:
    module, inputs = MODELS["conv_net"]()
    scaled = unit_scale(module, init_weights=False)
    scaled(*inputs)
    pairs = zip(module.parameters(), scaled.parameters(), strict=True)
    assert all(torch.equal(pair, other) for pair, other in pairs)
    assert {value.action for value in parameters_of(scaled).values()} == {"left"}


@pytest.mark.parametrize("size", [1e-30, 0.02, 1.0, 1e20])
def test_parameter_rms_matches_reference(size: float) -> None:
    value = torch.randn(100, 50) * size
    assert parameter_rms(value) == pytest.approx(rms(value), rel=0.0112)
    padded = torch.cat([torch.zeros(50, 50), value])
    assert parameter_rms(padded) == pytest.approx(rms(value), rel=0.0112)
    # Layers that are drawn alike share one value, and so a learning rate.
    assert parameter_rms(value) == parameter_rms(value * 1.0001) or size == 1.0


@pytest.mark.parametrize(
    "value", [torch.zeros(3, 3), torch.full((3,), torch.nan), torch.full((2,), torch.inf)]
)
def test_degenerate_parameter_has_rms_one(value: Tensor) -> None:
    assert parameter_rms(value) == 1.0


def test_scaled_zeroed_and_left_actions() -> None:
    module = nn.Linear(64, 8)
    nn.init.ones_(module.bias)
    weight = module.weight.detach().clone()
    done = set_to_unit_scale(
        module, {"bias": plan("bias", "left"), "weight": plan("weight", "scaled")}
    )
    assert torch.equal(module.bias, torch.ones(8))
    assert done["weight"].info.sigma == parameter_rms(weight)
    torch.testing.assert_close(module.weight.detach(), weight / done["weight"].info.sigma)
    assert done["bias"] == plan("bias", "left")
    set_to_unit_scale(module, {"bias": plan("bias", "zeroed")})
    assert not module.bias.any()
    assert module.weight.requires_grad and module.weight.grad_fn is None


def test_weights_already_at_unit_scale_are_detected() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(4, 4))
    plans = {
        f"{i}.weight": plan(f"{i}.weight", "scaled", fan_in=64 if i < 2 else 4) for i in range(3)
    }
    assert not already_at_unit_scale(module, plans)
    set_to_unit_scale(module, plans)
    assert already_at_unit_scale(module, plans)
    with torch.no_grad():
        module[0].weight.mul_(1.3)
        module[1].weight.mul_(0.7)
    assert already_at_unit_scale(module, plans)
    assert not already_at_unit_scale(module, {"2.weight": plans["2.weight"]})
    left = {fqn: plan(fqn, "left") for fqn in plans}
    assert not already_at_unit_scale(module, left)


def _gradient(module: nn.Module, x: Tensor) -> Tensor:
    module.zero_grad()
    module(x).sum().backward()
    return module.weight.grad


def _factors(**log2_factors: int) -> ParameterGradients:
    gradients = ParameterGradients()
    gradients.log2_factors = log2_factors
    return gradients


def test_gradient_factors_are_powers_of_two() -> None:
    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    plain = _gradient(module, x)
    gradients = _factors(weight=2)
    for _ in range(2):  # one hook, however often it is called
        gradients.before_step(module)
    assert torch.equal(_gradient(module, x), plain * 4)
    gradients.clear()
    assert torch.equal(_gradient(module, x), plain)
    gradients.log2_factors["weight"] = -4
    gradients.remove()
    assert torch.equal(_gradient(module, x), plain)


def test_gradient_factor_applies_once_to_shared_parameter() -> None:
    module, x = nn.Linear(4, 4), torch.randn(5, 4)
    module(module(x)).sum().backward()
    plain = module.weight.grad.clone()
    _factors(weight=5).before_step(module)
    module.zero_grad()
    module(module(x)).sum().backward()
    assert torch.equal(module.weight.grad, plain)  # the factors are not kept
    gradients = _factors(weight=5)
    gradients.before_step(module)
    module.zero_grad()
    module(module(x)).sum().backward()
    assert torch.equal(module.weight.grad, plain * 32)


def test_replaced_parameter_gets_hook() -> None:
    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    gradients = _factors(weight=1)
    gradients.before_step(module)
    module.weight = nn.Parameter(module.weight.detach().clone())
    plain = _gradient(module, x).clone()
    gradients.before_step(module)
    assert torch.equal(_gradient(module, x), plain * 2)


def test_factor_depends_on_number_of_accumulated_batches() -> None:
    gradients, parameter = ParameterGradients(), nn.Parameter(torch.zeros(2))
    gradients.start(num_accumulated=4)
    parameter.grad = torch.full((2,), 2.0**-8)
    gradients.scale_new([("w", parameter)])
    gradients.settle()
    assert gradients.log2_factors == {"w": 8} and torch.equal(parameter.grad, torch.ones(2))
    for num_accumulated, exponent in ((4, 8), (64, 10), (1, 7)):
        gradients.start(num_accumulated)
        assert torch.equal(gradients._seen("w", torch.ones(2)), torch.full((2,), 2.0**exponent))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_factor_may_exceed_range_of_gradient_dtype(dtype: torch.dtype) -> None:
    gradients, parameter = ParameterGradients(), nn.Parameter(torch.zeros(2, dtype=dtype))
    gradients.start(num_accumulated=1)
    parameter.grad = torch.full((2,), 2.0**-18, dtype=dtype)
    gradients.scale_new([("w", parameter)])
    assert torch.equal(parameter.grad, torch.ones(2, dtype=dtype))


@pytest.mark.slow
def test_copied_module_has_separate_hooks_and_is_freed() -> None:
    module, inputs = MODELS["conv_net"]()
    scaled = unit_scale(module)
    scaled(*inputs)
    copied = copy.deepcopy(scaled)
    pass_of(scaled, ParameterGradients).clear()
    for item in (scaled, copied):
        item.zero_grad()
        item(*inputs).backward()
    pass_of(copied, ParameterGradients).settle()
    exponent = pass_of(copied, ParameterGradients).log2_factors["head.1.weight"]
    assert exponent != 0
    first, second = (value.head[1].weight.grad for value in (scaled, copied))
    assert torch.equal(first * 2.0**exponent, second)
    alive = weakref.ref(copied)
    del copied, item, second
    gc.collect()
    assert alive() is None


def test_transformed_copy_keeps_gradient_factors() -> None:
    module, inputs = MODELS["conv_net"]()
    scaled = unit_scale(module)
    for _ in range(2):
        scaled(*inputs).backward()
    copied = track_scales(scaled)
    for item in (scaled, copied):
        item.zero_grad()
        item(*inputs).backward()
    pairs = zip(scaled.parameters(), copied.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_parameter_with_a_hook_can_be_saved() -> None:
    module = nn.Linear(4, 3)
    gradients = _factors(weight=1)
    gradients.before_step(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = pickle.loads(pickle.dumps(module.weight))
        kept = pickle.loads(pickle.dumps(gradients))
    assert torch.equal(weight, module.weight)
    assert kept.log2_factors == {"weight": 1}


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (value(x)[:, None] for value in (self.query, self.key, self.value))
        return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


def test_gradient_of_rounding_errors_is_not_scaled() -> None:
    """A key's bias moves all logits of a query alike, so the softmax does not see it."""
    torch.manual_seed(0)
    scaled = unit_scale(_Attention())
    for _ in range(2):
        scaled.zero_grad()
        scaled(torch.randn(8, 16, 32)).backward()
    found = {name: rms(param.grad) for name, param in scaled.named_parameters()}
    assert 0 < found.pop("key.bias") < 1e-4
    assert all(0.1 < item < 10 for item in found.values()), found
