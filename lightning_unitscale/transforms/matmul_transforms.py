"""Transforms of a plain module's matmuls: lossless unit scaling, and formats; and ``compile``.

Units and formats run at the dispatcher, whatever Python code is around them, or in the graphs of a
module that is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any, get_args

from torch import nn

from lightning_unitscale.arguments import check_choice, check_depth
from lightning_unitscale.capture.captured_copy import (
    capture,
    explain_forward,
    matmuls_of,
    own_copy,
)
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.functional.low_precision import (
    DEFAULT_GRADIENT,
    GradientFormat,
    Scaling,
)
from lightning_unitscale.matmuls.fp8_layers import FP8Linears
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.matmuls.module_matmuls import Format, ModuleMatmuls
from lightning_unitscale.matmuls.simulate import FP8_FORMATS, Grid, SimulateFormat
from lightning_unitscale.quantize import FormatLike, Rounding


def lossless_unit_scale(
    module: nn.Module, *example_args: Any, depth: str = "products", **example_kwargs: Any
) -> nn.Module:
    """A copy of ``module`` that computes the same bits with matmuls near RMS 1.

    Every operand of a matmul, and the gradient that arrives at it, is stored in units of a
    power of two near its RMS, measured on the example inputs. Powers of two are exact, so values
    and gradients are those of ``module``. Its parameters keep their names and values; lazy ones
    get theirs in its first call, as those of ``module`` would.

    Any Python code will do: matmuls are scaled as they run. Within a ``torch.compile`` of your own
    it is ``module`` that is compiled; :func:`compile` compiles what the transforms make of it.

    Args:
        module: Any module. It is left as it is.
        *example_args: Arguments of one representative call, on the module's device. A copy of the
            module runs once on copies of them: neither is changed, nor are random states; what
            ``forward`` writes elsewhere, such as a global list, is written.
        depth: Only ``"products"``: matmuls are what is scaled.
        **example_kwargs: Keyword arguments of that call.

    Returns:
        A new module with ``gauge()``, the units in force, and ``explain()``: which matmuls ran in
        units in its first call, and why others did not. Gradient units are measured on the example
        when the module returns a loss (a scalar, or ``loss`` in a mapping, an attribute or the
        first of a tuple), else in its first real backward pass.

    Raises:
        ValueError: If ``depth`` is another one, or the module is already compiled.
    """
    check_depth(depth)
    new = _transformed(module, has_new_units=True)
    matmuls_of(new).measure(example_args, example_kwargs)
    # Unlike a closure it is copied with its arguments, so that a copied module has its own.
    new.__dict__["gauge"] = functools.partial(_gauge_of, new)
    return new


def _gauge_of(module: nn.Module) -> Gauge:
    """The units in force."""
    return matmuls_of(module).gauge


def simulate_format(
    module: nn.Module,
    operand_format: FormatLike,
    gradient_format: FormatLike,
    *,
    rounding: Rounding = "nearest",
    saturate: bool | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    seed: int = 0,
    grid: Grid = "fixed",
) -> nn.Module:
    """A copy of ``module`` whose matmuls run as if in low-precision formats.

    Every operand of every matmul (linear, matmul, einsum, convolution, attention, ...) is rounded
    to one format, and the gradient that arrives at its output to another before the matmul's own
    gradients are computed from it. Gradients pass the rounding of operands as they are. What is
    added to a matmul with its gradient, and all that lies between matmuls, keeps its precision.

    Together with :func:`lossless_unit_scale`, in either order, it is the stored operands and
    gradients that are rounded.

    Args:
        module: Any module; it is left as it is.
        operand_format: Format of the operands: a name, a :class:`NumberFormat`, or
            ``(exponent_bits, mantissa_bits)``.
        gradient_format: Format of the gradients.
        rounding: ``"nearest"`` or ``"stochastic"``, as in :func:`lightning_unitscale.quantize.
            quantize`.
        saturate: Whether what is out of range becomes the largest number; by default it does in
            formats without infinities.
        include: Globs of module paths or tensor names whose matmuls are simulated; all by
            default.
        exclude: Globs to leave out, stronger than ``include``.
        seed: Of stochastic rounding, which leaves torch's random numbers alone.
        grid: ``"fixed"``, or ``"moving"``: every tensor is multiplied by a number in (1/2, 1], and
            divided by it after rounding, another one at every training step, so that the errors of
            a weight that hardly changes average out over the steps.

    Returns:
        A new module with ``explain()``: which matmuls were rounded in its first call, and why
        others were not. Within a ``torch.compile`` of your own it runs as it is, uncompiled.

    Raises:
        ValueError: If a format or a pattern makes no sense, or the module is already compiled.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3;
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), appendix C.
    """
    simulated = SimulateFormat(
        operand_format,
        gradient_format,
        rounding=rounding,
        saturate=saturate,
        include=include,
        exclude=exclude,
        seed=seed,
        grid=grid,
    )
    return _transformed(module, simulated)


def simulate_fp8(module: nn.Module) -> nn.Module:
    """:func:`simulate_format` with E4M3FN for operands and E5M2 for gradients."""
    return simulate_format(module, *FP8_FORMATS)


def fp8_linears(
    module: nn.Module,
    *,
    scaling: Scaling = "constant",
    exclude: str | Sequence[str] | None = None,
    gradient_format: GradientFormat = DEFAULT_GRADIENT,
    grid: Grid = "fixed",
) -> nn.Module:
    """A copy of ``module`` whose linear layers, and their gradients, run in real FP8.

    Eligible are ``F.linear`` and matmuls with a 2-D parameter (``matmul``, ``addmm``, ...) whose
    numbers of features are multiples of 16, or large enough for padding to pay. Operands are cast
    to E4M3FN, arriving gradients to ``gradient_format``. Results have the type that they had. It
    runs on GPUs of compute capability 8.9 and above, and on CPUs, slowly, as a check. Together with
    :func:`simulate_format`, in either order, what runs in FP8 is not rounded again. What is kept
    for the backward pass is FP8 only; what :func:`compile` makes of it casts again what it reads
    anyway, and keeps nothing for that.

    Args:
        module: Any module; it is left as it is.
        scaling: ``"constant"`` takes scales from :func:`lossless_unit_scale`, in either order, and
            1 without it. ``"dynamic"`` brings every tensor's largest element to the end of its
            format in every call, which needs no unit scaling and a pass more over each tensor.
        exclude: Globs of module paths or tensor names whose layers stay as they are.
        gradient_format: ``"E4M3FN"`` holds gradients in units of their own, or with dynamic scales,
            unless they are very uneven. ``"E5M2"`` has more range and twice the rounding error: for
            constant scales without unit scaling, or to compare with packages that take it.
        grid: ``"moving"`` multiplies what is cast by a number in (1/2, 1], another one at every
            training step, and divides the matmul by it, so that the errors of a weight that hardly
            changes average out; for constant scales.

    Returns:
        A new module with ``explain()``: what was decided on each layer, and why.

    Raises:
        ValueError: If an argument makes no sense, or the module is already compiled.
        RuntimeError: In the first call, if the module is on a device without FP8.

    Examples:
        >>> import torch
        >>> from lightning_unitscale import transforms
        >>> layer, x = torch.nn.Linear(32, 16), torch.randn(8, 32)
        >>> fast = transforms.fp8_linears(transforms.lossless_unit_scale(layer, x))
        >>> fast(x).shape
        torch.Size([8, 16])
    """
    linears = FP8Linears(scaling, exclude=exclude, gradient_format=gradient_format, grid=grid)
    return _transformed(module, linears)


def compile(module: nn.Module, mode: CompileMode = "default") -> nn.Module:
    """A copy of ``module`` whose captured graphs are compiled by Inductor.

    ``torch.compile`` on a transformed module would capture the plain module again. This compiles
    what the transforms made of it, whichever of them come before or after.

    Args:
        module: A module, transformed or not, that Dynamo can capture; it is left as it is.
        mode: As for ``torch.compile``: ``"default"``, ``"reduce-overhead"`` with CUDA graphs,
            ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.

    Returns:
        A new module with parameters of its own and ``explain()``. It is compiled when it is first
        called, and again for inputs of another kind, as by ``torch.compile``.

    Raises:
        ValueError: If ``module`` was compiled by the user, or the mode is unknown.
    """
    check_choice("mode", mode, get_args(CompileMode), "unknown", "leave it out for 'default'")
    new = own_copy(module)
    capture(new, "compile").use_executor("inductor", mode)
    return new


def _transformed(module: nn.Module, *formats: Format, has_new_units: bool = False) -> nn.Module:
    """A deep copy of ``module`` with its own parameters, whose matmuls run in units and formats."""
    new = own_copy(module)
    ModuleMatmuls.add(new, formats, has_new_units=has_new_units)
    new.__dict__["explain"] = MethodType(explain_forward, new)
    return new
