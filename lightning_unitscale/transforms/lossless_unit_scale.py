"""``lossless_unit_scale``: the pass on a plain module, calibrated on example inputs."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.transforms.attach import products_of, transformed
from lightning_unitscale.transforms.gauge import Gauge
from lightning_unitscale.transforms.lossless import Depth, LosslessUnitScale
from lightning_unitscale.transforms.rehearsal import LiveGradients, calibrate


def lossless_unit_scale(
    module: nn.Module, *example_args: Any, depth: Depth = "products", **example_kwargs: Any
) -> nn.Module:
    """A copy of ``module`` that computes the same bits with matrix products at RMS 1.

    Every operand of a matrix product, and the gradient that arrives at it, is stored in units of a
    power of two near its RMS, measured on the example inputs. Powers of two are exact, so values
    and gradients are those of ``module``. Its parameters keep their names and values; lazy ones
    get theirs in its first call, as those of ``module`` would.

    At ``depth="products"`` any Python code will do: the products are met as they run. Within a
    ``torch.compile`` of your own it is ``module`` that is compiled; :func:`compile` compiles what
    the transforms make of it.

    Args:
        module: Any module; one that Dynamo can capture at ``depth="all"``. It is left as it is.
        *example_args: Arguments of one representative call, on the module's device.
        depth: ``"products"``, or ``"all"`` to store every tensor between them in units too (FP16).
        **example_kwargs: Keyword arguments of that call.

    Returns:
        A new module with ``gauge()``, the units in force, and ``explain()``: which products ran in
        units in its first call, and why others did not. Gradient units are measured on the example
        when the module returns a loss (a scalar, or ``loss`` in a mapping, an attribute or the
        first of a tuple), else in its first real backward pass. At ``depth="all"`` calls that
        record gradients run as ``module`` is written until then: no format is simulated in them,
        and nothing runs in FP8.

    Raises:
        ValueError: If ``depth`` is unknown or the module is already compiled.
    """
    rewrite = LosslessUnitScale(depth, measures_drift=False)
    new = transformed(module, "lossless_unit_scale", rewrite)
    products, steps = products_of(new), steps_of(new)
    if products is not None:
        products.measure(example_args, example_kwargs)
    elif steps is not None:
        step = steps.steps["forward"]
        measured = calibrate(step, rewrite, example_args, example_kwargs)
        if rewrite.gauge and measured is None:
            LiveGradients(rewrite).attach(step)
    new.__dict__["gauge"] = _GaugeOf(new, rewrite)
    return new


class _GaugeOf:
    """``module.gauge()``: an object rather than a closure, so that a copied module has its own."""

    def __init__(self, module: nn.Module, rewrite: LosslessUnitScale) -> None:
        self._module = module
        self._rewrite = rewrite

    def __call__(self) -> Gauge:
        """The units in force."""
        products = products_of(self._module)
        return self._rewrite.gauge if products is None else products.gauge
