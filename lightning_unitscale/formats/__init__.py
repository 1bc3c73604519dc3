"""Define number formats: their range, and where rounding overflows, denormalizes or flushes.

Everything follows from the number of exponent and mantissa bits, and from whether the format has
infinities. So a new format is one line: ``NumberFormat("E3M4", exponent_bits=3, mantissa_bits=4)``.
In a block format, a few neighboring numbers share a scale. Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# Thresholds are Python floats (IEEE double), so each must be a normal double.
_MAX_EXPONENT_BITS = 8
_MAX_MANTISSA_BITS = 24
# For formats without infinities. Every code of a smaller format is a number.
_FEWEST_BITS_WITH_NAN = 8
_NAME = re.compile(r"E(\d+)M(\d+)(FN)?", re.IGNORECASE)


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format with subnormals, rounded to nearest, ties to even.

    All thresholds are magnitudes. With ``y`` the rounded value of a finite ``x != 0``:

    - ``y == 0`` (flushed) exactly when ``|x| <= flush_threshold``;
    - ``y`` is subnormal exactly when ``flush_threshold < |x| < subnormal_threshold``;
    - ``x`` overflows exactly when ``|x| >= overflow_threshold`` for a format with infinities (``y``
      is infinite), and when ``|x| > overflow_threshold`` for one without. Then ``y`` is clipped to
      ``max``, so overflow has to be counted before the cast.

    Attributes:
        name: Name of the format in tables and tags.
        exponent_bits: Bits of the exponent, 2 to 8.
        mantissa_bits: Stored bits of the mantissa (without the leading one), 1 to 24.
        finite_only: Whether there are no infinities: the top exponent holds numbers, and only its
            last code is NaN (the ``fn`` of ``float8_e4m3fn``). A format of fewer than 8 bits has no
            NaN either (the FP6 and FP4 of OCP MX). The default is the layout of IEEE 754.

    Raises:
        ValueError: If the bits are out of the ranges above.

    References:
        IEEE 754-2019, section 3.4; Micikevicius et al., "FP8 Formats for Deep Learning"
        (arXiv 2209.05433), table 1; OCP Microscaling Formats (MX) v1.0, section 5.3.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    finite_only: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"name={self.name!r}: a format needs a name. Expected text such as 'E3M4'. "
                "Pass one. Tables and tags show it."
            )
        if not _is_within(self.exponent_bits, 2, _MAX_EXPONENT_BITS):
            raise ValueError(
                f"exponent_bits={self.exponent_bits!r}: out of range. Expected 2 to "
                f"{_MAX_EXPONENT_BITS}, since one code holds zero and subnormals. Change it."
            )
        if not _is_within(self.mantissa_bits, 1, _MAX_MANTISSA_BITS):
            raise ValueError(
                f"mantissa_bits={self.mantissa_bits!r}: out of range. Expected 1 to "
                f"{_MAX_MANTISSA_BITS} stored bits, since a format without a mantissa holds only "
                "powers of two and has no subnormals. Change the number."
            )
        if not isinstance(self.finite_only, bool):
            raise ValueError(
                f"finite_only={self.finite_only!r}: not a flag. Expected True or False. Pass one "
                "of them."
            )

    @property
    def bits(self) -> int:
        """Return the size of one number in bits, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def has_infinity(self) -> bool:
        """Check whether a value beyond the range becomes an infinity instead of being clipped."""
        return not self.finite_only

    @property
    def min_exponent(self) -> int:
        """Return the exponent of the smallest normal number. The bias is ``2**(bits-1) - 1``."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """Return the exponent of the largest number. IEEE reserves the next one."""
        return (1 << (self.exponent_bits - 1)) - (0 if self.finite_only else 1)

    @property
    def max(self) -> float:
        """Return the largest finite number. E4M3FN and wider finite formats lose a code to NaN."""
        lost = 2 if self.finite_only and self.bits >= _FEWEST_BITS_WITH_NAN else 1
        return (2.0 - lost * 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def eps(self) -> float:
        """Return the distance from 1 to the next number."""
        return 2.0**-self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Return the smallest number with full precision, a power of two."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Return the smallest number above zero, a power of two."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def flush_threshold(self) -> float:
        """Return the largest magnitude that rounds to zero: half the smallest subnormal."""
        return self.smallest_subnormal / 2

    @property
    def subnormal_threshold(self) -> float:
        """Return the magnitude below which numbers round to a subnormal or to zero.

        It is half a step below the smallest normal. From there on a value rounds up to it.
        """
        return self.smallest_normal - self.smallest_subnormal / 2

    @property
    def overflow_threshold(self) -> float:
        """Return the first magnitude that overflows. Without infinities, the last that does not.

        With infinities it is half a step above ``max``. Ties go to the even neighbor, which is the
        first power of two out of range. Without, it is ``max`` itself.
        """
        if self.finite_only:
            return self.max
        return (2.0 - 2.0 ** -(self.mantissa_bits + 1)) * 2.0**self.max_exponent

    def __str__(self) -> str:
        return self.name


def _is_within(bits: object, least: int, most: int) -> bool:
    return type(bits) is int and least <= bits <= most


@dataclass(frozen=True)
class BlockFormat:
    """A block format: neighboring elements in a small format that share a scale.

    Attributes:
        name: Name of the format in tables and tags.
        element: Format of an element. One beyond its range becomes the largest number.
        block_size: Number of elements that share a scale.
        scale: ``"E8M0"`` for powers of two from 2**-127 to 2**127, or ``"E4M3"`` for positive FP8
            numbers. E4M3 has little range, so a tensor has one more scale, in FP32.

    References:
        OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3; NVIDIA, "Pretraining Large Language
        Models with NVFP4" (arXiv 2509.25149), section 2 and appendix B.
    """

    name: str
    element: NumberFormat
    block_size: int
    scale: Literal["E8M0", "E4M3"]

    @property
    def has_tensor_scale(self) -> bool:
        """Check whether a tensor has an FP32 scale besides those of its blocks."""
        return self.scale == "E4M3"

    @property
    def largest_block(self) -> float:
        """Return the largest magnitude of a block in units of the tensor's scale."""
        return self.element.max * (E4M3FN.max if self.has_tensor_scale else 2.0**127)

    @property
    def smallest_block(self) -> float:
        """Return the smallest maximum of a block whose scale does not underflow.

        As for ``largest_block``, in units of the tensor's scale. Scales in E4M3 stay normal.
        """
        if self.has_tensor_scale:
            return self.element.max * E4M3FN.smallest_normal
        return 2.0 ** (self.element.max_exponent - 127)

    def __str__(self) -> str:
        return self.name


