"""Triton kernels of a statistics row: their bits in the interpreter, and what they compile to."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import statistics_row
from tests.helpers import CalledOperators
from tests.triton_helpers import CAPABILITIES, build, needs_triton, run_interpreted

pytestmark = needs_triton

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_triton_rows_have_the_bits_of_the_torch_operations() -> None:
    run_interpreted("scales/interpreted_statistics.py", has_loops=True)


def _arguments(dtype: str, layout: RowLayout, dims: int, is_long: bool = False) -> dict[str, Any]:
    """Types of arguments: with a factor, and exponents of a sample, if the layout has one."""
    from lightning_unitscale.scales.triton_statistics import constants_of

    integer = "i64" if is_long else "i32"
    arguments: dict[str, Any] = {
        **{"tensor": f"*{dtype}:16", "factor": "*fp32:16", "rows": "*fp64:16"},
        **{"numel": f"{integer}:16", "blocks": "i32", "sample_size": "i32:16"},
        **{"stretch": "i32", "remainder": "i64", "stride0": 1 if dims == 1 else integer},
    }
    for dim in range(1, 4):
        arguments[f"size{dim}"] = 1 if dims == 1 else integer
        arguments[f"stride{dim}"] = "i32:16" if dims == 1 else integer
    each = 16 // BYTES[dtype]
    return arguments | {
        "SAMPLED": layout.histogram and layout.sample_size is not None,
        "LONG": is_long,
        "EACH": each if dims == 1 else 2 if is_long else min(4, each),
        **constants_of(layout),
    }


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("dtype", "layout", "dims", "is_long"),
    [
        ("bf16", RowLayout(), 1, False),
        ("fp16", RowLayout(histogram=False), 1, True),
        ("fp32", RowLayout(), 1, False),
        ("fp64", RowLayout(sample_size=None), 1, False),
        ("bf16", RowLayout(sample_size=None), 4, False),
        ("fp32", RowLayout(), 4, True),
        ("bf16", RowLayout(tuple(NumberFormat(f"f{i}", 3, i) for i in range(1, 8))), 1, False),
    ],
    ids=["bf16", "fp16", "fp32", "fp64", "strided", "long", "seven formats"],
)
def test_triton_rows_spill_nothing(
    dtype: str, layout: RowLayout, dims: int, is_long: bool, capability: int
) -> None:
    from lightning_unitscale.scales.triton_statistics import NUM_WARPS, partial_rows

    arguments = _arguments(dtype, layout, dims, is_long)
    made = build(partial_rows, arguments, capability, NUM_WARPS)
    # Room for two programs on a multiprocessor, if the tensor has no gaps; subnormals are kept.
    assert made.spilled_bytes == 0 and ".ftz" not in made.ptx
    assert dims > 1 or made.registers <= 128
    # What lies together is read 16 bytes at a time.
    wide = "ld.global.v2.b64" if dtype == "fp64" else "ld.global.v4.b32"
    assert dims > 1 or wide in made.ptx
    # Counts of exponents are added up in shared memory, as integers; nothing else is atomic.
    atomic = set(re.findall(r"\b(?:red|atom)\.\S*", made.ptx))
    assert atomic <= ({"atom.shared.add.u32"} if layout.histogram else set())


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_triton_sum_of_rows_spills_nothing(capability: int) -> None:
    from lightning_unitscale.scales.triton_statistics import joint_row

    arguments = {"rows": "*fp64:16", "row": "*fp64:16", "num_rows": "i32", "num_counted": "i32"}
    constants = {"COLUMNS": 298, "NUM_HEAD": 18, "WIDTH": 32, "ROWS": 64}
    made = build(joint_row, arguments | constants, capability, 4)
    assert made.spilled_bytes == made.stack_bytes == 0
    assert not re.search(r"\b(red|atom)\.", made.ptx)


def test_triton_rows_are_one_operator_on_cuda() -> None:
    """Which compilers pass over, and whose shape they know; in place of dozens of operations."""
    with FakeTensorMode():
        tensor = torch.empty(70, 30, device="cuda", dtype=torch.bfloat16)
        factor = torch.ones((), device="cuda")
        with CalledOperators() as called:
            row = statistics_row(tensor, RowLayout(), factor=factor)
        names = [operator.name() for operator in called.operators]
        assert names == ["aten::detach", "lightning_unitscale::statistics_row"]
    assert row.shape == (RowLayout().num_columns,) and row.dtype == torch.float64
    assert row.device == factor.device
