"""Define the options of ``UnitScaleCallback`` that are classes: methods and formats.

Each option is checked when it is created. In YAML it is ``class_path`` and ``init_args``::

    - class_path: lightning_unitscale.UnitScaleCallback
      init_args:
        method:
          class_path: lightning_unitscale.Rules
          init_args: {method: u-mup, attention_mult: 2.0}
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from lightning_unitscale.arguments import check_choice, check_count, check_flag, shown
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.capture.name_patterns import EXCLUDED
from lightning_unitscale.formats import BlockFormat, NumberFormat, get_format
from lightning_unitscale.functional.low_precision import DEFAULT_GRADIENT, GradientFormat
from lightning_unitscale.matmuls import matmul_formats
from lightning_unitscale.matmuls.computations import COMPUTATIONS, Computation, checked_exempt
from lightning_unitscale.precision.report import check_share
from lightning_unitscale.quantize import Rounding, checked_format
from lightning_unitscale.rules.plan import RuleOptions

AnyFormat = NumberFormat | BlockFormat
LOSSLESS: Final = "lossless"
MEASURED: Final = "measured"
_AUTO: Final = "auto"
_RULES = ("unit-scaling", "u-mup")
# These layer names occur in torch, nanoGPT, Hugging Face's and Meta's code.
_READOUT = ("lm_head", "head", "embed_out", "output_layer")
_LAST_NAMES = (
    *("out_proj", "o_proj"),  # attention's output
    *("down_proj", "fc2", "fc_out", "linear2", "w2", "dense_4h_to_h"),  # a feed-forward's last
    *_READOUT,
)
_PATHS = (
    *("*attn*.c_proj", "*attn*.proj", "*attention*.dense", "*attention.wo"),
    *("*mlp*.c_proj", "*mlp.proj", "*DenseReluDense.wo", "*layer.[0-9]*.output.dense"),
)
# Layers that u-muP excludes from FP8 (Blake et al., arXiv 2407.17465).
U_MUP_EXCLUDE = (*_LAST_NAMES, *(f"*.{name}" for name in _LAST_NAMES), *_PATHS)
# The readout causes more than half of the loss increase of FP8 linears in the demo:
# docs/explanation/low-precision.md.
READOUT_EXCLUDE = (*_READOUT, *(f"*.{name}" for name in _READOUT))


def check_compile(value: object) -> None:
    """Refuse a value that is neither a flag nor a mode of ``torch.compile``."""
    modes = get_args(CompileMode)
    if not isinstance(value, bool) and not (isinstance(value, str) and value in modes):
        raise ValueError(
            f"compile={shown(value)}: neither a flag nor a mode of torch.compile. Expected True, "
            f"False, {', '.join(map(repr, modes[:-1]))} or {modes[-1]!r}. Pass compile=True."
        )


def mode_of(compile: bool | CompileMode) -> CompileMode | None:
    """Return the mode of Inductor, or ``None`` if another callback may choose it."""
    return None if isinstance(compile, bool) else compile


@dataclass(frozen=True)
class Rules:
    """Options of unit scaling by rules, with u-muP's multipliers: ``method=Rules(...)``.

    All multipliers are positive numbers and 1 by default.

    Args:
        method: ``"unit-scaling"`` or ``"u-mup"``, which scale learning rates differently.
        residual_mult: Weight of all residual branches relative to the skip in the last sum.
        residual_attn_ratio: Share of attention branches relative to the others.
        attention_mult: Factor on attention logits.
        activation_mult: Factor on the input of activations that follow a weight.
        loss_mult: Factor on the logits of a cross-entropy.

    Raises:
        ValueError: If the method is unknown or a multiplier is not positive.

    References:
        Blake et al., "u-muP: The Unit-Scaled Maximal Update Parametrization" (arXiv 2407.17465).
    """

    method: Literal["unit-scaling", "u-mup"]
    residual_mult: float = 1.0
    residual_attn_ratio: float = 1.0
    attention_mult: float = 1.0
    activation_mult: float = 1.0
    loss_mult: float = 1.0

    def __post_init__(self) -> None:
        advice = "pass Rules('u-mup'), or method='lossless' for no rules"
        check_choice("method", self.method, _RULES, "no method with rules", advice)
        self.options()  # which checks them

    def options(self, **others: Any) -> RuleOptions:
        """Return the multipliers as options of the rules, with ``residual`` and ``on_unknown``."""
        multipliers = {name: value for name, value in vars(self).items() if name != "method"}
        return RuleOptions(**multipliers, **others)


@dataclass(frozen=True)
class FP8:
    """Options of linear layers and their gradients in real FP8: ``precision=FP8(...)``.

    Args:
        exclude: Globs of module paths or tensor names to keep out of FP8; ``None`` for none.
            ``"auto"`` excludes the readout by its usual names. With rules it also excludes
            attention's output and a feed-forward's last layer, as u-muP does. Your globs replace
            these. ``"measured"`` excludes the readout until the first precision report, and then
            the computations with the most predicted damage per FLOP.
        gradient_format: Format of the gradients that linear layers read. With ``"E4M3FN"``,
            gradients that do not fit use E5M2, which has half the precision. Almost all scaled
            gradients fit. With ``"E5M2"``, all gradients use E5M2.
        evaluation: Whether validation, test and prediction also run in FP8. Otherwise they use the
            Trainer's precision, and their loss is that of the checkpoint.
        grid: ``"moving"`` multiplies rounded tensors by a number in (1/2, 1] and divides the matmul
            by it. The number changes at every training step. With ``"fixed"``, a weight that hardly
            changes is rounded in the same direction at every step. In long runs this costs more
            than the rounding itself.
        on_misfit: What to do when a layer's operands no longer fit: an element is beyond the range,
            or more than 25 % are flushed to zero. With ``"leave"``, operands are checked whenever
            units are measured, and the layer stays out of FP8. With ``"widen"``, they are checked
            in every training step. From the next step on, the layer's gradient is in E5M2, or the
            layer is out of FP8. It returns at a recalibration if it fits again. This costs a pass
            over each operand, and eager layers save their operands in the original type.
        exempt: Computations to keep out of FP8: pairs of a glob and ``"forward"``,
            ``"input_gradient"`` or ``"weight_gradient"``.
        max_damage: With ``exclude="measured"``, the share of the predicted damage that may remain:
            of the loss's lasting change, and of the gradient's squared error. Computations are left
            out in the order of their damage per FLOP.
        measured_from: With ``exclude="measured"``, the optimizer step of the first report. Further
            ones follow each time the number of steps has doubled.

    Raises:
        ValueError: If an argument is out of its range.
    """

    exclude: str | Sequence[str] | None = "auto"
    gradient_format: GradientFormat = DEFAULT_GRADIENT
    evaluation: bool = False
    grid: matmul_formats.Grid = "moving"
    on_misfit: Literal["leave", "widen"] = "leave"
    exempt: Sequence[tuple[str, Computation]] = ()
    max_damage: float = 0.5
    measured_from: int = 1024

    def __post_init__(self) -> None:
        check_flag("evaluation", self.evaluation)
        advice = "pass 'widen' to check operands in every step"
        check_choice("on_misfit", self.on_misfit, ("leave", "widen"), "not a reaction", advice)
        check_share("max_damage", self.max_damage)
        check_count("measured_from", self.measured_from)
        object.__setattr__(self, "exempt", checked_exempt(self.exempt))  # YAML has lists
        self.linears(is_lossless=True)  # which checks the others

    def linears(self, *, is_lossless: bool) -> matmul_formats.FP8Linears:
        """Return the pass that runs linears in FP8. A lossless ``"auto"`` excludes less."""
        exclude = self.exclude
        if isinstance(exclude, str) and exclude in (_AUTO, MEASURED):
            exclude = READOUT_EXCLUDE if is_lossless else U_MUP_EXCLUDE
        exempt = tuple(self.exempt)
        if self.exclude == MEASURED:
            # Until it is measured. A pattern could not be lifted later.
            exempt += tuple(itertools.product(exclude or (), COMPUTATIONS))
            exclude = None
        return matmul_formats.FP8Linears(
            exclude=exclude,
            exempt=exempt,
            gradient_format=self.gradient_format,
            grid=self.grid,
            in_evaluation=self.evaluation,
            widens=self.on_misfit == "widen",
            why_excluded=matmul_formats.EXCLUDED_BY_DEFAULT if self.exclude == _AUTO else EXCLUDED,
        )

    def unmatched(self, linears: matmul_formats.FP8Linears) -> list[str]:
        """Return a line for each excluded name that no layer of the captured steps has."""
        # "auto" excludes usual names, and no model has all of them.
        if self.exclude in (_AUTO, MEASURED):
            return []
        return [f"FP8: {text}" for text in linears.patterns.take_unmatched()]


@dataclass(frozen=True)
class Simulate:
    """Options of matmuls rounded as in a low-precision format: ``simulate=Simulate(...)``.

    Args:
        format: ``"fp8"`` (E4M3FN for operands, E5M2 for gradients), one format such as ``"E3M2FN"``
            for both, or one for each. Also a block format such as ``"MXFP8"`` or ``"NVFP4"``, whose
            blocks lie along the dimension that each matmul sums over. NVFP4 uses the tensor's unit,
            a constant, instead of a scale from its largest magnitude.
        rounding: ``"nearest"``, or ``"stochastic"`` with its own random numbers.
        grid: ``"fixed"`` simulates the format itself; ``"moving"`` is as for :class:`FP8`.
        forward: Instead of ``format``, the format of the operands of forward matmuls. If only
            ``backward`` is given, forward matmuls are not rounded.
        backward: Instead of ``format``, the format of the operands of backward matmuls. If only
            ``forward`` is given, backward matmuls are not rounded.
        gradient_rounding: Rounding of gradients, by default that of the operands.
        square_weights: With block formats, round weights of linear layers in square blocks, so that
            both directions read the same numbers.
        hadamard: With block formats, multiply both operands of the weight gradients of linear
            layers by a random Hadamard matrix, in runs of 16.
        exempt: Computations that are not rounded, as for :class:`FP8`.

    Raises:
        ValueError: If an argument is out of its range.

    References:
        NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4, uses
        the last three options, with ``gradient_rounding="stochastic"``.
    """

    format: str | AnyFormat | tuple[str | AnyFormat, str | AnyFormat] = "fp8"
    rounding: Rounding = "nearest"
    grid: matmul_formats.Grid = "fixed"
    forward: str | AnyFormat | None = None
    backward: str | AnyFormat | None = None
    gradient_rounding: Rounding | None = None
    square_weights: bool = False
    hadamard: bool = False
    exempt: Sequence[tuple[str, Computation]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "exempt", checked_exempt(self.exempt))
        self.rounding_pass()  # which checks the others

    @property
    def formats(self) -> tuple[Any, Any]:
        """Return the formats of the operands and of the gradients."""
        if self._has_directions:
            if self.format != "fp8":
                raise ValueError(
                    f"format={shown(self.format)}: forward= and backward= already set the "
                    "formats. Expected one way to set them. Leave format out."
                )
            for name, each in (("forward", self.forward), ("backward", self.backward)):
                if each is not None:
                    checked_format(each, given=f"{name}={shown(each)}")
            return self.forward, self.backward
        return matmul_formats.format_pair(self.format, argument="format")

    @property
    def blocks(self) -> tuple[BlockFormat, ...]:
        """Return the block formats among :attr:`formats`."""
        found = (each if each is None else get_format(each) for each in self.formats)
        return tuple(each for each in found if isinstance(each, BlockFormat))

    @property
    def _has_directions(self) -> bool:
        return self.forward is not None or self.backward is not None

    def rounding_pass(self) -> matmul_formats.SimulateFormat:
        """Return the pass that rounds the operands of matmuls."""
        return matmul_formats.SimulateFormat(
            *self.formats,
            backward_format=self.backward if self._has_directions else "operands",
            rounding=self.rounding,
            grid=self.grid,
            gradient_rounding=self.gradient_rounding,
            square_weights=self.square_weights,
            hadamard=self.hadamard,
            exempt=self.exempt,
        )


def as_method(method: str | Rules) -> Literal["lossless"] | Rules:
    """Return ``"lossless"``, or the rules that ``method`` selects."""
    if isinstance(method, Rules):
        return method
    advice = "pass Rules(...) for the multipliers of u-muP"
    check_choice("method", method, (LOSSLESS, *_RULES), "unknown method", advice)
    return LOSSLESS if method == LOSSLESS else Rules(method)  # type: ignore[arg-type]


def as_fp8(precision: str | FP8 | None) -> FP8 | None:
    """Return the options of FP8, or ``None`` without FP8."""
    if precision is None or isinstance(precision, FP8):
        return precision
    if not isinstance(precision, str) or precision != "fp8":
        raise ValueError(
            f"precision={shown(precision)}: unknown precision. Expected 'fp8', FP8(...) or None. "
            "Set other precisions on the Trainer: Trainer(precision=...)."
        )
    return FP8()


def as_simulate(simulate: object) -> Simulate | None:
    """Return the options of a simulation, or ``None`` without one."""
    if simulate is None or isinstance(simulate, Simulate):
        return simulate
    matmul_formats.format_pair(simulate, argument="simulate")
    return Simulate(simulate)  # type: ignore[arg-type]
