"""Describe the formats of matmuls: simulated ones, and linear layers in real FP8.

A simulated matmul rounds its operands and is computed wide. FP8 hardware accumulates products of
FP8 numbers in FP32, so it is enough to round the three tensors that meet in a matmul and its
gradients.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from tabulate import tabulate
from torch import Tensor

from lightning_unitscale.arguments import check_choice, check_count, check_flag, shown
from lightning_unitscale.capture.name_patterns import EXCLUDED, NamePatterns
from lightning_unitscale.formats import BlockFormat, NumberFormat
from lightning_unitscale.functional.low_precision import (
    DEFAULT_GRADIENT,
    MIN_PADDED_SUM,
    MULTIPLE,
    PADDED_FROM,
    GradientFormat,
    Scaling,
    why_no_fp8,
)
from lightning_unitscale.matmuls.computations import (
    COMPUTATIONS,
    Exemption,
    Exemptions,
    computations_of,
)
from lightning_unitscale.matmuls.measurement import Site, Unrepresentable
from lightning_unitscale.quantize import FormatLike, Rounding, check_rounding, checked_format

Grid = Literal["fixed", "moving"]

_STRIDE = (math.sqrt(5) - 1) / 2  # the step of a logarithm per training step: the golden ratio
# The formats of "fp8": precision for operands, range for gradients.
FP8_FORMATS = ("E4M3FN", "E5M2")


def format_pair(setting: Any, *, argument: str) -> tuple[Any, Any]:
    """Return the formats of operands and of gradients from one setting."""
    given = f"{argument}={shown(setting)}"
    if isinstance(setting, str) and setting.strip().lower() == "fp8":
        return FP8_FORMATS
    if not isinstance(setting, (tuple, list)):
        checked_format(setting, given=given)
        return setting, setting
    if len(setting) != 2:
        raise ValueError(
            f"{given}: {len(setting)} formats. Expected 'fp8', a format, or a pair of formats, of "
            "operands and of gradients. Pass for example ('E4M3FN', 'E5M2')."
        )
    for format in setting:
        checked_format(format, given=f"{given}: {shown(format)}")
    return setting[0], setting[1]


def check_grid(grid: object) -> None:
    """Refuse an unknown kind of grid."""
    advice = "pass 'moving' to train, 'fixed' for the numbers of the format themselves"
    check_choice("grid", grid, get_args(Grid), "unknown grid", advice)


class MovingGrid:
    """Factors for the casts of a step that move the numbers of a format at every step.

    Rounding to nearest is right on average over the elements of a tensor, but not over the steps of
    a training. In constant units of powers of two, a weight that hardly moves is rounded to the
    same side at every step, and the weights gather where that side changes. A factor ``c`` in
    (1/2, 1] before the cast, divided out after the matmul, moves the numbers of the format under
    the tensor. So the errors of a few steps average out. Factors above 1 would do the same, but
    could bring an element that fits beyond the range.

    The logarithm of each cast starts at a value that depends only on its name, and moves by the
    golden ratio at every training step. So factors are independent of each other, and the same
    after a restart, in every graph of a step, and on every stage of a pipeline.

    References:
        Nagel et al., "Overcoming Oscillations in Quantization-Aware Training" (arXiv 2203.11086),
        section 2, on the weights; the golden ratio as the most even of all sequences of steps:
        Kuipers and Niederreiter, "Uniform Distribution of Sequences", chapter 2.3.
    """

    def __init__(self) -> None:
        self.step = 0  # number of training steps so far, without evaluation
        self._counts_calls = True

    def follow(self, step: int) -> None:
        """Count optimizer steps from now on, so that accumulated batches share their factors."""
        self.step = step
        self._counts_calls = False

    def factor(self, name: str, call: int) -> float:
        """Return the factor of a cast."""
        step = max(call - 1, 0) if self._counts_calls else self.step
        start = 2.0 ** -(zlib.crc32(name.encode()) / 2**32)
        moved = start * 2.0 ** -(step * _STRIDE % 1.0)
        # Rounded to FP32, the type in which kernels hold it.
        mantissa, exponent = math.frexp(moved if moved > 0.5 else 2 * moved)
        return math.ldexp(round(mantissa * 2**24) / 2**24, exponent)


class SimulateFormat:
    """The formats that matmuls are rounded to, as in :func:`simulate_format`."""

    def __init__(
        self,
        operand_format: FormatLike | None,
        gradient_format: FormatLike | None,
        *,
        backward_format: FormatLike | Literal["operands"] | None = "operands",
        rounding: Rounding = "nearest",
        saturate: bool | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        seed: int = 0,
        grid: Grid = "fixed",
        gradient_rounding: Rounding | None = None,
        square_weights: bool = False,
        hadamard: bool = False,
        exempt: Sequence[Exemption] = (),
    ) -> None:
        check_rounding(rounding)
        if gradient_rounding is not None:
            check_rounding(gradient_rounding, argument="gradient_rounding")
        check_grid(grid)
        check_flag("square_weights", square_weights)
        check_flag("hadamard", hadamard)
        if saturate is not None:
            check_flag("saturate", saturate)
        check_count("seed", seed, least=0)
        # Formats of operands and of gradients. ``None`` if they are not rounded.
        self.operand_format = _checked(operand_format, "operand_format")
        self.gradient_format = _checked(gradient_format, "gradient_format")
        # Format of the operands that backward matmuls read.
        self.backward_format = (
            self.operand_format
            if backward_format == "operands"
            else _checked(backward_format, "backward_format")
        )
        self.rounding = rounding  # ``"nearest"`` or ``"stochastic"``
        self.gradient_rounding: Rounding = gradient_rounding or rounding
        # Options of block formats: squares of weights, which both directions read alike, and a
        # random Hadamard transform of the operands of weight gradients.
        self.square_weights = square_weights
        self.hadamard = hadamard
        formats = self.operand_format, self.gradient_format, self.backward_format
        self.has_blocks = any(isinstance(each, BlockFormat) for each in formats)
        if (square_weights or hadamard) and not self.has_blocks:
            raise ValueError(
                f"{'square_weights' if square_weights else 'hadamard'}=True: only block formats "
                "have this option. Expected a format such as 'NVFP4'. Leave it out."
            )
        self.saturate = saturate
        # Moves the numbers of the formats. ``None`` if they stay.
        self.moving_grid = MovingGrid() if grid == "moving" else None
        self.patterns = NamePatterns(include, exclude)
        self.exempt = Exemptions(exempt)  # computations that are not rounded
        self.seed = seed  # of stochastic rounding

    @property
    def is_stochastic(self) -> bool:
        """Check whether anything is rounded at random."""
        return "stochastic" in (self.rounding, self.gradient_rounding)

    @property
    def transforms_weight_gradients(self) -> bool:
        """Check whether both operands of weight gradients are transformed, since one has blocks."""
        formats = self.gradient_format, self.backward_format
        return self.hadamard and any(isinstance(each, BlockFormat) for each in formats)

    def format_of(
        self, *, is_gradient: bool, is_backward: bool
    ) -> NumberFormat | BlockFormat | None:
        """Return the format of an operand of a matmul, forward or backward."""
        if is_gradient:
            return self.gradient_format
        return self.backward_format if is_backward else self.operand_format

    def summary(self) -> str:
        """Describe the formats and the rounding."""
        formats = f"Operands rounded to {self.operand_format}, gradients to {self.gradient_format}"
        if self.backward_format != self.operand_format:
            formats += f", operands of backward matmuls to {self.backward_format}"
        how: list[str] = [self.rounding]
        if self.gradient_rounding != self.rounding:
            how.append(f"gradients {self.gradient_rounding}")
        how += ["moving grid"] * (self.moving_grid is not None)
        how += ["square blocks of weights"] * self.square_weights
        how += ["Hadamard transform for weight gradients"] * self.hadamard
        return f"{formats} ({', '.join(how)})"


def _checked(format: FormatLike | None, argument: str) -> NumberFormat | BlockFormat | None:
    return None if format is None else checked_format(format, given=f"{argument}={shown(format)}")


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_LINEAR = "not a linear layer"
_NO_PADDING = "and padding would not pay"
EXCLUDED_BY_DEFAULT = f"{EXCLUDED} by default"

WIDE_GRADIENT: GradientFormat = "E5M2"  # the format of gradients that do not fit into the finer one
_TRAINING_ONLY = "Only training steps run in FP8. Evaluation uses the Trainer's precision."


class TensorKind(NamedTuple):
    """The properties of a tensor that decide, for one that does not exist yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class FP8Linears:
    """The arguments of :func:`fp8_linears`, and the decision on each layer."""

    def __init__(
        self,
        scaling: Scaling = "constant",
        *,
        exclude: str | Sequence[str] | None = None,
        gradient_format: GradientFormat = DEFAULT_GRADIENT,
        grid: Grid = "fixed",
        in_evaluation: bool = True,
        why_excluded: str = EXCLUDED,
        widens: bool = False,
        exempt: Sequence[Exemption] = (),
    ) -> None:
        advice = "pass 'constant' together with unit scaling, 'dynamic' without it"
        check_choice("scaling", scaling, get_args(Scaling), "unknown scaling", advice)
        advice = "pass 'E4M3FN' for scaled gradients, 'E5M2' for others"
        choices, what = get_args(GradientFormat), "no format of FP8 gradients"
        check_choice("gradient_format", gradient_format, choices, what, advice)
        check_grid(grid)
        if scaling == "dynamic" and grid == "moving":
            raise ValueError(
                "grid='moving': with scaling='dynamic' the largest element of a tensor decides "
                "where the numbers of its format lie. Expected 'fixed'. Leave the argument out."
            )
        self.scaling: Scaling = scaling
        # Format of gradients that fit into it. Others are in E5M2.
        self.gradient_format: GradientFormat = gradient_format
        # Moves the numbers of FP8. ``None`` if they stay.
        self.moving_grid = MovingGrid() if grid == "moving" else None
        self.patterns = NamePatterns(exclude=exclude)
        self.exempt = Exemptions(exempt)  # computations that are not in FP8
        # For every matmul seen, why it is not in FP8, or ``None`` if it is.
        self.decisions: dict[str, str | None] = {}
        # Matmuls that the caller keeps out of FP8, and gradients that it keeps in E5M2.
        self.unfit = Unrepresentable()
        # Names of tensors that were zero at first, and that the caller has not measured in their
        # units since. Layers that read them are not cast yet.
        self.unseen: set[str] = set()
        # True if Lightning's evaluation steps are in FP8 as well. If not, they compute the same as
        # a checkpoint of the module without FP8.
        self.in_evaluation = in_evaluation
        self.why_excluded = why_excluded  # the reason for layers that ``exclude`` matches
        # True if operands are checked in every step, and layers return at recalibrations.
        self.widens = widens
        # True if the step takes gradients of gradients, which read the operands of layers.
        self.is_recorded = False

    def leave_out(self, unrepresentable: Unrepresentable) -> Unrepresentable:
        """Keep matmuls out of FP8, or their gradients in E5M2, by the matmuls' names."""
        if self.gradient_format == WIDE_GRADIENT:
            unrepresentable = Unrepresentable(unrepresentable.matmuls)
        new = unrepresentable.without(self.unfit)
        self.decisions.update({n: why for n, why in new.matmuls.items() if self.runs(n)})
        self.unfit = self.unfit.joined(unrepresentable)
        return new

    def readmit(self, unfit: Unrepresentable) -> Unrepresentable:
        """Replace the excluded layers by those of a recalibration, and return the new ones."""
        before, self.unfit = self.unfit, Unrepresentable()
        for name in before.matmuls:
            self.decisions.pop(name, None)  # it is decided again
        self.leave_out(unfit)
        return self.unfit.without(before)

    def exempts(self, site: Site, slot: str | None = None) -> bool:
        """Check whether a computation of a layer is exempt, or any of them without a slot."""
        computations = COMPUTATIONS if slot is None else computations_of(site, slot)
        return self.exempt.covers(site, *computations)

    def runs(self, name: str) -> bool:
        """Check whether the matmul of this name is in FP8, as last decided."""
        return self.decisions.get(name, "not seen") is None

    def forget(self) -> None:
        """Forget the matmuls of a module."""
        self.unfit, self.is_recorded = Unrepresentable(), False
        self.unseen.clear()
        self.decisions.clear()

    def summary(self) -> str:
        """Return how many of the matmuls seen are in FP8, and with which scales."""
        count = sum(reason is None for reason in self.decisions.values())
        scales = f"{self.scaling} scales" + ("" if self.moving_grid is None else ", moving grid")
        return f"{count} of {len(self.decisions)} matmuls in FP8 with {scales}"

    def report(self) -> str:
        """Return a table of the matmuls and the decisions on them."""
        rows = [
            (name, "kept", reason) if reason else (name, "FP8", self._how(name))
            for name, reason in self.decisions.items()
        ]
        if not rows:
            return ""
        table = tabulate(rows, headers=("matmul", "runs", "why"))
        return table if self.in_evaluation else f"{table}\n\n{_TRAINING_ONLY}"

    def _how(self, name: str) -> str:
        text = f"{self.scaling} scales, gradients in {self.gradient_of(name)}"
        if (reason := self.unfit.gradients.get(name)) is not None:
            text += f": {reason}"
        exempt = self.exempt.of(name)
        return f"{text}; exempt: {', '.join(exempt)}" if exempt else text

    def gradient_of(self, name: str) -> GradientFormat:
        """Return the format of the gradient of a matmul output."""
        return WIDE_GRADIENT if name in self.unfit.gradients else self.gradient_format

    def why_not(
        self,
        name: str,
        module: str,
        read: Tensor | TensorKind,
        weight: Tensor | TensorKind,
        options: Mapping[str, Any],
    ) -> str | None:
        """Return why a linear layer does not run in FP8; ``None`` if it does."""
        if not self.patterns.match_names(name, module):
            return self.why_excluded
        for tensor in (read, weight):
            if tensor.dtype not in _DTYPES:
                return f"made of {tensor.dtype}"
        for option in ("beta", "alpha"):
            if options.get(option, 1) != 1:
                return f"it has {option}={options[option]}"
        features, sums = weight.shape, weight.shape[::-1]
        for what, size, num_terms in zip(("input", "output"), features, sums, strict=True):
            is_large = size >= PADDED_FROM and num_terms >= MIN_PADDED_SUM
            if size == 0 or (size % MULTIPLE and not is_large):
                return f"its {size} {what} features are not a multiple of {MULTIPLE}, {_NO_PADDING}"
        if name not in self.unfit.matmuls and (reason := why_no_fp8(read.device)) is not None:
            raise RuntimeError(
                f"{name} on {read.device}: {reason}. Expected a GPU of compute capability 8.9 or "
                "above, or a CPU. Leave FP8 out, or simulate it."
            )
        return self.unfit.matmuls.get(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Linears:
        new = copy.copy(self)
        memo[id(self)] = new
        new.decisions = {}
        new.unseen = set(self.unseen)
        new.moving_grid = copy.copy(self.moving_grid)
        return new
