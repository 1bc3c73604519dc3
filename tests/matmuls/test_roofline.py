"""The FLOPs and bytes of a block, against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.fp8_roofline import ATTENTION, GPU, MATMULS, REST, graph_of, rows_of, work_of

WIDTH, TOKENS = 256, 1024


@pytest.mark.parametrize("is_fp8", [False, True])
def test_flops_of_transformer_block(is_fp8: bool) -> None:
    work = work_of(graph_of(WIDTH, TOKENS, is_fp8=is_fp8), GPU())
    # Weights of 12 squares, in three matmuls; two matmuls forward and five backward, halved.
    assert work[MATMULS].tflops * 1e12 == pytest.approx(2 * 3 * TOKENS * 12 * WIDTH**2)
    assert work[ATTENTION].tflops * 1e12 == pytest.approx(7 * TOKENS * (TOKENS // 8) * WIDTH)
    assert work[REST].tflops == 0


def test_fused_operations_read_and_write_once() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return ((x.t() + 1).sin() @ weight).exp() * 2

    x, weight = torch.ones(4, 8), torch.ones(4, 2)
    work = work_of(make_fx(step)(x, weight).graph, GPU(bandwidth=1e-3))
    assert work[MATMULS].gigabytes * 1e9 == pytest.approx(4 * (8 * 4 + 4 * 2 + 8 * 2))
    # The input read and its sine written, the matmul read and the result written.
    assert work[REST].gigabytes * 1e9 == pytest.approx(4 * (2 * 32 + 2 * 16))
    assert work[REST].milliseconds == pytest.approx(4 * 96 / 1e9 * 1e3)


def test_fp8_speedup_is_at_most_two() -> None:
    *kinds, total = rows_of(WIDTH, TOKENS, GPU(bf16=1.0, fp8=2.0))
    assert [row["of"] for row in kinds] == [MATMULS, ATTENTION, REST]
    assert kinds[0]["BF16 / FP8"] == pytest.approx(2)
    assert kinds[1]["BF16 / FP8"] == 1 < total["BF16 / FP8"] < 2
    assert total["FP8 milliseconds"] == pytest.approx(sum(row["FP8 milliseconds"] for row in kinds))
