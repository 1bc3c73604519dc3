"""Metrics against torch's own reductions in double precision."""

import math

import pytest
import torch

from lightning_unitscale.scales.layout import MOMENT_COLUMNS, MOMENTS
from lightning_unitscale.transforms import Metrics


def expected(tensor: torch.Tensor) -> Metrics.Data:
    wide = tensor.detach().double()
    std = wide.std().item() if tensor.numel() > 1 else math.nan
    magnitude = wide.abs()
    return Metrics.Data(
        magnitude.mean().item(),
        wide.mean().abs().item(),
        std,
        magnitude.max().item(),
        magnitude.min().item(),
        tensor.numel(),
    )


def assert_close(found: Metrics.Data | None, wanted: Metrics.Data) -> None:
    assert found is not None
    for name in Metrics.names():
        value, other = getattr(found, name), getattr(wanted, name)
        # The mean may cancel to nothing, relative to what was added up.
        tolerance = {"rel": 1e-6, "abs": 1e-6 * (wanted.mean_abs or 1.0), "nan_ok": True}
        assert value == pytest.approx(other, **tolerance), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(40, 30),
        torch.randn(1000, dtype=torch.float64) * 1e-40 + 3e-40,
        torch.randn(30, 40).to(torch.bfloat16).t(),
        torch.randn(100).half()[::3],
        torch.tensor(-2.5),
        torch.full((7, 9), 0.1),
        torch.zeros(5),
        torch.tensor([0.0, -3.0, 2.0]),
        torch.ones(()).expand(16, 1024),
        torch.randn(6, 1).expand(6, 50),
        torch.randn(9, 9, requires_grad=True),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.dtype}",
)
def test_metrics_match_torch_reductions(tensor: torch.Tensor) -> None:
    metrics = Metrics(tensor)
    assert_close(metrics.fwd, expected(tensor))
    assert metrics.bwd is None
    metrics.set_bwd(2 * tensor)
    assert_close(metrics.bwd, expected(2 * tensor))


def test_constant_has_zero_std() -> None:
    assert Metrics(torch.full((1000,), -0.1)).fwd.std == 0.0


def test_nan_and_inf_are_not_hidden() -> None:
    broken = Metrics(torch.tensor([1.0, math.nan, 0.0])).fwd
    assert broken.numel == 3
    assert all(math.isnan(getattr(broken, name)) for name in Metrics.names() if name != "numel")
    masked = Metrics(torch.tensor([1.0, -math.inf, 2.0])).fwd
    assert (masked.mean_abs, masked.abs_mean, masked.abs_max) == (math.inf,) * 3
    assert math.isnan(masked.std)
    assert masked.abs_min == 1.0
    assert Metrics(torch.tensor([-math.inf])).fwd.abs_min == math.inf


def test_empty_tensor_has_only_numel() -> None:
    empty = Metrics(torch.zeros(0, 3)).fwd
    assert empty.numel == 0
    assert math.isnan(empty.mean_abs) and math.isnan(empty.abs_max)


def test_integer_tensor_is_an_error() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        Metrics(torch.arange(3))


def test_metric_names() -> None:
    assert Metrics.names() == ["mean_abs", "abs_mean", "std", "abs_max", "abs_min", "numel"]
    assert Metrics.full_names() == [Metrics.get_full_name(name) for name in Metrics.names()]
    assert Metrics.get_full_name("std") == "standard deviation"
    with pytest.raises(KeyError):
        Metrics.get_full_name("median")


def test_metric_names_match_reference() -> None:
    peer = pytest.importorskip("unit_scaling.transforms").Metrics
    assert Metrics.names() == peer.names()
    assert Metrics.full_names() == peer.full_names()


def test_equality_and_text() -> None:
    tensor = torch.randn(4)
    assert Metrics(tensor) == Metrics(tensor.clone())
    assert Metrics(tensor) != Metrics(tensor, tensor)
    assert Metrics(tensor) != "metrics"
    assert "mean_abs" in str(Metrics(tensor))


def test_moments_are_first_columns_of_row() -> None:
    assert MOMENTS.columns == MOMENT_COLUMNS