FP32 = NumberFormat("FP32", exponent_bits=8, mantissa_bits=23)
BF16 = NumberFormat("BF16", exponent_bits=8, mantissa_bits=7)
FP16 = NumberFormat("FP16", exponent_bits=5, mantissa_bits=10)
E5M2 = NumberFormat("E5M2", exponent_bits=5, mantissa_bits=2)
E4M3FN = NumberFormat("E4M3FN", exponent_bits=4, mantissa_bits=3, finite_only=True)
_E3M2FN = NumberFormat("E3M2FN", exponent_bits=3, mantissa_bits=2, finite_only=True)
_E2M3FN = NumberFormat("E2M3FN", exponent_bits=2, mantissa_bits=3, finite_only=True)
_E2M1FN = NumberFormat("E2M1FN", exponent_bits=2, mantissa_bits=1, finite_only=True)

FORMATS: dict[str, NumberFormat] = {item.name: item for item in (FP32, BF16, FP16, E4M3FN, E5M2)}

MXFP8_E4M3 = BlockFormat("MXFP8_E4M3", E4M3FN, 32, "E8M0")
MXFP8_E5M2 = BlockFormat("MXFP8_E5M2", E5M2, 32, "E8M0")
MXFP6_E2M3 = BlockFormat("MXFP6_E2M3", _E2M3FN, 32, "E8M0")
MXFP6_E3M2 = BlockFormat("MXFP6_E3M2", _E3M2FN, 32, "E8M0")
MXFP4 = BlockFormat("MXFP4", _E2M1FN, 32, "E8M0")
NVFP4 = BlockFormat("NVFP4", _E2M1FN, 16, "E4M3")

