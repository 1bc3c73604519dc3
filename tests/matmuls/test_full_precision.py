"""Units of a module in FP16 are those of the same module in FP32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.matmuls.module_matmuls import full_precision, runs_in_fp16
from lightning_unitscale.transforms import lossless_unit_scale
from tests.helpers import assert_same_bits


class Faint(nn.Module):
    """Gradients of 1e-10, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 64), nn.BatchNorm1d(64)
        self.second, self.last = nn.Linear(64, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(F.gelu(self.norm(self.first(x)))).relu()
        return 1e-7 * self.last(h).square().mean()


def _faint() -> tuple[Faint, Tensor]:
    torch.manual_seed(0)
    return Faint(), torch.randn(16, 32)


@pytest.mark.parametrize("how", ["true", "autocast"])
def test_fp16_units_match_fp32_units(how: str) -> None:
    module, x = _faint()
    expected = lossless_unit_scale(module, x).gauge()  # type: ignore[operator]
    if how == "true":
        module, x = copy.deepcopy(module).half(), x.half()
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        scaled = lossless_unit_scale(module, x)
    found = scaled.gauge()  # type: ignore[operator]
    assert found.keys() == expected.keys()
    assert min(pair.log2_gamma for pair in found.values()) < -30
    for name, pair in found.items():
        # Weights of 16 bits are other weights: an RMS may be on the other side of a boundary.
        assert abs(pair.log2_sigma - expected[name].log2_sigma) <= 1, name
        assert abs(pair.log2_gamma - expected[name].log2_gamma) <= 1, name
    assert_same_bits(dict(scaled.state_dict()), dict(module.state_dict()))


def test_full_precision_copy_restores_torch_state() -> None:
    module, _ = _faint()
    assert not runs_in_fp16(module)
    module.half()
    assert runs_in_fp16(module)
    values, trial = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
    torch.set_default_dtype(torch.float16)
    try:
        with pytest.raises(KeyError), torch.autocast("cpu", torch.float16), full_precision(trial):
            assert {one.dtype for one in trial.parameters()} == {torch.float32}
            assert torch.ones(1).dtype == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            raise KeyError
        assert torch.get_default_dtype() == torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(dict(module.state_dict()), dict(values))


def test_step_with_hard_coded_cast_is_measured_in_fp16() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.to(torch.float16)).square().mean()

    torch.manual_seed(0)
    module, x = Casts().half(), torch.randn(4, 8)
    with pytest.warns(UserWarning, match=r"Casts.forward: it runs in FP16 and not in FP32"):
        scaled = lossless_unit_scale(module, x)
    assert scaled.gauge()["layer.linear"].log2_gamma < 0  # type: ignore[operator]
    assert_same_bits(scaled(x), module(x))
    assert "1 of 1 matmuls scaled" in scaled.explain()  # type: ignore[operator]


@pytest.mark.filterwarnings("error")
def test_step_that_casts_to_dtype_attribute_is_measured_in_fp32() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.compute_dtype = torch.float16

        def forward(self, x: Tensor) -> Tensor:
            # Its gradients are below what FP16 can hold.
            return self.layer(x.to(self.compute_dtype)).square().mean().float() * 1e-9

    torch.manual_seed(0)
    module, x = Casts().half(), torch.randn(4, 8)
    scaled = lossless_unit_scale(module, x)
    assert scaled.gauge()["layer.linear"].log2_gamma < -28  # type: ignore[operator]
    assert scaled.compute_dtype is module.compute_dtype is torch.float16
