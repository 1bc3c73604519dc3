"""Round tensors to a number format, in the tensor's own type.

All arithmetic is on FP32 and on its codes, and purely functional. So eager, AOTAutograd and
Inductor give the same bits on every device. Casting to the format's own type and back would not
work. Inductor drops a cast to FP16 or BF16 before one to FP32. Triton has no FP8 on older GPUs. On
a CPU, casting from ``float8_e4m3fn`` takes four times as long as this whole code.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_unitscale.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_instance,
    shown,
)
from lightning_unitscale.formats import FP32, NumberFormat, get_format

FormatLike = str | NumberFormat | tuple[int, int]
Rounding = Literal["nearest", "stochastic"]

# FP32, in which everything is computed.
_BIAS = 127
_MANTISSA_BITS = 23
_EXPONENT_CODES = 0xFF << _MANTISSA_BITS

_LOW_32_BITS = 0xFFFF_FFFF
_KEY_VALUES = 1 << 32


def quantize(
    tensor: Tensor,
    format: FormatLike,
    rounding: Rounding = "nearest",
    generator: torch.Generator | Tensor | None = None,
    *,
    saturate: bool | None = None,
) -> Tensor:
    """Round every element of a tensor to a number of a format.

    With the defaults the result has the bits of ``tensor.to(dtype).to(tensor.dtype)``, where
    ``dtype`` is the format's own type in torch. Subnormals are exact, zeros keep their sign, and
    NaN stays NaN. Out-of-range values become infinity, or the largest number without infinities.
    The gradient passes unchanged (straight through).

    Args:
        tensor: FP32, BF16, FP16 or FP64, of any shape. FP64 is rounded to FP32 first, as torch's
            own casts do.
        format: A name such as ``"E4M3FN"``, a :class:`NumberFormat`, or ``(exponent_bits,
            mantissa_bits)``.
        rounding: ``"nearest"``, ties to even, or ``"stochastic"``: up or down with probabilities
            that make the expected result the value itself (up to 2**-24 of the distance between the
            two neighbours).
        generator: Source of stochastic rounding: a generator, or ``None`` for torch's default one.
            A compiled graph cannot have generators. Pass a row of :func:`rounding_keys` there.
            Equal keys give equal results, whatever runs the graph.
        saturate: Whether out-of-range values, infinities included, become the largest number.
            ``None`` does so exactly for formats without infinities, as torch's casts do. ``False``
            gives such a format NaN.

    Returns:
        A new tensor of the type and shape of ``tensor``. If its type lacks some numbers of the
        format (BF16 lacks FP16's 65504), the largest common one is the largest number.

    Raises:
        ValueError: If the format is unknown or finer or wider than FP32, or ``rounding`` is
            unknown.
        TypeError: If ``tensor`` is not real floating point, or an argument has the wrong type.
    """
    resolved = checked_format(format)
    check_rounding(rounding)
    if saturate is not None:
        check_flag("saturate", saturate)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        actual = f" of {tensor.dtype}" if isinstance(tensor, Tensor) else f"={shown(tensor)}"
        raise TypeError(
            f"tensor{actual}: only floating-point numbers can be rounded to a format. Expected "
            "a tensor of float32, bfloat16, float16 or float64. Convert it first."
        )
    key = None
    if rounding == "stochastic":
        key = _key_from(generator, tensor.device)
    elif generator is not None:
        raise ValueError(
            f"generator={shown(generator)}: rounding='nearest' draws no random numbers. Expected "
            "None. Leave it out or pass rounding='stochastic'."
        )
    return _StraightThrough.apply(tensor, resolved, saturate, key)


def rounding_keys(
    count: int,
    generator: torch.Generator | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return keys of independent stochastic roundings, as an input of a graph.

    Args:
        count: Number of keys.
        generator: Source of the keys. ``None`` means torch's default generator of ``device``.
        device: Device of the keys.

    Returns:
        INT64 of shape ``(count, 2)``. A row is a ``generator`` of :func:`quantize`.
    """
    check_count("count", count, least=0)
    if generator is not None:
        kind, advice = torch.Generator, "leave it out for torch's default one"
        check_instance("generator", generator, kind, "a torch.Generator", advice)
    where = device if generator is None else generator.device
    keys = torch.randint(_KEY_VALUES, (count, 2), generator=generator, device=where)
    return keys if device is None else keys.to(device)


def checked_format(format: FormatLike, *, given: str | None = None) -> NumberFormat:
    """Return a format as ``get_format`` does, if FP32 has all its numbers."""
    resolved = get_format(format, given=given)
    if resolved.mantissa_bits > _MANTISSA_BITS or resolved.max > FP32.max:
        raise ValueError(
            f"{given or f'format={resolved}'}: FP32, in which values are rounded, does not have "
            f"all its numbers. Expected at most {_MANTISSA_BITS} mantissa bits and a maximum of at "
            f"most {FP32.max:.3g}. Choose a smaller format."
        )
    return resolved


def check_rounding(rounding: object) -> None:
    """Refuse an unknown way of rounding."""
    advice = "leave the argument out for 'nearest'"
    check_choice("rounding", rounding, get_args(Rounding), "unknown rounding", advice)


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


def _round_multiples(
    wide: Tensor, format: NumberFormat, key: Tensor | None, *, overflows: bool
) -> Tensor:
    """Round to multiples of the format's spacing at each value's exponent."""
    # The spacing is a power of two, so both multiplications are exact. It stays constant below the
    # smallest normal, which makes subnormals. It also stays constant at the top, so out-of-range
    # values remain so. Values keep their sign, also if they become zero.
    lowest = (format.min_exponent + _BIAS) << _MANTISSA_BITS
    highest = (format.max_exponent + _BIAS) << _MANTISSA_BITS
    exponents = (wide.view(torch.int32) & _EXPONENT_CODES).clamp_(lowest, highest)
    spacing = exponents.sub_(format.mantissa_bits << _MANTISSA_BITS)
    inverse = ((2 * _BIAS << _MANTISSA_BITS) - spacing).view(torch.float32)
    multiples = wide * inverse
    multiples = multiples.round_() if key is None else _round_up_or_down(multiples, key)
    if not overflows:
        return multiples.mul_(spacing.view(torch.float32))
    # Shift the format's first out-of-range power of two to FP32's, so that FP32 overflows.
    lift = _BIAS - format.max_exponent
    lifted = spacing.add_(lift << _MANTISSA_BITS).view(torch.float32)
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
    num_cut = _MANTISSA_BITS - format.mantissa_bits
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


def _key_from(generator: torch.Generator | Tensor | None, device: torch.device) -> Tensor:
    if generator is None or isinstance(generator, torch.Generator):
        return rounding_keys(1, generator, device=device)[0]
    expected = "a torch.Generator or a row of rounding_keys()"
    check_instance("generator", generator, Tensor, expected, "pass one of them")
    if generator.shape != (2,) or generator.dtype != torch.int64:
        raise ValueError(
            f"generator of shape {tuple(generator.shape)} and {generator.dtype}: no key of a "
            "stochastic rounding. Expected a row of rounding_keys(), 2 numbers of torch.int64. "
            "Pass rounding_keys(1)[0]."
        )
    return generator


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, format: NumberFormat, saturate: bool | None, key: Tensor | None
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        return rounded(tensor, format, saturate, key)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return grad_output, None, None, None
