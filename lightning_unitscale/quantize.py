"""Round tensors to a number format or a block format, in the tensor's own type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from lightning_unitscale.formats import (
    FP32,
    BlockFormat,
    NumberFormat,
    get_format,
    get_number_format,
)
from lightning_unitscale.formats.round_numbers import (
    MANTISSA_BITS,
    TENSOR_SCALES,
    rounded,
    rounded_blocks,
)

FormatLike = str | NumberFormat | BlockFormat | tuple[int, int]
Rounding = Literal["nearest", "stochastic"]

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
            two neighbors).
        generator: Source of stochastic rounding: a generator, or ``None`` for torch's default one.
            A compiled graph cannot have generators. Pass a row of :func:`rounding_keys` there.
            Equal keys give equal results, whatever runs the graph.
        saturate: Whether out-of-range values, infinities included, become the largest number.
            ``None`` does so exactly for formats without infinities, as torch's casts do. With
            ``False``, they become NaN in such a format.

    Returns:
        A new tensor of the type and shape of ``tensor``. If its type lacks some numbers of the
        format (BF16 lacks FP16's 65504), the largest common one is the largest number.

    Raises:
        ValueError: If the format is unknown or finer or wider than FP32, or ``rounding`` is
            unknown.
        TypeError: If ``tensor`` is not real floating point, or an argument has the wrong type.
    """
    resolved = _in_fp32(get_number_format(format))
    if saturate is not None:
        check_flag("saturate", saturate)
    key = _checked_key(tensor, rounding, generator)
    return _StraightThrough.apply(tensor, rounded, resolved, saturate, key)


def quantize_blocks(
    tensor: Tensor,
    format: str | BlockFormat,
    axis: int | Sequence[int] = -1,
    tensor_scale: float | Tensor | None = None,
    rounding: Rounding = "nearest",
    generator: torch.Generator | Tensor | None = None,
    *,
    square: bool = False,
) -> Tensor:
    """Round every element of a tensor to a block format, whose blocks share a scale.

    A scale ``s`` of MX is the power of two ``2**(floor(log2(largest magnitude)) - max_exponent)``,
    at least 2**-127. One of NVFP4 is ``tensor_scale`` times the FP8 number nearest to ``largest /
    6 / tensor_scale``, among E4M3's normal numbers. An element ``x`` becomes ``s`` times the number
    nearest to ``x / s``, or the largest number if ``x / s`` is beyond it. Zeros keep their sign, a
    block of zeros stays one, and a block with NaN becomes NaN. An infinity of MX stays infinite in
    FP32 and BF16; in NVFP4 it becomes the largest number. The gradient passes unchanged.

    Args:
        tensor: FP32, BF16, FP16 or FP64 (rounded to FP32 first), of at least one dimension.
        format: A name such as ``"MXFP8"`` or ``"NVFP4"``, or a :class:`BlockFormat`.
        axis: Dimension along which blocks lie, or several, which are joined in the given order. The
            last block of a row has fewer elements if the size is not a multiple of the block size.
        tensor_scale: FP32 scale of NVFP4, positive, from 2**-120 to 2**116: a number, or a tensor
            that a block's scales can be multiplied by. A block's largest possible number is 2688
            times this. ``None`` is the tensor's largest magnitude divided by 2688, which takes one
            more pass over the tensor. The whole tensor becomes NaN if that is not finite.
        rounding: ``"nearest"``, ties to even, or ``"stochastic"``, of the elements; scales are
            rounded to nearest.
        generator: Source of stochastic rounding, as in :func:`quantize`.
        square: Whether blocks are squares in the last two dimensions, such as 16 x 16. ``axis``
            must be one of these. A matrix and its transpose then have the same numbers.

    Returns:
        A new tensor of the type, shape and strides of ``tensor``.

    Raises:
        ValueError: If the format, the axis, ``tensor_scale`` or ``rounding`` is invalid.
        TypeError: If ``tensor`` is not real floating point, or an argument has the wrong type.

    References:
        OCP Microscaling Formats (MX) v1.0, section 6.3; NVIDIA, "Pretraining Large Language Models
        with NVFP4" (arXiv 2509.25149), section 4 on squares and appendix B on the scales.
    """
    resolved = get_format(format)
    if not isinstance(resolved, BlockFormat):
        raise ValueError(
            f"format={resolved}: not a block format. Expected a block format such as 'MXFP8' or "
            "'NVFP4'. Pass one, or call quantize()."
        )
    check_flag("square", square)
    key = _checked_key(tensor, rounding, generator)
    axes = _checked_axes(tensor, axis, is_square=square)
    if tensor_scale is not None:
        _check_tensor_scale(tensor_scale, resolved)
    return _StraightThrough.apply(tensor, rounded_blocks, resolved, axes, tensor_scale, key, square)


