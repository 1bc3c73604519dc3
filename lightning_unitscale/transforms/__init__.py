"""Transforms of modules without a Trainer.

Units and formats are applied at the dispatcher, for any Python code, or in the graphs of a captured
module.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any, get_args

from torch import nn

from lightning_unitscale.arguments import check_choice, check_depth
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.capture.module_steps import capture, explain_forward, matmuls_of, own_copy
from lightning_unitscale.functional.low_precision import DEFAULT_GRADIENT, GradientFormat, Scaling
from lightning_unitscale.matmuls.computations import Exemption
from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.matmul_formats import FP8_FORMATS, FP8Linears, Grid, SimulateFormat
from lightning_unitscale.matmuls.module_matmuls import Format, ModuleMatmuls
from lightning_unitscale.memory.remat_module import remat
from lightning_unitscale.monitor.scales_graph import (
    Metrics,
    ScalesGraph,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from lightning_unitscale.monitor.track_scales import track_scales
from lightning_unitscale.quantize import FormatLike, Rounding
from lightning_unitscale.rules.transform import deploy, unit_scale

__all__ = [
    "Gauge",
    "GaugePair",
    "Metrics",
    "ScalesGraph",
    "compile",
    "deploy",
    "fp8_linears",
    "lossless_unit_scale",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "remat",
    "simulate_format",
    "simulate_fp8",
    "track_scales",
    "unit_scale",
]


def lossless_unit_scale(
    module: nn.Module, *example_args: Any, depth: str = "products", **example_kwargs: Any
) -> nn.Module:
    """Return a copy of ``module`` that computes the same bits with matmuls near RMS 1.

    Every operand of a matmul, and the gradient of its output, is divided by a power of two
    near its RMS, which is measured on the example inputs. Multiplying by a power of two is exact,
    so values and gradients are those of ``module``. Its parameters keep their names and values.
    Lazy parameters get them in the first call, as those of ``module`` would.

    It supports any Python code, because matmuls are scaled as they run. If you use
    ``torch.compile``, the module's ``forward`` is compiled with scaled matmuls, separately from the
    surrounding code. ``fullgraph=True`` raises an error.

    Args:
        module: Any module. It does not change.
        *example_args: Arguments of one representative call, on the module's device. A copy of the
            module runs once on copies of them. The arguments and the random states do not change.
            Other side effects of ``forward``, such as an append to a global list, remain.
        depth: Only ``"products"``, which scales matmuls.
        **example_kwargs: Keyword arguments of that call.

    Returns:
        A new module with ``gauge()``, the units in force, and ``explain()``: which matmuls were
        scaled in its first call, and why others were not. The example measures gradient units
        when the module returns a loss (a scalar, or ``loss`` in a mapping, an attribute or the
        first of a tuple), else in its first real backward pass.

    Raises:
        ValueError: If ``depth`` has another value, or the module is already compiled.
    """
    check_depth(depth)
    new = _transformed(module, has_new_units=True)
    matmuls_of(new).measure(example_args, example_kwargs)
    # Unlike a closure, it is copied with its arguments, so each copied module has its own.
    new.__dict__["gauge"] = functools.partial(_gauge_of, new)
    return new


def _gauge_of(module: nn.Module) -> Gauge:
    """Return the units in force."""
    return matmuls_of(module).gauge


def simulate_format(
    module: nn.Module,
    operand_format: FormatLike | None,
    gradient_format: FormatLike | None,
    *,
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
) -> nn.Module:
    """Return a copy of ``module`` whose matmuls run as if in low-precision formats.

    Every operand of every matmul (linear, matmul, einsum, convolution, attention, ...) is rounded
    to one format. The gradient that arrives at its output is rounded to another before the matmul's
    own gradients are computed. Gradients pass through the rounding of operands unchanged. Terms
    that are added to a matmul, and everything between matmuls, keep their precision.

    Combined with :func:`lossless_unit_scale`, in either order, it rounds the scaled operands and
    gradients.

    Args:
        module: Any module. It does not change.
        operand_format: Format of the operands: a name, a :class:`NumberFormat`,
            ``(exponent_bits, mantissa_bits)``, or a :class:`BlockFormat`, whose blocks lie along
            the dimension that each matmul sums over. NVFP4's scale of a tensor is its unit, or
            without units, its largest magnitude. ``None`` does not round them.
        gradient_format: Format of the gradients.
        rounding: ``"nearest"`` or ``"stochastic"``, as in :func:`lightning_unitscale.quantize.
            quantize`.
        saturate: Whether out-of-range values become the largest number. The default is true for
            formats without infinities.
        include: Globs of module paths or tensor names whose matmuls are simulated; all by default.
        exclude: Globs to leave out, even if ``include`` has them.
        seed: Seed of stochastic rounding, which does not use torch's random numbers.
        grid: ``"fixed"``, or ``"moving"``: every tensor is multiplied by a number in (1/2, 1], and
            divided by it after rounding. The number changes at every training step. So the errors
            of a weight that hardly changes average out over the steps.
        gradient_rounding: Rounding of gradients, by default that of the operands.
        square_weights: With block formats, whether weights of linear layers are rounded in square
            blocks, so that both directions read the same numbers.
        hadamard: With block formats, whether to multiply both operands of the weight gradients of
            linear layers by a random Hadamard matrix, in runs of 16.
        exempt: Computations that are not rounded: pairs of a glob and ``"forward"``,
            ``"input_gradient"`` or ``"weight_gradient"``.

    Returns:
        A new module with ``explain()``: which matmuls were rounded in its first call, and why
        others were not. If you use ``torch.compile`` with Inductor, its ``forward`` is compiled
        separately from the surrounding code. With another backend it stays uncompiled.

    Raises:
        ValueError: If a format or a pattern is invalid, or the module is already compiled.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3;
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), appendix C; NVIDIA, "Pretraining
        Large Language Models with NVFP4" (arXiv 2509.25149), section 4.
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
        gradient_rounding=gradient_rounding,
        square_weights=square_weights,
        hadamard=hadamard,
        exempt=exempt,
    )
    return _transformed(module, simulated)


