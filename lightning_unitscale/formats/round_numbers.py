"""Compute on FP32 numbers and their codes what rounds them to a format, or blocks of them.

All arithmetic is on FP32 and on its codes, and purely functional. So eager, AOTAutograd and
Inductor give the same bits on every device. Casting to the format's own type and back would not
work. Inductor drops a cast to FP16 or BF16 before one to FP32. Triton has no FP8 on older GPUs. On
a CPU, casting from ``float8_e4m3fn`` takes four times as long as this whole code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_unitscale.formats import E4M3FN, FP32, BlockFormat, NumberFormat

# FP32, in which everything is computed.
_BIAS = 127
MANTISSA_BITS = 23
_EXPONENT_CODES = 0xFF << MANTISSA_BITS

_LOW_32_BITS = 0xFFFF_FFFF
# With these scales of a tensor, neither the factors of a block nor its largest number leave FP32.
TENSOR_SCALES = 2.0**-120, 2.0**116


def rounded(
    tensor: Tensor, format: NumberFormat, saturate: bool | None = None, key: Tensor | None = None
) -> Tensor:
    """Run :func:`quantize` without checks and gradient. A key rounds stochastically."""
    clips = format.finite_only if saturate is None else saturate
    wide = tensor.detach().float()
    if format.exponent_bits == FP32.exponent_bits:
        result = _round_codes(wide, format, key)
    else:
        # Infinity comes from FP32's own overflow. The other cases do not need it.
        result = _round_multiples(wide, format, key, overflows=not clips and format.has_infinity)
    if clips:
        largest = _largest_in_both(format, tensor.dtype)
        result = result.clamp_(-largest, largest)
    elif format.finite_only:
        result = torch.where(result.abs() > format.max, math.nan, result)
    return result.to(tensor.dtype)


def rounded_blocks(
    tensor: Tensor,
    format: BlockFormat,
    axes: tuple[int, ...],
    tensor_scale: float | Tensor | None = None,
    key: Tensor | None = None,
    square: bool = False,
) -> Tensor:
    """Run :func:`quantize_blocks` without checks and gradient, along axes counted from the end."""
    if tensor.numel() == 0:
        return tensor.clone()
    wide = tensor.detach().float()
    blocks, dims, spread = in_blocks(wide, axes, format.block_size, square)
    # Two factors follow, each about the square root of the scale, since 2**-127 and 2**128 are no
    # normal numbers.
    amax = blocks.abs().amax(dims, keepdim=True)
    before, *after = map(spread, block_scales(amax, format, tensor_scale))
    result = rounded(wide * before, format.element, True, key).mul_(after[0]).mul_(after[1])
    if format.has_tensor_scale:
        # A scale may be rounded up, beyond the largest number of the tensor's type.
        largest = min(torch.finfo(tensor.dtype).max, FP32.max)
        result = result.clamp_(-largest, largest)
    made = result.to(tensor.dtype)
    # A graph's operators may depend on the strides.
    return made if made.stride() == tensor.stride() else torch.empty_like(tensor).copy_(made)


def in_blocks(
    wide: Tensor, axes: tuple[int, ...], size: int, is_square: bool
) -> tuple[Tensor, tuple[int, ...], Callable[[Tensor], Tensor]]:
    """Return a tensor in blocks, their dimensions, and a function that spreads their factors."""
    pad = torch.nn.functional.pad

    def spread_along(factors: Tensor, axis: int, num_elements: int) -> Tensor:
        # Expanded and cut, Inductor of torch 2.13 reads other memory in a last partial block.
        index = torch.arange(num_elements, device=wide.device) // size
        return factors.index_select(axis, index)

    if is_square:
        rows, columns = wide.shape[-2:]
        padded = pad(wide, (0, -columns % size, 0, -rows % size))
        squares = padded.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))

        def spread_square(factors: Tensor) -> Tensor:
            return spread_along(spread_along(factors[..., 0, :, 0], -2, rows), -1, columns)

        return squares, (-3, -1), spread_square
    ends = tuple(range(-len(axes), 0))
    moved = wide.movedim(axes, ends)
    flat = moved.flatten(-len(axes))
    blocks = pad(flat, (0, -flat.shape[-1] % size)).unflatten(-1, (-1, size))

    def spread(factors: Tensor) -> Tensor:
        elements = spread_along(factors[..., 0], -1, flat.shape[-1])
        return elements.reshape(moved.shape).movedim(ends, axes)

    return blocks, (-1,), spread


def block_scales(
    largest: Tensor, format: BlockFormat, tensor_scale: float | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors on the elements of each block before, and both after they are rounded.

    They follow from the largest magnitude of each block.
    """
    if format.has_tensor_scale:
        least, most = E4M3FN.smallest_normal, E4M3FN.max
        # CUDA divides by a number in another way than by a tensor.
        if tensor_scale is None:
            outer = largest.amax() / largest.new_full((), format.largest_block)
            outer = outer.clamp(min=TENSOR_SCALES[0])
        elif isinstance(tensor_scale, Tensor):
            outer = tensor_scale.detach().float()
        else:
            outer = largest.new_full((), tensor_scale)
        scale = largest / largest.new_full((), format.element.max) / outer
        scale = rounded(scale.clamp(least, most), E4M3FN)
        return (1.0 / outer) / scale, outer * scale, torch.ones_like(scale)
    # The exponent is that of the code, and all subnormal numbers have the smallest scale.
    exponents = (largest.view(torch.int32) >> MANTISSA_BITS) - _BIAS - format.element.max_exponent
    exponents = exponents.clamp_(min=-_BIAS)
    half = exponents >> 1
    before, first, second = (
        ((power + _BIAS) << MANTISSA_BITS).view(torch.float32)
        for power in (-exponents, half, exponents - half)
    )
    return before, torch.where(largest.isnan(), math.nan, first), second


