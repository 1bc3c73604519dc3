"""Fused layers are decomposed where their matmuls change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.patches import opened_layers
from lightning_unitscale.transforms import (
    fp8_linears,
    lossless_unit_scale,
    simulate_fp8,
    unit_scale,
)
from tests.helpers import CalledOperators, assert_same_bits, captured_copy


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[..., :8].square().mean((1, 2))


def _encoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Encoder(), torch.randn(3, 5, 32)


def _both(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a module's results in training and in evaluation."""
    trained = module.train()(x).detach()
    with torch.no_grad():
        return trained, module.eval()(x)


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("transform", [simulate_fp8, fp8_linears])
def test_evaluation_in_fp8_is_in_fp8(
    transform: Callable[[nn.Module], nn.Module], is_captured: bool
) -> None:
    module, x = _encoder()
    with torch.no_grad():
        plain = module.eval()(x)
    new = captured_copy(transform(module)) if is_captured else transform(module)
    trained, evaluated = _both(new, x)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=0.0)
    assert (evaluated - plain).abs().max() > 1e-4
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow
def test_evaluation_by_rules_matches_training() -> None:
    module, x = _encoder()
    trained, evaluated = _both(unit_scale(module), x)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=0.0)


def test_lossless_evaluation_keeps_fused_kernel() -> None:
    module, x = _encoder()
    new = lossless_unit_scale(module, x)
    new(x)
    with torch.no_grad(), CalledOperators() as called:
        evaluated = new.eval()(x)
        assert called.names.count("_transformer_encoder_layer_fwd") == 2
        assert_same_bits(evaluated, module.eval()(x))


@pytest.mark.slow
def test_captured_lossless_evaluation_is_bit_identical() -> None:
    module, x = _encoder()
    new = captured_copy(lossless_unit_scale(module, x))
    new(x)
    with torch.no_grad():
        assert_same_bits(new.eval()(x), module.eval()(x))


@pytest.mark.parametrize("setting", [True, False])
def test_user_fastpath_setting_is_restored(setting: bool) -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(setting)
        with opened_layers(False):
            assert torch.backends.mha.get_fastpath_enabled() == setting
        with pytest.raises(KeyError), opened_layers(True):
            assert not torch.backends.mha.get_fastpath_enabled()
            raise KeyError
        assert torch.backends.mha.get_fastpath_enabled() == setting
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_lossless_first_call_in_evaluation_does_not_warn() -> None:
    module, x = _encoder()
    new = lossless_unit_scale(module, x)
    with torch.no_grad():
        assert_same_bits(new.eval()(x), module.eval()(x))
    assert "a fused inference kernel" in new.explain()
