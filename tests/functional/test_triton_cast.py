"""The Triton cast to FP8: bits in the interpreter, compiled code, number of launches."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_unitscale.capture.fake_device import SimulatedDevice, simulating
from lightning_unitscale.functional.low_precision import (
    GRADIENTS,
    fp8_linear,
    fp8_matrices,
)
from tests.helpers import CalledOperators
from tests.triton_helpers import CAPABILITIES, build, needs_triton, run_interpreted

pytestmark = needs_triton


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_triton_cast_matches_torch_bit_for_bit() -> None:
    run_interpreted("functional/interpreted_cast.py")


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("source", ["bf16", "fp32"])
def test_triton_cast_spills_no_registers(source: str, capability: int) -> None:
    from lightning_unitscale.functional.triton_cast import NUM_WARPS, cast_tiles, constants_of

    counts = ("num_rows", "num_columns", "tiles", "row_stride", "rows_pitch", "turned_pitch")
    arguments = dict.fromkeys(counts, "i32:16") | {"tiles": "i32"}
    tensors = {"matrix": f"*{source}:16", "rows": "*u8:16", "turned": "*u8:16"}
    for dtype in GRADIENTS.values():
        for factor in ({"factor": "*fp32", "number": 1.0}, {"factor": None, "number": "fp32"}):
            given = {**arguments, **tensors, **factor, **constants_of(dtype)}
            # The transpose of a matrix in rows, as well.
            for strides in ({"column_stride": 1}, {"row_stride": 1, "column_stride": "i32:16"}):
                made = build(cast_tiles, {**given, **strides}, capability, NUM_WARPS)
                assert made.spilled_bytes == made.stack_bytes == 0
                # Room for four programs on a multiprocessor; subnormals are kept.
                assert made.registers <= 64 and ".ftz" not in made.ptx
                # Both results are written in wide pieces.
                assert "st.global.v4.b32" in made.ptx


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_triton_transpose_spills_no_registers(capability: int) -> None:
    from lightning_unitscale.functional.triton_cast import NUM_WARPS, TURNED_TILE, turn_tiles

    counts = ("num_rows", "num_columns", "row_stride")
    given = dict.fromkeys(counts, "i32:16") | {"tiles": "i32", "column_stride": 1}
    given |= {"matrix": "*u8:16", "turned": "*u8:16", "TILE": TURNED_TILE}
    made = build(turn_tiles, given, capability, NUM_WARPS)
    assert made.spilled_bytes == made.stack_bytes == 0
    assert made.registers <= 64
    assert "ld.global.v4.b32" in made.ptx and "st.global.v4.b32" in made.ptx


@pytest.mark.parametrize("frozen", [None, "input", "weight"])
@pytest.mark.parametrize("num_rows", [48, 41])
def test_linear_layer_has_one_triton_cast_per_operand(num_rows: int, frozen: str | None) -> None:
    """And nothing that copies, turns in memory or fills up, for any product."""
    device = torch.device("cuda")
    with SimulatedDevice(device), simulating(device):
        x = torch.empty(num_rows, 64, device=device, dtype=torch.bfloat16)
        w = torch.empty(32, 64, device=device, dtype=torch.bfloat16)
        x.requires_grad_(frozen != "input")
        w.requires_grad_(frozen != "weight")
        with CalledOperators() as called:
            y = fp8_linear(x, w, None, torch.bfloat16, *(1.0,) * 3)
            y.backward(torch.empty_like(y))
        assert (x.grad is None, w.grad is None) == (frozen == "input", frozen == "weight")
    names = called.names
    assert names.count("fp8_matrices") == 3
    assert names.count("_scaled_mm") == (3 if frozen is None else 2)
    # The scales of the products are filled in; views and what fake tensors ask for cost nothing.
    free = {"device", "view", "t", "detach", "empty_like", "full", "ones"}
    assert set(names) - free == {"fp8_matrices", "_scaled_mm"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bias_is_fused_into_16_bit_matmul(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    with SimulatedDevice(device), simulating(device):
        x, w, b = (
            torch.empty(shape, device=device, dtype=dtype).requires_grad_()
            for shape in ((48, 64), (32, 64), (32,))
        )
        with CalledOperators() as called:
            fp8_linear(x, w, b, dtype, *(1.0,) * 3).backward(
                torch.empty(48, 32, dtype=dtype, device=device)
            )
        assert b.grad is not None and b.grad.shape == (32,) and b.grad.dtype == dtype
    assert called.names.count("add") == (dtype is torch.float32)
    assert called.names.count("sum") == 1


@pytest.mark.parametrize("dtype", GRADIENTS.values(), ids=str)
def test_triton_cast_output_shapes(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        matrix = torch.empty(30, 7, device="cuda")
        casts = fp8_matrices(matrix, 0.5, dtype, turned=True)
        assert [(*cast.shape, cast.dtype) for cast in casts] == [(30, 16, dtype), (7, 32, dtype)]
