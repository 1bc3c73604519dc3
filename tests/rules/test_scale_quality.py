"""How near to RMS 1 whole models are, read off the operators that torch executes.

The lossless pass that follows the rules would hide a wrong factor behind a power of two, so the
rewritten function is checked separately too.
"""

import pytest
import torch
from torch import nn

from lightning_unitscale.rules.transform import unit_scale
from tests.rules.models import GPT, MODELS, GPTWithoutModules, tokens
from tests.rules.oracle import (
    differing_parameters,
    only_rules,
    operands_of,
    parameters_of,
    rms,
    rules_alone,
    share_within,
)

ALL = {
    **MODELS,
    "tied_gpt": lambda: (GPT(is_tied=True), (tokens(),)),
    "gpt_by_hand": lambda: (GPTWithoutModules(), (tokens(),)),
}
# Further from 1 than what the rules make of a model: what they have to be for.
_FAR = 0.7


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_operands_and_gradients_are_near_one(name: str) -> None:
    torch.manual_seed(1)
    module, inputs = ALL[name]()
    scaled = unit_scale(module)
    scaled(*inputs).backward()
    ours = operands_of(scaled, *inputs)
    assert share_within(ours.readings, 2) >= 0.95
    assert share_within(ours.gradients, 4) >= 0.9
    with only_rules(scaled):
        alone = operands_of(scaled, *inputs)
    assert share_within(alone.readings, 2) >= 0.95
    plain = operands_of(module, *inputs)
    assert share_within(plain.readings, 2) < _FAR
    assert share_within(plain.gradients, 4) < _FAR
    assert len(plain) == len(ours) == len(alone)

    # The gradients are those of the rewritten function, bit for bit, times powers of two, ...
    assert differing_parameters(scaled, *inputs) == []
    # ... and at RMS 1.
    gradients = [rms(param.grad) for param in scaled.parameters() if param.grad is not None]
    assert len(gradients) == len(list(scaled.parameters()))
    near = [0.7 <= gradient <= 1.42 for gradient in gradients if gradient > 0]
    assert sum(near) >= 0.9 * len(near) > 0


@pytest.mark.slow
def test_deep_model_is_near_unit_scale() -> None:
    torch.manual_seed(1)
    scaled = unit_scale(GPT(32, 8))
    scaled(tokens())
    alone = rules_alone(scaled)
    readings = operands_of(alone, tokens()).readings
    assert share_within(readings, 1.6) >= 0.99
    depths = {
        value.info.num_residuals for fqn, value in parameters_of(scaled).items() if "mlp" in fqn
    }
    assert depths == {16}


@pytest.mark.slow_cases
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_initialization_scale_does_not_change_loss(size: float) -> None:
    torch.manual_seed(1)
    module = GPT(32, 2)
    with torch.no_grad():
        for param in module.parameters():
            if param.dim() == 2:
                param.mul_(size)
    losses = []
    for value in (module, _reset(module, 1 / size)):
        scaled = unit_scale(value)
        torch.manual_seed(2)
        losses.append(scaled(tokens()))
    torch.testing.assert_close(losses[0], losses[1], rtol=2e-3, atol=0.0)


def _reset(module: nn.Module, size: float) -> nn.Module:
    with torch.no_grad():
        for param in module.parameters():
            if param.dim() == 2:
                param.mul_(size)
    return module
