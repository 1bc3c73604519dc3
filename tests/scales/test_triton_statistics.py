"""Triton kernels of statistics: bits in the interpreter, and compiled code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_unitscale.scales.layout import MOMENTS, RowLayout
from lightning_unitscale.scales.statistics import statistics_row
from tests.helpers import CalledOperators
from tests.triton_helpers import CAPABILITIES, build, needs_triton, run_interpreted

pytestmark = needs_triton

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_triton_rows_match_torch_bit_for_bit() -> None:
    run_interpreted("scales/interpreted_statistics.py", has_loops=True)


def _arguments(dtype: str, *, is_sampled: bool, is_plain: bool, is_long: bool) -> dict[str, Any]:
    """Types of arguments, and constants."""
    integer = "i64" if is_long else "i32"
    each = 16 // BYTES[dtype]
    strided = [f"{name}{dim}" for name in ("size", "stride") for dim in range(4)]
    return {
        **{"tensor": f"*{dtype}:16", "parts": "*fp64:16", "exponents": "*i32:16"},
        **{"counts": "*i64:16", "numel": integer, "sample_stride": integer},
        **dict.fromkeys(("row", "slots", "sample_slots", "repeats"), "i32"),
        **dict.fromkeys(("blocks", "num_programs", "sampled"), "i32"),
        **dict.fromkeys(strided, None if is_plain else integer),
        **{"SAMPLED": is_sampled, "ALIGNED": True, "LONG": is_long, "THREADS": 256},
        **{"SAMPLE": 2048, "EACH": each if is_plain else 2 if is_long else min(4, each)},
    }


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_sampled", [True, False], ids=["light", "exact"])
@pytest.mark.parametrize(
    ("dtype", "is_plain", "is_long"),
    [
        ("bf16", True, False),
        ("fp16", True, True),
        ("fp32", True, False),
        ("fp64", True, False),
        ("bf16", False, False),
        ("fp32", False, True),
    ],
    ids=["bf16", "fp16", "fp32", "fp64", "strided", "long"],
)
def test_triton_rows_spill_no_registers(
    dtype: str, is_plain: bool, is_long: bool, is_sampled: bool, capability: int
) -> None:
    from lightning_unitscale.scales.triton_kernels import partial_rows
    from lightning_unitscale.scales.triton_statistics import NUM_WARPS

    arguments = _arguments(dtype, is_sampled=is_sampled, is_plain=is_plain, is_long=is_long)
    made = build(partial_rows, arguments, capability, NUM_WARPS)
    assert made.spilled_bytes == made.stack_bytes == 0
    assert ".ftz" not in made.ptx  # subnormals are kept
    # Room for three programs on a multiprocessor, if the tensor has no gaps.
    assert not is_plain or made.registers <= 80
    # Adjacent elements are read 16 bytes at a time.
    wide = "ld.global.v2.b64" if dtype == "fp64" else "ld.global.v4.b32"
    assert not is_plain or wide in made.ptx
    # Counts of exponents are added up in shared memory, as integers; nothing else is atomic.
    atomic = set(re.findall(r"\b(?:red|atom)\.\S*", made.ptx))
    assert atomic <= ({"atom.shared.add.u32"} if is_sampled else set())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [RowLayout().measured, MOMENTS], ids=["light", "exact"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_triton_sum_of_parts_spills_no_registers(capability: int, layout: RowLayout) -> None:
    from lightning_unitscale.scales.triton_kernels import joint_rows

    arguments = {
        **{"parts": "*fp64:16", "exponents": "*i32:16", "counts": "*i64:16", "rows": "*fp64:16"},
        **{"slots": "i32", "sample_slots": "i32", "ROWS": 64},
        **{"COLUMNS": layout.num_columns, "SAMPLED": layout.is_sampled},
    }
    made = build(joint_rows, arguments, capability, 4)
    assert made.spilled_bytes == made.stack_bytes == 0
    assert not re.search(r"\b(red|atom)\.", made.ptx)


def test_triton_rows_are_one_operator_on_cuda() -> None:
    """Compilers do not trace this operator but know its shape. It replaces dozens of operations."""
    with FakeTensorMode():
        tensor = torch.empty(70, 30, device="cuda", dtype=torch.bfloat16)
        layout = RowLayout().measured
        with CalledOperators() as called:
            row = statistics_row(tensor, layout)
        names = [operator.name() for operator in called.operators]
        assert names == ["aten::detach", "lightning_unitscale::statistics_row"]
    assert row.shape == (layout.num_columns,) and row.dtype == torch.float64
    assert row.device == tensor.device
