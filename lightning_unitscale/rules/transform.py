"""``unit_scale``: unit scaling by rules on a plain module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.arguments import check_flag
from lightning_unitscale.capture.attach import captured_forward, reject_compiled
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.graph.nodes import tensors_in
from lightning_unitscale.lossless.calibrate import Measured
from lightning_unitscale.lossless.late_units import LateUnits
from lightning_unitscale.lossless.rehearsal import calibrate, runs_in_fp16
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
from lightning_unitscale.rules.build_plan import plan_step
from lightning_unitscale.rules.plan import OnUnknown, RuleOptions
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.weights import (
    ParameterGradients,
    already_at_unit_scale,
    set_to_unit_scale,
)

Replace = Mapping[Callable[..., Any], Callable[..., Any]]

_OWNER = "unit_scale"


def unit_scale(
    module: nn.Module,
    replace: Replace | None = None,
    *,
    residual: tuple[float, float] | None = None,
    init_weights: bool = True,
    on_unknown: OnUnknown = "calibrate",
    residual_mult: float = 1.0,
    residual_attn_ratio: float = 1.0,
    attention_mult: float = 1.0,
    activation_mult: float = 1.0,
    loss_mult: float = 1.0,
) -> nn.Module:
    """A copy of ``module`` that is unit-scaled by rules: another model, with the same parts.

    Weights are set to RMS 1 and biases to 0; every matrix product gets the factor that brings its
    result to RMS 1 (``1 / fan_in`` where a loss reads it directly), attention's logits become
    ``(m / d) q.k``, and the branches of residual adds get weights. Whatever lies between is left as
    it was written and only followed: the operands of the next product are brought to RMS 1.
    Gradients are those of the new function; they are stored in powers of two that bring them to
    RMS 1 at every product and every parameter.

    The module is captured, and everything is decided, in its first call.

    Args:
        module: Any module that Dynamo can capture; it is left as it is.
        replace: Functions to put in place of others, which are then not looked into.
        residual: Weights of residual branches with attention and of the others; by default
            u-muP's rule for depth.
        init_weights: Whether to set weights to RMS 1 and biases to 0.
        on_unknown: What to do where the scale of a tensor follows from no rule: measure it on the
            first batch (``"calibrate"``), take it for 1 (``"keep"``), or raise (``"error"``).
        residual_mult: u-muP's share of all branches in the last sum.
        residual_attn_ratio: u-muP's share of attention branches relative to the others.
        attention_mult: Factor on attention's logits.
        activation_mult: Factor on the input of activations that follow a weight.
        loss_mult: Factor on the logits of a cross-entropy.

    Returns:
        A new module with ``explain()``: what was rewritten and why, operation by operation.

    Raises:
        ValueError: If an argument is out of its range, or the module is compiled or unit-scaled by
            rules already.
        RuntimeError: In the first call, if ``on_unknown="error"`` and a scale is not known.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257); Blake et al., "u-muP"
        (arXiv 2407.17465).
    """
    options = RuleOptions(
        residual=residual,
        on_unknown=on_unknown,
        residual_mult=residual_mult,
        residual_attn_ratio=residual_attn_ratio,
        attention_mult=attention_mult,
        activation_mult=activation_mult,
        loss_mult=loss_mult,
    )
    check_flag("init_weights", init_weights)
    reject_compiled(module)
    _reject_scaled(module)
    rules = RuleRewrite(options, replace)
    gradients = ParameterGradients(ends_backward=True)
    lossless = LosslessUnitScale(measures_drift=False)
    new, step = captured_forward(module, _OWNER, rules, gradients, lossless)
    step.before_call = _FirstCall(rules, gradients, lossless, init_weights)
    return new


def _reject_scaled(module: nn.Module) -> None:
    steps = steps_of(module)
    if steps is not None and any(isinstance(p, RuleRewrite) for p in steps.passes):
        raise ValueError(
            f"module={type(module).__name__}: it is unit-scaled by rules already; expected one "
            "whose function is its author's; pass the module that it was made of."
        )


@dataclass(eq=False)
class _FirstCall:
    """Decides everything on the arguments of the first call.

    A module that returns no loss gets a random gradient at RMS 1 for each of its outputs; if the
    first real one is of another size, units follow it in the next call. An object rather than a
    closure, so that a copied module decides for itself.

    What is zero in the first call is measured in later ones that record gradients, until it is not.
    These calls run once: probes measure them, and the units are in force in the next one.
    """

    rules: RuleRewrite
    gradients: ParameterGradients
    lossless: LosslessUnitScale
    init_weights: bool
    is_planned: bool = False
    is_measured: bool = False
    num_later_calls: int = 0
    late: LateUnits = field(init=False)
    # What probes have measured, on its way from the device.
    sent: Callable[[], Measured] | None = None

    def __post_init__(self) -> None:
        self.late = LateUnits(self.lossless)

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Called before each call of the step."""
        module = step.owner.module
        if self.is_measured:
            self._measure_late(step, args, kwargs)
            return
        if not self.is_planned:
            options, prior = self.rules.options, self.rules.plan
            plan = plan_step(step, args, kwargs, options, prior, init_weights=self.init_weights)
            if self.init_weights and already_at_unit_scale(module, plan.parameters):
                warnings.warn(
                    f"unit_scale: the weights of {type(module).__name__} have RMS near 1 already, "
                    "as after training at unit scale, so weights and biases are left as they are; "
                    "to load a checkpoint, call the module once before load_state_dict.",
                    stacklevel=4,
                )
            else:
                plan = replace(plan, parameters=set_to_unit_scale(module, plan.parameters))
            self.rules.plan = plan
            step.invalidate()
            self.is_planned = True
        measured = calibrate(step, self.lossless, args, kwargs, seeds=_random_seeds)
        if measured is not None:
            self.gradients.set_measured(measured)
        self.is_measured = True
        self._go_on(step, is_due=False)

    def _measure_late(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take units that could not be measured before, and measure what still has none."""
        self._receive(step)
        is_due = False
        if torch.is_grad_enabled():
            self.num_later_calls += 1
            is_due = self.late.is_due(self.num_later_calls)
            if self._is_hidden(step) and self.late.needs_rehearsal(self.num_later_calls):
                of_missing = partial(self.late.of, rehearsed=True)
                calibrate(
                    step, self.lossless, args, kwargs, seeds=_random_seeds, results=of_missing
                )
        self._go_on(step, is_due=is_due)

    def _receive(self, step: CapturedStep) -> None:
        """Take the units that probes have measured; from CUDA their numbers come a call later."""
        arrived, self.sent = self.sent, self.lossless.drift.send()
        if not any(parameter.is_cuda for parameter in step.owner.module.parameters()):
            arrived, self.sent = self.sent, None
        if arrived is not None:
            self.lossless.update_gauge(self.late.of(arrived()))

    def _is_hidden(self, step: CapturedStep) -> bool:
        """Return whether probes may not see what is to be measured, or see it flushed to zero."""
        rounds = any(graph_pass.phase.rounds for graph_pass in step.owner.passes)
        is_seen = self.lossless.missing <= self.lossless.drift.names
        return rounds or not is_seen or runs_in_fp16(step.owner.module)

    def _go_on(self, step: CapturedStep, *, is_due: bool) -> None:
        """Have this call measured, if it is due, and end if all units are known."""
        is_missing = bool(self.lossless.missing)
        self.lossless.observes = is_missing
        step.owner.observe(_OWNER, is_missing and is_due)
        if not is_missing:
            step.before_call = None


def _random_seeds(output: Any) -> Sequence[tuple[Tensor, Tensor]]:
    """A gradient at RMS 1 for each float tensor that a module returned."""
    tensors = [
        tensor
        for tensor in tensors_in(_plain(output))
        if tensor.is_floating_point() and tensor.requires_grad
    ]
    return [(tensor, torch.randn_like(tensor)) for tensor in tensors]


def _plain(output: Any) -> Any:
    """Outputs that look like mappings but are none to pytree (those of transformers)."""
    if isinstance(output, Mapping):
        return dict(output)
    values = getattr(output, "__dict__", None)
    if values and not isinstance(output, (Tensor, nn.Module)):
        return copy.copy(values)
    return output
