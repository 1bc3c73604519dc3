"""Measure the units of a captured step: in a rehearsal that is undone, or in real calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.transforms.calibration import (
    Calibrator,
    Measured,
    find_loss,
    root_mean_square,
)
from lightning_unitscale.transforms.copied_inputs import copied_inputs
from lightning_unitscale.transforms.full_precision import (
    full_precision,
    in_full_precision,
    runs_in_fp16,
)
from lightning_unitscale.transforms.gauge import GaugePair
from lightning_unitscale.transforms.lossless import LosslessUnitScale
from lightning_unitscale.transforms.restoring import restoring

# Pairs of an output and a gradient for it.
Seeds = Callable[[Any], Sequence[tuple[Tensor, Tensor]]]
Reduce = Callable[[Calibrator], tuple[Mapping[str, float], Mapping[str, float]]]


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


class LiveGradients:
    """Lets real calls run measured until a backward pass was seen; then uses what it showed.

    An object rather than a closure, so that a copied module measures its own gradients.
    """

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self.rewrite = rewrite
        self.calibrator = rewrite.calibrator()
        self.num_calls = 0

    def attach(self, step: CapturedStep) -> None:
        """Measure the next calls of a step."""
        step.interpreter, step.before_call = self.calibrator, self

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


class MeasuredAgain:
    """Measures, before its first call, the units that a captured step has no names for yet.

    Products have mostly the same names in a graph and at the dispatcher; their units stay.

    Args:
        rewrite: The pass, with the units that are known.
    """

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self.rewrite = rewrite

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before each call of the step."""
        seen: set[str] = set()

        def unknown(calibrator: Calibrator) -> tuple[Measured, Measured]:
            forward, backward = calibrator.results()
            seen.update(name.rpartition(":")[0] for name in forward)
            known = self.rewrite.gauge
            return (
                {name: rms for name, rms in forward.items() if name not in known},
                {name: rms for name, rms in backward.items() if name not in known},
            )

        calibrate(step, self.rewrite, args, kwargs, results=unknown)
        step.before_call = None
        if step.owner.executor != "eager":
            step.reset()  # what was rehearsed is of no use to a compiler
        if not seen <= self.rewrite.gauge.keys():
            LiveGradients(self.rewrite).attach(step)
            if step.before_call is not None:
                step.before_call(step, args, kwargs)