BLOCK_FORMATS: dict[str, BlockFormat] = {
    item.name: item for item in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4, NVFP4)
}

_ALIASES: dict[str, NumberFormat | BlockFormat] = {
    "FLOAT32": FP32,
    "BFLOAT16": BF16,
    "FLOAT16": FP16,
    "HALF": FP16,
    "E4M3": E4M3FN,
    "FLOAT8_E4M3FN": E4M3FN,
    "FLOAT8_E5M2": E5M2,
    "MXFP8": MXFP8_E4M3,
    "MXFP6": MXFP6_E2M3,
}


def get_format(
    format: str | NumberFormat | BlockFormat | tuple[int, int], *, given: str | None = None
) -> NumberFormat | BlockFormat:
    """Return the format with a name or with bits. A format is returned unchanged.

    Args:
        format: A format; one of the names ``FP32``, ``BF16``, ``FP16``, ``E4M3FN``, ``E5M2`` or of
            torch's own names for them, in any case; or bits. Bits are ``E3M4`` (with infinities),
            ``E2M3FN`` (finite only), or ``(exponent_bits, mantissa_bits)``, which means the former.
            ``E4M3`` means ``E4M3FN``, as it does in hardware. Block formats are ``MXFP8_E4M3``
            (or ``MXFP8``), ``MXFP8_E5M2``, ``MXFP6_E2M3`` (or ``MXFP6``), ``MXFP6_E3M2``,
            ``MXFP4`` and ``NVFP4``.
        given: Start of an error: the argument and its value, by default ``format=...``.

    Raises:
        ValueError: If there is no such format.
        TypeError: If it is neither a name nor a format.
    """
    if isinstance(format, (NumberFormat, BlockFormat)):
        return format
    given = f"format={format!r}" if given is None else given
    if isinstance(format, (tuple, list)):
        if len(format) != 2 or not all(type(bits) is int for bits in format):
            raise TypeError(
                f"{given}: not the bits of a format. Expected two integers, "
                "(exponent_bits, mantissa_bits). Pass for example (4, 3)."
            )
        return get_format("E{}M{}".format(*format), given=given)
    if not isinstance(format, str):
        raise TypeError(
            f"{given}: not a format. Expected a name or a NumberFormat, got "
            f"{type(format).__name__}. Pass for example 'FP16'."
        )
    name = format.strip().upper().removeprefix("TORCH.")
    named = FORMATS.get(name) or BLOCK_FORMATS.get(name) or _ALIASES.get(name)
    if named is not None:
        return named
    bits = _NAME.fullmatch(name)
    if bits is None:
        raise ValueError(
            f"{given}: unknown number format. Expected one of "
            f"{', '.join((*FORMATS, *BLOCK_FORMATS))}, or bits such as "
            "'E3M4' or 'E2M3FN'. Correct the name or pass a NumberFormat."
        )
    exponent_bits, mantissa_bits = int(bits[1]), int(bits[2])
    try:
        return NumberFormat(name, exponent_bits, mantissa_bits, finite_only=bits[3] is not None)
    except ValueError as error:
        raise ValueError(f"{given}: {error}") from None


def get_number_format(
    format: str | NumberFormat | BlockFormat | tuple[int, int], *, given: str | None = None
) -> NumberFormat:
    """Return a format as :func:`get_format` does, but refuse block formats.

    Raises:
        ValueError: If it is a block format, whose range depends on a block's other elements.
    """
    found = get_format(format, given=given)
    if isinstance(found, BlockFormat):
        raise ValueError(
            f"{given or f'format={found}'}: a block format, whose range depends on the other "
            "elements of a block. Expected a format of single numbers. Pass for example "
            f"{found.element}, the format of its elements."
        )
    return found
