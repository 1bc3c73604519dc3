"""Transforms of a plain module's products: lossless unit scaling, and formats; and ``compile``.

Where all that is wanted are units and formats of products, these run at the dispatcher, whatever
Python code is around them. Everything else needs graphs: ``forward`` is captured then, with all
that was wanted before as passes over its graphs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import MethodType
from typing import Any, get_args

from torch import nn

from lightning_unitscale.arguments import check_choice, check_depth
from lightning_unitscale.capture.attach import (
    capture,
    captured_forward,
    explain_forward,
    own_copy,
    products_of,
)
from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.dispatch.captured_formats import CapturedFormats
from lightning_unitscale.dispatch.coverage import Coverage
from lightning_unitscale.dispatch.lost_formats import LostFormats
from lightning_unitscale.dispatch.module_products import ModuleProducts
from lightning_unitscale.dynamo.executors import CompileMode
from lightning_unitscale.functional.low_precision import (
    DEFAULT_GRADIENT,
    Casts,
    GradientFormat,
    Scaling,
)
from lightning_unitscale.graph.passes import GraphPass
from lightning_unitscale.lossless.gauge import Gauge
from lightning_unitscale.lossless.rehearsal import LiveGradients, calibrate
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
from lightning_unitscale.precision.dither import Grid
from lightning_unitscale.precision.fp8 import FP8Linears
from lightning_unitscale.precision.simulate import FP8_FORMATS, SimulateFormat
from lightning_unitscale.quantize import FormatLike, Rounding


def lossless_unit_scale(
    module: nn.Module, *example_args: Any, depth: str = "products", **example_kwargs: Any
) -> nn.Module:
    """A copy of ``module`` that computes the same bits with matmuls near RMS 1.

    Every operand of a matrix product, and the gradient that arrives at it, is stored in units of a
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
        A new module with ``gauge()``, the units in force, and ``explain()``: which products ran in
        units in its first call, and why others did not. Gradient units are measured on the example
        when the module returns a loss (a scalar, or ``loss`` in a mapping, an attribute or the
        first of a tuple), else in its first real backward pass.

    Raises:
        ValueError: If ``depth`` is another one, or the module is already compiled.
    """
    check_depth(depth)
    rewrite = LosslessUnitScale(measures_drift=False)
    new = _transformed(module, "lossless_unit_scale", rewrite)
    products, steps = products_of(new), steps_of(new)
    if products is not None:
        products.measure(example_args, example_kwargs)
    elif steps is not None:
        step = steps.steps["forward"]
        measured = calibrate(step, rewrite, example_args, example_kwargs)
        if rewrite.gauge and measured is None:
            LiveGradients(rewrite).attach(step)
    # Unlike a closure it is copied with its arguments, so that a copied module has its own.
    new.__dict__["gauge"] = functools.partial(_gauge_of, new, rewrite)
    return new


def _gauge_of(module: nn.Module, rewrite: LosslessUnitScale) -> Gauge:
    """The units in force."""
    products = products_of(module)
    return rewrite.gauge if products is None else products.gauge


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
    """A copy of ``module`` whose matrix products run as if in low-precision formats.

    Every operand of every product (linear, matmul, einsum, convolution, attention, ...) is rounded
    to one format, and the gradient that arrives at its output to another before the product's own
    gradients are computed from it. Gradients pass the rounding of operands as they are. What is
    added to a product with its gradient, and all that lies between products, keeps its precision.

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
        include: Globs of module paths or tensor names whose products are simulated; all by
            default.
        exclude: Globs to leave out, stronger than ``include``.
        seed: Of stochastic rounding, which leaves torch's random numbers alone.
        grid: ``"fixed"``, or ``"moving"``: every tensor is multiplied by a number in (1/2, 1], and
            divided by it after rounding, another one at every training step, so that the errors of
            a weight that hardly changes average out over the steps.

    Returns:
        A new module with ``explain()``: which products were rounded in its first call, and why
        others were not. Within a ``torch.compile`` of your own it runs as it is, uncompiled.

    Raises:
        ValueError: If a format or a pattern makes no sense, or the module is already compiled.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3;
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), appendix C.
    """
    graph_pass = SimulateFormat(
        operand_format,
        gradient_format,
        rounding=rounding,
        saturate=saturate,
        include=include,
        exclude=exclude,
        seed=seed,
        grid=grid,
    )
    return _transformed(module, "simulate_format", graph_pass)


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
    casts: Casts = "fused",
) -> nn.Module:
    """A copy of ``module`` whose linear layers, and their gradients, run in real FP8.

    Eligible are ``F.linear`` and products with a 2-D parameter (``matmul``, ``addmm``, ...) whose
    numbers of features are multiples of 16, or large enough for padding to pay. Operands are cast
    to E4M3FN, arriving gradients to ``gradient_format``. Results have the type that they had. It
    runs on GPUs of compute capability 8.9 and above, and on CPUs, slowly, as a check. Together with
    :func:`simulate_format`, in either order, what runs in FP8 is not rounded again. What is kept
    for the backward pass is what ``module`` keeps; in a captured graph (:func:`compile`,
    ``depth="all"``, dynamic scales) it is FP8 only.

    Args:
        module: Any module; one that Dynamo can capture with dynamic scales. It is left as it is.
        scaling: ``"constant"`` takes scales from :func:`lossless_unit_scale`, in either order, and
            1 without it. ``"dynamic"`` brings every tensor's largest element to the end of its
            format in every call, which needs no unit scaling and a pass more over each tensor.
        exclude: Globs of module paths or tensor names whose layers stay as they are.
        gradient_format: ``"E4M3FN"`` holds gradients in units of their own, or with dynamic scales,
            unless they are very uneven. ``"E5M2"`` has more range and twice the rounding error: for
            constant scales without unit scaling, or to compare with packages that take it.
        grid: ``"moving"`` multiplies what is cast by a number in (1/2, 1], another one at every
            training step, and divides the product by it, so that the errors of a weight that hardly
            changes average out; for constant scales.
        casts: How Inductor casts, in what :func:`compile` compiles: ``"fused"`` as a part of the
            kernels that make the operands, ``"kernel"`` by one Triton kernel for each.

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
    graph_pass = FP8Linears(
        scaling, exclude=exclude, gradient_format=gradient_format, grid=grid, casts=casts
    )
    return _transformed(module, "fp8_linears", graph_pass)


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
    new, step = captured_forward(module, "compile")
    step.owner.use_executor("inductor", mode)
    return new


def _transformed(module: nn.Module, owner: str, *passes: GraphPass) -> nn.Module:
    """A deep copy of ``module`` with its own parameters, whose ``forward`` runs ``passes``.

    Transforms nest in any order. Passes that need no graph run at the dispatcher, unless the module
    is captured already.
    """
    new = own_copy(module)
    passes = (*(_counting(owner, one) for one in passes if one.phase.rounds), *passes)
    if steps_of(new) is not None or any(graph_pass.needs_graph for graph_pass in passes):
        capture(new, owner, passes)
        return new
    ModuleProducts.add(new, passes)
    new.__dict__["explain"] = MethodType(explain_forward, new)
    return new


def _counting(owner: str, formats: Any) -> GraphPass:
    """Return the pass that counts what runs in a format, for when the module is captured."""
    return CapturedFormats(formats, functools.partial(_warn_of_lost, LostFormats(owner)))


def _warn_of_lost(lost: LostFormats, name: str, coverage: Coverage, when: str) -> None:
    if text := lost.new_in(name, coverage, when):
        warnings.warn(f"{name}: {text}", stacklevel=2)