def _round_multiples(
    wide: Tensor, format: NumberFormat, key: Tensor | None, *, overflows: bool
) -> Tensor:
    """Round to multiples of the format's spacing at each value's exponent."""
    # The spacing is a power of two, so both multiplications are exact. It stays constant below the
    # smallest normal, which makes subnormals. It also stays constant at the top, so out-of-range
    # values remain so. Values keep their sign, also if they become zero.
    lowest = (format.min_exponent + _BIAS) << MANTISSA_BITS
    highest = (format.max_exponent + _BIAS) << MANTISSA_BITS
    exponents = (wide.view(torch.int32) & _EXPONENT_CODES).clamp_(lowest, highest)
    spacing = exponents.sub_(format.mantissa_bits << MANTISSA_BITS)
    inverse = ((2 * _BIAS << MANTISSA_BITS) - spacing).view(torch.float32)
    multiples = wide * inverse
    multiples = multiples.round_() if key is None else _round_up_or_down(multiples, key)
    if not overflows:
        return multiples.mul_(spacing.view(torch.float32))
    # Shift the format's first out-of-range power of two to FP32's, so that FP32 overflows.
    lift = _BIAS - format.max_exponent
    lifted = spacing.add_(lift << MANTISSA_BITS).view(torch.float32)
    return multiples.mul_(lifted).mul_(2.0**-lift)


def _round_up_or_down(multiples: Tensor, key: Tensor) -> Tensor:
    """Add a uniform number of [0, 1) and truncate, without rounding the sum."""
    below = multiples.floor()
    # 23 bits and a half: symmetric, never a tie with a normal number's fraction, exact in FP32.
    uniform = (_random_bits(multiples, key) >> 9).float().add_(0.5).mul_(2.0**-23)
    # A difference of infinities is NaN, which compares false.
    result = below + (uniform < multiples - below)
    return torch.copysign(result, multiples)


def _round_codes(wide: Tensor, format: NumberFormat, key: Tensor | None) -> Tensor:
    """Round to a format with FP32's exponents: add to the codes, then truncate them."""
    # Codes have the order of the numbers, through subnormals and up to infinity. So a carry out of
    # the mantissa gives the right number.
    num_cut = MANTISSA_BITS - format.mantissa_bits
    if num_cut == 0:
        return wide.clone()
    codes = wide.view(torch.int32)
    if key is None:
        is_odd = (codes >> num_cut) & 1
        up = is_odd.add_((1 << (num_cut - 1)) - 1)
    else:
        up = (_random_bits(wide, key) >> (32 - num_cut)).to(torch.int32)
    result = up.add_(codes).bitwise_and_(-1 << num_cut).view(torch.float32)
    # A carry changes some codes of NaN into other values.
    return torch.where(wide.isfinite(), result, wide)


def _random_bits(like: Tensor, key: Tensor) -> Tensor:
    """Return 32 random bits per element, as INT64: a hash of its position under a key.

    Unlike a generator's state, a hash gives a graph the same bits wherever and however often it
    runs (a checkpoint's second forward pass). It also leaves the random numbers of the user's
    dropout unchanged. INT64 holds every multiplication, so nothing wraps around.

    References:
        T. Mueller's integer hash, as in H2 and Postgres: two rounds of xorshift and multiplication
        by 0x45D9F3B, here with half of the key before each.
    """
    bits = torch.arange(like.numel(), device=like.device).view(like.shape)
    for half in key.unbind():
        bits.bitwise_xor_(half).bitwise_and_(_LOW_32_BITS)
        bits.bitwise_xor_(bits >> 16).mul_(0x45D9F3B).bitwise_and_(_LOW_32_BITS)
    return bits.bitwise_xor_(bits >> 16)


def _largest_in_both(format: NumberFormat, dtype: torch.dtype) -> float:
    """Return the largest number of a format that a type also has."""
    info = torch.finfo(dtype)
    precision = round(-math.log2(info.eps))
    if format.mantissa_bits <= precision and format.max <= info.max:
        return format.max
    exponent = min(format.max_exponent, math.frexp(info.max)[1] - 1)
    return math.ldexp(2.0 - 2.0 ** -min(format.mantissa_bits, precision), exponent)