def simulate_fp8(module: nn.Module) -> nn.Module:
    """Apply :func:`simulate_format` with E4M3FN for operands and E5M2 for gradients."""
    return simulate_format(module, *FP8_FORMATS)


def fp8_linears(
    module: nn.Module,
    *,
    scaling: Scaling = "constant",
    exclude: str | Sequence[str] | None = None,
    gradient_format: GradientFormat = DEFAULT_GRADIENT,
    grid: Grid = "fixed",
    exempt: Sequence[Exemption] = (),
) -> nn.Module:
    """Return a copy of ``module`` whose linear layers and their gradients run in real FP8.

    Eligible are ``F.linear`` and matmuls with a 2-D parameter (``matmul``, ``addmm``, ...). Their
    numbers of features must be multiples of 16, or large enough that padding pays off. Operands are
    cast to E4M3FN, and incoming gradients to ``gradient_format``. Results keep their type. GPUs
    need compute capability 8.9. CPUs emulate FP8 slowly. Combined with :func:`simulate_format`, in
    either order, FP8 matmuls are not rounded again. Values kept for the backward pass are FP8.
    :func:`compile` recomputes casts whose source the backward pass reads.

    Args:
        module: Any module. It does not change.
        scaling: ``"constant"`` uses the units of :func:`lossless_unit_scale`, applied before or
            after, and 1 without it. ``"dynamic"`` maps every tensor's largest element to the end of
            its format in every call. It needs no unit scaling, but one more pass over each tensor.
        exclude: Globs of module paths or tensor names whose layers do not change.
        gradient_format: ``"E4M3FN"`` fits gradients with their own units or dynamic scales, unless
            they are very uneven. ``"E5M2"`` has more range and twice the rounding error. Use it for
            constant scales without unit scaling, or to compare with packages that use it.
        grid: ``"moving"`` multiplies cast tensors by a number in (1/2, 1] and divides the matmul by
            it. The number changes at every training step, so the errors of a weight that hardly
            changes average out. It needs constant scales.
        exempt: Computations that stay out of FP8, as for :func:`simulate_format`.

    Returns:
        A new module with ``explain()``: the decision on each layer, and why.

    Raises:
        ValueError: If an argument is invalid, or the module is already compiled.
        RuntimeError: In the first call, if the module is on a device without FP8.

    Examples:
        >>> import torch
        >>> from lightning_unitscale import transforms
        >>> layer, x = torch.nn.Linear(32, 16), torch.randn(8, 32)
        >>> fast = transforms.fp8_linears(transforms.lossless_unit_scale(layer, x))
        >>> fast(x).shape
        torch.Size([8, 16])
    """
    linears = FP8Linears(
        scaling, exclude=exclude, gradient_format=gradient_format, grid=grid, exempt=exempt
    )
    return _transformed(module, linears)


def compile(module: nn.Module, mode: CompileMode = "default") -> nn.Module:
    """Return a copy of ``module`` whose captured graphs are compiled by Inductor.

    This compiles the result of all transforms, whether you apply them before or after.
    ``torch.compile`` on a module that was transformed by rules or a memory budget would capture the
    original module again.

    Args:
        module: A module, transformed or not, that Dynamo can capture. It does not change.
        mode: As for ``torch.compile``: ``"default"``, ``"reduce-overhead"`` with CUDA graphs,
            ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.

    Returns:
        A new module with its own parameters and ``explain()``. It is compiled at the first call,
        and again for inputs of another kind, as by ``torch.compile``.

    Raises:
        ValueError: If ``module`` was compiled by the user, or the mode is unknown.
    """
    check_choice("mode", mode, get_args(CompileMode), "unknown", "leave it out for 'default'")
    new = own_copy(module)
    capture(new, "compile").use_executor("inductor", mode)
    return new


def _transformed(module: nn.Module, *formats: Format, has_new_units: bool = False) -> nn.Module:
    """Return a deep copy of ``module`` whose matmuls run with units and formats."""
    new = own_copy(module)
    ModuleMatmuls.add(new, formats, has_new_units=has_new_units)
    new.__dict__["explain"] = MethodType(explain_forward, new)
    return new
