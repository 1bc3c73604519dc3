"""FP8 matrices of any size, and devices without FP8 matmuls."""

import pytest
import torch

from lightning_unitscale.functional.low_precision import scaled_matmul, why_no_fp8
from tests.helpers import assert_same_bits


@pytest.mark.parametrize("shape", [(16, 16), (5, 7), (33, 17), (1, 1), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("num_columns", [32, 16, 17, 10, 1])
@pytest.mark.parametrize("kinds", ["e4m3fn e4m3fn", "e5m2 e4m3fn", "e4m3fn e5m2"])
def test_scaled_matmul_of_any_size(shape: tuple[int, int], kinds: str, num_columns: int) -> None:
    """Small integers are exact in both formats, and so are their sums in FP32."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-3, 4, shape, generator=generator).float()
    columns = torch.randint(-3, 4, (num_columns, shape[1]), generator=generator).float()
    first, second = (getattr(torch, f"float8_{value}") for value in kinds.split())
    made = scaled_matmul(rows.to(first), columns.to(second), torch.tensor(0.5), torch.float32)
    assert made.is_contiguous()
    assert_same_bits(made + 0.0, 0.5 * (rows @ columns.T) + 0.0)


def test_scaled_matmul_of_transposed_operands() -> None:
    rows = torch.arange(-8.0, 8.0).repeat(16, 1)
    turned = rows.to(torch.float8_e4m3fn).t()
    made = scaled_matmul(turned, turned, torch.ones(()), torch.bfloat16)
    assert_same_bits(made, (rows.t() @ rows).bfloat16())


def test_devices_without_fp8_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_fp8(torch.device("cpu")) is None
    assert "type 'mps'" in str(why_no_fp8(torch.device("mps")))
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.version, "hip", None)
    reason = why_no_fp8(torch.device("cuda", 0))
    assert reason == "A100 has compute capability 8.0, FP8 needs 8.9"
    for capability in ((8, 9), (9, 0), (10, 0)):  # noqa: B007
        assert why_no_fp8(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "AMD" in str(why_no_fp8(torch.device("cuda", 0)))
