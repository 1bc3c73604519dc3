"""``unit_scale`` of modules in which an operand or a gradient is zero in the first call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.capture.module_steps import matmuls_of
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.rules.unit_weights import ParameterGradients
from lightning_unitscale.transforms import simulate_fp8, track_scales
from tests.helpers import assert_same_bits
from tests.rules.models import Of
from tests.rules.oracle import (
    differing_parameters,
    only_rules,
    operands_of,
    pass_of,
    rms,
    share_within,
)

W = 32


def _linear(in_features: int = W, out_features: int = W, *, is_zero: bool = False) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    if is_zero:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return layer


def _loss(found: Tensor, x: Tensor) -> Tensor:
    return (found - x).square().mean()


class Recurrent(nn.Module):
    """A cell that is written out, whose first states are zero."""

    def __init__(self, num_gates: int, num_states: int, cell: Callable[..., tuple[Tensor, ...]]):
        super().__init__()
        self.cell, self.num_states = cell, num_states
        self.input, self.state = _linear(W, num_gates * W), _linear(W, num_gates * W)
        self.head = _linear()

    def forward(self, x: Tensor) -> Tensor:
        states: tuple[Tensor, ...] = (x.new_zeros(len(x), W),) * self.num_states
        outputs = []
        for t in range(x.shape[1]):
            states = self.cell(self.input(x[:, t]), self.state(states[0]), states)
            outputs.append(states[0])
        return _loss(self.head(torch.stack(outputs, 1)), x)


def _elman(x: Tensor, h: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.tanh(x + h),)


def _gru(x: Tensor, h: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    z = torch.sigmoid(x_z + h_z)
    return ((1 - z) * torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n) + z * states[0],)


def _lstm(x: Tensor, h: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


RECURRENT = {
    "elman": lambda: Recurrent(1, 1, _elman),
    "gru": lambda: Recurrent(3, 1, _gru),
    "lstm": lambda: Recurrent(4, 2, _lstm),
}


class Attention(nn.Module):
    """A residual block whose last layer begins with zeros; a key's bias has no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.head = nn.LayerNorm(W), _linear(is_zero=True), _linear()
        self.query, self.key, self.value = _linear(), _linear(), _linear()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return _loss(self.head(x + self.out(mixed)), x)


class Gated(nn.Module):
    """A branch times a parameter that begins at zero, with or without a matmul in the branch."""

    def __init__(self, branch: nn.Module, *shape: int) -> None:
        super().__init__()
        self.branch, self.gate = branch, nn.Parameter(torch.zeros(shape))
        self.head = _linear()

    def forward(self, x: Tensor) -> Tensor:
        return _loss(self.head(x + self.gate * self.branch(x)), x)


