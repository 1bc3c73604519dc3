"""``lossless_unit_scale``: the pass on a plain module, calibrated on example inputs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.transforms.attach import captured_forward
from lightning_unitscale.transforms.calibration import (
    Calibrator,
    find_loss,
    root_mean_square,
)
from lightning_unitscale.transforms.copied_inputs import copied_inputs
from lightning_unitscale.transforms.full_precision import (
    full_precision,
    in_full_precision,
    runs_in_fp16,
)
from lightning_unitscale.transforms.gauge import Gauge, GaugePair
from lightning_unitscale.transforms.lossless import Depth, LosslessUnitScale
from lightning_unitscale.transforms.restoring import restoring

# Pairs of an output and a gradient for it.
Seeds = Callable[[Any], Sequence[tuple[Tensor, Tensor]]]
Reduce = Callable[[Calibrator], tuple[Mapping[str, float], Mapping[str, float]]]


def lossless_unit_scale(
    module: nn.Module, *example_args: Any, depth: Depth = "products", **example_kwargs: Any
) -> nn.Module:
    """A copy of ``module`` that computes the same bits with matrix products at RMS 1.

    Every operand of a matrix product, and the gradient that arrives at it, is stored in units of a
    power of two near its RMS, measured on the example inputs. Powers of two are exact, so values
    and gradients are those of ``module``. Its parameters keep their names and values.

    Args:
        module: Any module that Dynamo can capture; it is left as it is.
        *example_args: Arguments of one representative call, on the module's device.
        depth: ``"products"``, or ``"all"`` to store every tensor between them in units too (FP16).
        **example_kwargs: Keyword arguments of that call.

    Returns:
        A new module with ``gauge()``, the units in force, and ``explain()``, what was rewritten.
        Gradient units are measured on the example when the module returns a loss (a scalar, or
        ``loss`` in a mapping, an attribute or the first of a tuple), else in its first real
        backward pass. Until then, calls that record gradients run as ``module`` is written: no
        format is simulated in them, and nothing runs in FP8. Calls without gradients do run so.

    Raises:
        ValueError: If ``depth`` is unknown or the module is already compiled.
    """
    rewrite = LosslessUnitScale(depth, measures_drift=False)
    new, step = captured_forward(module, "lossless_unit_scale", rewrite)
    measured = calibrate(step, rewrite, example_args, example_kwargs)
    if rewrite.gauge and measured is None:
        live = _LiveGradients(rewrite)
        step.interpreter, step.before_call = live.calibrator, live
    new.__dict__["gauge"] = _GaugeOf(rewrite)
    return new


def calibrate(
    step: CapturedStep,
    rewrite: LosslessUnitScale,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    seed_gradient: float = 1.0,
    results: Reduce = Calibrator.results,
    backward: bool = True,
    seeds: Seeds | None = None,
) -> Mapping[str, float] | None:
    """Rehearse a step forward and backward, put the measured gauge into force, undo the rest.

    A module in FP16, or under autocast to it, is rehearsed in FP32 as well.

    Args:
        step: The captured step.
        rewrite: The pass that gets the gauge.
        args: Positional arguments; the step gets a copy.
        kwargs: Keyword arguments; the step gets a copy.
        seed_gradient: Gradient of the loss (a loss scale, one over the accumulated batches).
        results: Reads the calibrator; a place to agree across ranks.
        backward: Whether to run a backward pass, if the step returns a loss.
        seeds: Makes gradients for what a step without a loss returns.

    Returns:
        RMS of the gradient of each parameter; ``None`` where there was nothing to start a backward
        pass from.
    """
    module = step.owner.module

    def rehearse() -> Mapping[str, float] | None:
        calibrator = rewrite.calibrator()
        with torch.enable_grad() if backward else contextlib.nullcontext():
            given = copied_inputs(args, kwargs)
            if is_wide:
                given = in_full_precision(given)
            output = step.rehearse(calibrator, *given[0], **given[1])
            loss = find_loss(output) if backward else None
            measured: Mapping[str, float] | None = None
            if loss is not None:
                seeded = [(loss, torch.full_like(loss, seed_gradient))]
                measured = _backward(seeded, module, given)
            elif backward and seeds is not None:
                measured = _backward(seeds(output), module, given)
        calibrator.release()
        forward, gradients = results(calibrator)
        rewrite.update_gauge(forward, gradients)
        return measured

    is_wide = False
    with restoring(module):
        measured = rehearse()
    if runs_in_fp16(module):
        # What FP16 loses measures as zero. Tensors that are there in FP16 only (autocast may choose
        # other kernels) keep what was measured above.
        is_wide = True
        wide: Mapping[str, float] | None = None
        try:
            with restoring(module), full_precision(module):
                wide = rehearse()
        except RuntimeError as error:
            is_wide = False
            warnings.warn(
                f"{type(module).__name__}.{step.name}: it runs in FP16 and not in FP32 "
                f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
                "gradients are zero; expected a step without casts to torch.float16 of its "
                "own; use tensor.to(other.dtype) for them.",
                stacklevel=2,
            )
            with restoring(module):
                rehearse()  # the error has discarded what was captured
        measured = None if measured is None else {**measured, **(wide or {})}
    return measured


def _backward(
    seeded: Sequence[tuple[Tensor, Tensor]], module: nn.Module, inputs: Any
) -> Mapping[str, float]:
    """Gradients without touching ``.grad``: hooks of DDP or of an optimizer must not run."""
    named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
    leaves: list[Tensor] = [one for _, one in named]
    leaves += [
        one
        for one in torch.utils._pytree.tree_leaves(inputs)
        if isinstance(one, Tensor) and one.requires_grad
    ]
    if not leaves or not seeded:
        return {}
    roots, gradients = zip(*seeded, strict=True)
    found = torch.autograd.grad(roots, leaves, gradients, allow_unused=True)
    rms = {
        name: root_mean_square(one)
        for (name, _), one in zip(named, found, strict=False)
        # A complex or a sparse gradient has no unit here.
        if one is not None and one.is_floating_point() and one.layout is torch.strided
    }
    values = torch.stack([one.cpu() for one in rms.values()]).tolist() if rms else []
    return dict(zip(rms, values, strict=True))


class _LiveGradients:
    """Lets real calls run measured until a backward pass was seen; then uses what it showed.

    An object rather than a closure, so that a copied module measures its own gradients.
    """

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self.rewrite = rewrite
        self.calibrator = rewrite.calibrator()
        self.num_calls = 0

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before each call of the step."""
        if not torch.is_grad_enabled():
            step.interpreter = None  # a call that no backward pass can follow needs no units of it
            return
        if not self.calibrator.saw_gradients:
            self.calibrator.clear()
            step.interpreter = self.calibrator
            self._warn_of_rounding(step)
            return
        _, backward = self.calibrator.results()
        self.calibrator.release()
        measured = self.rewrite.gauge_from({}, backward)
        gauge = self.rewrite.gauge
        self.rewrite.set_gauge(
            gauge.updated(
                {
                    name: GaugePair(gauge.pair(name).log2_sigma, pair.log2_gamma)
                    for name, pair in measured.items()
                }
            )
        )
        step.interpreter = None
        step.before_call = None

    def _warn_of_rounding(self, step: CapturedStep) -> None:
        self.num_calls += 1
        left_out = [one.name for one in step.owner.passes if one.stage.rounds]
        if self.num_calls == 2 and left_out:
            warnings.warn(
                f"{type(step.owner.module).__name__}: it was called again before any backward pass "
                f"has shown in which units its gradients are, so {', '.join(left_out)} did nothing "
                "yet; expected a backward pass after the first call, or calls without gradients; "
                "use torch.no_grad() for inference.",
                stacklevel=4,
            )


class _GaugeOf:
    """``module.gauge()``: an object rather than a closure, so that a copied module has its own."""

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self.rewrite = rewrite

    def __call__(self) -> Gauge:
        """The units in force."""
        return self.rewrite.gauge