def _checked_key(
    tensor: Tensor, rounding: Rounding, generator: torch.Generator | Tensor | None
) -> Tensor | None:
    """Check what both kinds of formats take, and return the key of a stochastic rounding."""
    check_rounding(rounding)
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        actual = f" of {tensor.dtype}" if isinstance(tensor, Tensor) else f"={shown(tensor)}"
        raise TypeError(
            f"tensor{actual}: only floating-point numbers can be rounded to a format. Expected "
            "a tensor of float32, bfloat16, float16 or float64. Convert it first."
        )
    if rounding == "stochastic":
        return _key_from(generator, tensor.device)
    if generator is not None:
        raise ValueError(
            f"generator={shown(generator)}: rounding='nearest' draws no random numbers. Expected "
            "None. Leave it out or pass rounding='stochastic'."
        )
    return None


def _checked_axes(tensor: Tensor, axis: int | Sequence[int], *, is_square: bool) -> tuple[int, ...]:
    """Return the axes of blocks, counted from the end."""
    dim = tensor.dim()
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    given = f"axis={shown(axis)}"
    if not axes or not all(type(one) is int and -dim <= one < dim for one in axes):
        raise ValueError(
            f"{given}: not dimensions of a tensor of shape {tuple(tensor.shape)}. Expected "
            f"numbers from {-dim} to {dim - 1}. Pass the dimension along which blocks lie."
        )
    axes = tuple(one % dim - dim for one in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"{given}: names a dimension twice. Expected each once. Remove one.")
    if is_square and (dim < 2 or len(axes) > 1 or axes[0] < -2):
        raise ValueError(
            f"{given}: square blocks lie in the last two dimensions of {dim}. Expected one of "
            "them. Pass axis=-1, or square=False."
        )
    return axes


def _check_tensor_scale(scale: object, format: BlockFormat) -> None:
    given = f"tensor_scale={shown(scale)}"
    if not format.has_tensor_scale:
        raise ValueError(
            f"{given}: {format} has scales for blocks only. Expected None. Leave it out."
        )
    if isinstance(scale, Tensor):
        return
    least, most = TENSOR_SCALES
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not least <= scale <= most:  # type: ignore[operator]
        raise ValueError(
            f"{given}: not a scale of a tensor. Expected a tensor, or a number from {least:.3g} "
            f"to {most:.3g}. Pass 1.0 for numbers near 1, or leave it out."
        )


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


def checked_format(format: FormatLike, *, given: str | None = None) -> NumberFormat | BlockFormat:
    """Return a format as ``get_format`` does, if FP32 has all its numbers."""
    resolved = get_format(format, given=given)
    return resolved if isinstance(resolved, BlockFormat) else _in_fp32(resolved, given)


def _in_fp32(resolved: NumberFormat, given: str | None = None) -> NumberFormat:
    if resolved.mantissa_bits > MANTISSA_BITS or resolved.max > FP32.max:
        raise ValueError(
            f"{given or f'format={resolved}'}: values are rounded in FP32, which cannot "
            f"represent all its numbers. Expected at most {MANTISSA_BITS} mantissa bits and a "
            f"maximum of at most {FP32.max:.3g}. Choose a smaller format."
        )
    return resolved


def check_rounding(rounding: object, *, argument: str = "rounding") -> None:
    """Refuse an unknown way of rounding."""
    advice = "leave the argument out for 'nearest'"
    check_choice(argument, rounding, get_args(Rounding), "unknown rounding", advice)


def _key_from(generator: torch.Generator | Tensor | None, device: torch.device) -> Tensor:
    # First, since Dynamo (2.14) cannot ask whether a tensor is a generator.
    if not isinstance(generator, Tensor):
        if generator is None or isinstance(generator, torch.Generator):
            return rounding_keys(1, generator, device=device)[0]
        expected = "a torch.Generator or a row of rounding_keys()"
        check_instance("generator", generator, Tensor, expected, "pass one of them")
    if generator.shape != (2,) or generator.dtype != torch.int64:
        raise ValueError(
            f"generator of shape {tuple(generator.shape)} and {generator.dtype}: not a key for "
            "stochastic rounding. Expected a row of rounding_keys(): 2 numbers of torch.int64. "
            "Pass rounding_keys(1)[0]."
        )
    return generator


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rounds: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_others = 1 + len(args)
        return rounds(tensor, *args)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad_output, *(None,) * ctx.num_others