class Lora(nn.Module):
    """A frozen layer with two factors, of which the second begins with zeros."""

    def __init__(self, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.body, self.head = _linear().requires_grad_(False), _linear()
        self.a, self.b = nn.Linear(W, 4, bias=False), nn.Linear(4, W, bias=False)
        nn.init.zeros_(self.b.weight)
        self.is_checkpointed = is_checkpointed

    def factors(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            added = checkpoint(self.factors, x, use_reentrant=False)
        else:
            added = self.factors(x)
        return _loss(self.head(self.body(x) + 2 * added), x)


def _zero_head() -> nn.Module:
    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        return _loss(m[2](m[1](F.gelu(m[0](x)))), x)

    return Of(function, _linear(), nn.LayerNorm(W), _linear(is_zero=True))


LATE: dict[str, Callable[[], nn.Module]] = {
    "zero head": _zero_head,
    "zero residual": Attention,
    "lora": Lora,
    "gated layer": lambda: Gated(nn.Sequential(nn.LayerNorm(W), _linear(), nn.Tanh())),
    # Here it is parameters alone whose gradients are late.
    "gated norm": lambda: Gated(nn.LayerNorm(W), W),
}


def batches(count: int, length: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, length, W, generator=generator) for _ in range(count)]


def planned(make: Callable[[], nn.Module], length: int = 6) -> tuple[nn.Module, nn.Module]:
    """A module and its scaled copy, called once."""
    torch.manual_seed(1)
    module = make()
    scaled = unit_scale(module)
    scaled(batches(1, length)[0])
    return module, scaled


# Its graph grows with the length: the first state is zero, and later ones are not.
STEPS = 3


def missing(scaled: nn.Module) -> frozenset[str]:
    units = matmuls_of(scaled).session.units
    units.settle()
    return frozenset(units.lacking)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    named = module.named_parameters()
    return {name: param.grad.clone() for name, param in named if param.grad is not None}


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", RECURRENT)
def test_zero_states_need_no_second_run(name: str) -> None:
    module, scaled = planned(RECURRENT[name], STEPS)
    count = len(operands_of(module, batches(1, STEPS)[0]))
    optimizer = torch.optim.SGD(scaled.parameters(), lr=1e-3)
    for step, x in enumerate(batches(10, STEPS)):
        found = operands_of(scaled, x)
        assert len(found) == count
        assert share_within(found.readings, 2) == 1.0
        if step:  # in the first backward pass gradients are measured
            assert share_within(found.gradients, 4) == 1.0
        optimizer.step()
    # There is nothing to take a unit from but of the first states.
    assert missing(scaled) == {"state.linear:input"}
    assert differing_parameters(scaled, batches(1, STEPS)[0]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_first_values_give_units_and_first_gradients_are_at_rms_1(name: str) -> None:
    module, scaled = planned(LATE[name])
    count = len(operands_of(module, batches(1)[0]))
    optimizer = torch.optim.Adam(scaled.parameters(), lr=1e-2)
    first: dict[str, float] = {}
    late: set[str] = set()
    for step, x in enumerate(batches(4)):
        found = operands_of(scaled, x)
        assert len(found) == count
        for fqn, gradient in gradients_of(scaled).items():
            if not gradient.any():
                late.add(fqn)
            else:
                first.setdefault(fqn, rms(gradient))
        if step > 1:  # in the call after the one in which they were first not zero
            assert not missing(scaled)
            assert share_within(found.readings, 4) == 1.0
            assert share_within(found.gradients, 4) == 1.0
        optimizer.step()
    # A tensor that cancels in a softmax stays small.
    assert first.pop("key.bias", 0.0) < 1e-5
    assert late & first.keys()
    for fqn, size in first.items():
        assert 2**-0.6 <= size <= 2**0.6, fqn
    assert differing_parameters(scaled, batches(1)[0]) == []


@pytest.mark.slow
def test_new_units_need_no_second_run_for_zero_tensors() -> None:
    def make() -> nn.Module:
        module = RECURRENT["gru"]()
        nn.init.zeros_(module.head.weight)
        return module

    module, scaled = planned(make, STEPS)
    count = len(operands_of(module, batches(1, STEPS)[0]))
    optimizer = torch.optim.Adam(scaled.parameters(), lr=1e-2)
    at_first = missing(scaled)
    for x in batches(6, STEPS):
        assert len(operands_of(scaled, x)) == count
        optimizer.step()
    assert missing(scaled) == {"state.linear:input"} < at_first


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("name", LATE)
def test_late_factors_apply_to_all_accumulated_batches(name: str) -> None:
    _, scaled = planned(LATE[name])
    optimizer = torch.optim.SGD(scaled.parameters(), lr=1e-2)
    first, *parts = batches(4)
    scaled(first).backward()
    optimizer.step()
    optimizer.zero_grad()
    alone = copy.deepcopy(scaled)
    for x in parts:
        scaled(x).backward()
    with only_rules(alone):
        for x in parts:
            alone(x).backward()
    gradients = pass_of(scaled, ParameterGradients)
    gradients.settle()
    expected = {
        name: gradient * 2.0 ** gradients.log2_factors[name]
        for name, gradient in gradients_of(alone).items()
    }
    assert_same_bits(gradients_of(scaled), expected)


def _at_the_first_gradient() -> tuple[nn.Module, Tensor]:
    _, scaled = planned(LATE["lora"])
    with torch.no_grad():
        scaled.b.weight.fill_(1e-3)
    return scaled, batches(1)[0]


def test_failed_backward_pass_does_not_affect_next() -> None:
    scaled, x = _at_the_first_gradient()

    def fail(_: Tensor) -> None:
        raise ValueError("of the user's")

    handle = scaled.a.weight.register_hook(fail)
    with pytest.raises(ValueError, match="of the user's"):
        scaled(x).backward()
    handle.remove()
    scaled.zero_grad()
    scaled(x).backward()
    assert all(2**-0.6 <= rms(g) <= 2**0.6 for g in gradients_of(scaled).values())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_create_graph_gradient_keeps_its_value() -> None:
    scaled, x = _at_the_first_gradient()
    other = copy.deepcopy(scaled)
    scaled(x).backward(create_graph=True)
    with only_rules(other):
        other(x).backward()
    assert torch.equal(scaled.a.weight.grad, other.a.weight.grad)
    scaled.zero_grad()
    scaled(x).backward()
    assert abs(math.log2(rms(scaled.a.weight.grad))) < 0.6


def test_autograd_grad_does_not_change_stored_gradients() -> None:
    scaled, x = _at_the_first_gradient()
    stored = torch.full_like(scaled.a.weight, math.nan)
    scaled.a.weight.grad = stored.clone()
    torch.autograd.grad(scaled(x), [scaled.a.weight])
    assert torch.equal(scaled.a.weight.grad.isnan(), stored.isnan())
    assert "a.weight" not in pass_of(scaled, ParameterGradients).log2_factors


def test_late_units_in_a_checkpoint() -> None:
    _, scaled = planned(lambda: Lora(is_checkpointed=True))
    optimizer = torch.optim.Adam(scaled.parameters(), lr=1e-2)
    assert missing(scaled)
    for x in batches(6):
        scaled.zero_grad()
        scaled(x).backward()
        optimizer.step()
    assert not missing(scaled)


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "wrap", [simulate_fp8, track_scales, copy.deepcopy], ids=["fp8", "tracked", "copied"]
)
@pytest.mark.parametrize("name", ["lora", "zero residual"])
def test_late_units_with_other_transforms(
    name: str, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(1)
    scaled = unit_scale(LATE[name]())
    scaled(batches(1)[0])
    scaled = wrap(scaled)
    optimizer = torch.optim.Adam(scaled.parameters(), lr=1e-2)
    for x in batches(8):
        scaled.zero_grad()
        scaled(x).backward()
        optimizer.step()
    assert not missing(scaled)
