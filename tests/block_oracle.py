"""Block formats by a plain reading of the specifications, in exact rationals, and by torchao."""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from lightning_unitscale.formats import E4M3FN, BlockFormat, NumberFormat

# The names by which torchao has the elements of MX. It has no E2M3 or E3M2 type in torch.
_TORCHAO_ELEMENTS = {
    "MXFP8_E4M3": torch.float8_e4m3fn,
    "MXFP8_E5M2": torch.float8_e5m2,
    "MXFP6_E2M3": "fp6_e2m3",
    "MXFP6_E3M2": "fp6_e3m2",
    "MXFP4": torch.float4_e2m1fn_x2,
}


def numbers(format: NumberFormat) -> list[Fraction]:
    """Every finite number of a format from zero up."""
    steps = range(2**format.mantissa_bits)
    found = [step * Fraction(format.smallest_subnormal) for step in steps]
    for exponent in range(format.min_exponent, format.max_exponent + 1):
        power = Fraction(2) ** exponent
        found += [power + step * power / 2**format.mantissa_bits for step in steps]
    return [number for number in found if number <= Fraction(format.max)]


def nearest(value: Fraction, table: Sequence[Fraction]) -> Fraction:
    """The nearest of some numbers of a format, of two the one with an even code."""
    at = min(range(len(table)), key=lambda code: (abs(table[code] - abs(value)), code % 2))
    return math.copysign(1, value) * table[at] if value else Fraction(0)


def floor_log2(value: Fraction) -> int:
    """The exponent of the largest power of two that is not above a positive number."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def by_reading(
    block: Sequence[float], format: BlockFormat, tensor_scale: float = 1.0
) -> list[float]:
    """Round one block: OCP MX 1.0, section 6.3, or arXiv 2509.25149, appendix B."""
    values, table = [Fraction(value) for value in block], numbers(format.element)
    largest = max(map(abs, values))
    if format.scale == "E8M0":
        exponent = floor_log2(largest) if largest else -(2**10)
        scale = Fraction(2) ** max(exponent - format.element.max_exponent, -127)
        return [float(scale * nearest(value / scale, table)) for value in values]
    # The block's scale is in FP8, whose subnormal numbers are not used.
    normal = [one for one in numbers(E4M3FN) if one >= Fraction(E4M3FN.smallest_normal)]
    wanted = largest / Fraction(format.element.max) / Fraction(tensor_scale)
    codes = [(abs(one - wanted), code % 2, one) for code, one in enumerate(normal)]
    scale = min(codes)[2] * Fraction(tensor_scale)
    return [float(scale * nearest(value / scale, table)) for value in values]


def by_torchao(rows: Tensor, format: BlockFormat, tensor_scale: Tensor | None = None) -> Tensor:
    """Round the rows of an FP32 matrix to a block format and back with torchao.

    Where the smallest scale of MX, 2**-127, is in force, torchao 0.18 returns half of each number.
    """
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    if format.scale == "E4M3":
        made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=tensor_scale)
        return made.dequantize(torch.float32)
    element = _TORCHAO_ELEMENTS[format.name]
    scale, data = mx_tensor.to_mx(rows, element, format.block_size)
    return mx_tensor.to_dtype(data, scale, element, format.block_size, torch.float32)


def patterns(count: int, seed: int) -> Tensor:
    """Random bits read as FP32 numbers: of all exponents, with NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return codes.to(torch.int32).view(torch.float32)


def near_rows(count: int, size: int, seed: int) -> Tensor:
    """Random mantissas in blocks of near exponents, anywhere in FP32 but at its small end."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(-100, 119, (count // size, 1), generator=generator)
    spread = torch.randint(-6, 9, (count // size, size), generator=generator)
    codes = torch.randint(0, 2**23, spread.shape, generator=generator, dtype=torch.int32)
    signs = torch.randint(0, 2, spread.shape, generator=generator, dtype=torch.int32) << 31
    exponents = (shared + spread).clamp_(-126, 127).to(torch.int32) + 127
    return (signs | (exponents << 23) | codes).view(torch.float32)
