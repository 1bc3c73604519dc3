"""Layers that torch evaluates as one kernel are opened where their products are to change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.graph.whole_layers import opened_layers
from lightning_unitscale.transforms import (
    fp8_linears,
    lossless_unit_scale,
    simulate_fp8,
    unit_scale,
)
from tests.helpers import assert_same_bits


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


def _both(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[str]]:
    """Its results in training and in evaluation, and what was rewritten for the latter."""
    trained = module.train()(x).detach()
    steps = steps_of(module)
    assert steps is not None
    count = len(steps.records)
    with torch.no_grad():
        evaluated = module.eval()(x)
    return trained, evaluated, [line for one in steps.records[count:] for line in one.changes]


def test_evaluation_in_fp8_is_in_fp8() -> None:
    module, x = _encoder()
    trained, evaluated, changes = _both(simulate_fp8(module), x)
    assert any("of 10 products rounded to E4M3FN" in one for one in changes)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=0.0)
    assert (evaluated - module.eval()(x)).abs().max() > 1e-4
    trained, evaluated, changes = _both(fp8_linears(module), x)
    assert any("8 of 10 products in FP8" in one for one in changes)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=0.0)
    assert torch.backends.mha.get_fastpath_enabled()


def test_evaluation_by_rules_is_that_of_training() -> None:
    module, x = _encoder()
    trained, evaluated, _ = _both(unit_scale(module), x)
    torch.testing.assert_close(evaluated, trained, rtol=1e-5, atol=0.0)


def test_a_run_that_keeps_its_bits_keeps_the_kernel() -> None:
    module, x = _encoder()
    _, evaluated, changes = _both(lossless_unit_scale(module, x), x)
    with torch.no_grad():
        assert_same_bits(evaluated, module.eval()(x))
    # It says so, as of every product that is left as it is.
    left = "2 products left as they are: layers.layers.0.transformer_encoder_layer_fwd, "
    assert any(one.startswith(left) for one in changes)


@pytest.mark.parametrize("setting", [True, False])
def test_the_users_setting_is_back(setting: bool) -> None:
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
