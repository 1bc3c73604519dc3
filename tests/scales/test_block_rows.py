"""Losses of a tensor to block formats, counted on whole blocks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_unitscale.formats import BLOCK_FORMATS, MXFP4, NVFP4, BlockFormat
from lightning_unitscale.quantize import quantize_blocks
from lightning_unitscale.scales.layout import BLOCK_COLUMNS, RowLayout
from lightning_unitscale.scales.statistics import block_rows
from lightning_unitscale.scales.torch_rows import block_row, sampled_blocks
from tests.helpers import sampled

FORMATS = list(BLOCK_FORMATS.values())


def counts(
    tensor: Tensor,
    axis: int,
    format: BlockFormat,
    scale: float | None = None,
    most: int | None = None,
) -> dict[str, float]:
    layout = RowLayout((), True, most, (format,))
    return dict(zip(BLOCK_COLUMNS, block_row(tensor, axis, layout, scale).tolist(), strict=True))


def wide_spread(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randn(shape, generator=generator) * 3
    return torch.randn(shape, generator=generator) * exponents.exp2()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("axis", [-1, 0, 1])
@pytest.mark.parametrize("scale", sampled([2.0**-3, None], 2))
def test_flushed_count_matches_quantization(
    format: BlockFormat, axis: int, scale: float | None
) -> None:
    tensor = wide_spread(5, 70, 33)
    own = scale if format.has_tensor_scale else None
    rounded = quantize_blocks(tensor, format, axis, own)
    found = counts(tensor, axis, format, scale)
    assert found["flushed"] == ((rounded == 0) & (tensor != 0)).sum()
    assert found["elements"] == tensor.numel()
    blocks = list(tensor.movedim(axis, -1).split(format.block_size, -1))
    largest = torch.cat([block.abs().amax(-1).flatten() for block in blocks]).double()
    assert found["blocks"] == largest.numel()
    assert found["log2_sum"] == pytest.approx(largest.log2().sum().item(), rel=1e-9)
    assert found["log2_square_sum"] == pytest.approx(largest.log2().square().sum().item(), rel=1e-9)


def test_out_of_range_scales_are_counted() -> None:
    rows = torch.ones(5, 16)
    rows[0, 0] = 2688.5  # 6 * 448 is the largest block of a tensor scale of 1
    rows[1] *= 2.0**-20  # below 6 * 2**-6
    rows[2] = 0.0
    rows[3, 0] = torch.nan
    found = counts(rows, -1, NVFP4, 1.0)
    assert (found["blocks"], found["saturated"], found["underflow"]) == (3, 1, 1)
    # The scale follows the tensor's own largest magnitude, so nothing saturates.
    found = counts(rows[:3], -1, NVFP4)
    assert (found["saturated"], found["underflow"]) == (0, 1)
    rows = torch.tensor([[1.0], [2.0**-126], [3e38]]).expand(3, 32)
    found = counts(rows, -1, MXFP4)
    assert (found["blocks"], found["saturated"], found["underflow"]) == (3, 0, 1)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "cut": lambda x: torch.cat([x, x])[:, 1:][x.shape[0] :][:, :, :-1],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sample_has_whole_blocks(kind: str, axis: int) -> None:
    tensor = LAYOUTS[kind](torch.arange(1.0, 40 * 70 * 33 + 1).view(40, 70, 33))
    found, numel = sampled_blocks(tensor, axis, 16, 1024)
    assert len(found) <= 64 < tensor.numel() / 16
    every, _ = sampled_blocks(tensor, axis, 16, None)
    known = {tuple(block) for block in every.tolist()}
    assert {tuple(block) for block in found.tolist()} <= known
    # No element is zero, but those that fill the last block of a line.
    assert numel == found.count_nonzero()


def test_sample_estimates_whole_tensor() -> None:
    tensor = wide_spread(512, 96)[:, :80]
    for axis in (0, 1):
        whole, part = (counts(tensor, axis, MXFP4, None, most) for most in (None, 8192))
        assert part["elements"] < whole["elements"] / 4
        shares = [each["flushed"] / each["elements"] for each in (whole, part)]
        assert shares[1] == pytest.approx(shares[0], rel=0.1)


def test_rows_of_several_batches_are_added_up() -> None:
    layout = RowLayout((), True, None, (MXFP4, NVFP4))
    rows = block_rows(layout)
    tensors = [wide_spread(4, 64), wide_spread(2, 48), torch.zeros(0, 4), torch.tensor(3.0)]
    taken = [rows.add(tensor, -1, None) for tensor in tensors]
    read = rows.send()
    found = read([taken[:2], [], taken[2:3], taken[3:]])
    expected = sum(block_row(tensor, -1, layout) for tensor in tensors[:2])
    assert isinstance(expected, Tensor)
    assert torch.equal(found[0], expected)
    assert not found[1:3].any() and found[3, :3].tolist() == [1, 0, 1]
