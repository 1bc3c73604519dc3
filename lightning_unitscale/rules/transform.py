"""Unit-scale an ordinary module by rules, or find the parameters that Muon should train."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_unitscale.arguments import check_flag
from lightning_unitscale.capture.captured_copy import captured_forward, reject_compiled
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.matmuls.module_matmuls import ModuleMatmuls
from lightning_unitscale.matmuls.session import SESSION
from lightning_unitscale.rules.build_plan import plan_step
from lightning_unitscale.rules.exchanged import PlannedParameters
from lightning_unitscale.rules.learning_rates import takes_muon
from lightning_unitscale.rules.plan import OnUnknown, RuleOptions
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.unit_weights import (
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
    """Return a copy of ``module`` that is unit-scaled by rules, which is a different model.

    Weights are set to RMS 1 and biases to 0. Every matmul gets the factor that brings its result to
    RMS 1 (``1 / fan_in`` if a loss reads it directly). Attention's logits become ``(m / d) q.k``,
    and the branches of residual adds get weights. All other operations stay as written, and the
    operands of the next matmul are brought to RMS 1. Gradients are those of the new function,
    multiplied by powers of two that bring them to RMS 1 at every matmul and every parameter.

    The module is captured, and all factors are decided, in its first call.

    Args:
        module: Any module that Dynamo can capture. It is not changed.
        replace: Functions to replace by others, which are then not traced.
        residual: Weights of residual branches with attention and of the others. The default is
            u-muP's rule for depth.
        init_weights: Whether to set weights to RMS 1 and biases to 0.
        on_unknown: Action if no rule gives the scale of a tensor: measure it on the first batch
            (``"calibrate"``), assume 1 (``"keep"``), or raise (``"error"``).
        residual_mult: u-muP's share of all branches in the last sum.
        residual_attn_ratio: u-muP's share of attention branches relative to the others.
        attention_mult: Factor on attention's logits.
        activation_mult: Factor on the input of activations that follow a weight.
        loss_mult: Factor on the logits of a cross-entropy.

    Returns:
        A new module with ``explain()``, which lists every rewritten operation with its reason.

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
    steps = steps_of(module)
    if steps is not None and any(isinstance(each, RuleRewrite) for each in steps.passes):
        raise ValueError(
            f"module={type(module).__name__}: it is unit-scaled by rules already. Expected an "
            "unscaled module. Pass the module that it was made from."
        )
    rules = RuleRewrite(options, replace)
    gradients = ParameterGradients(ends_backward=True)
    new, step = captured_forward(module, _OWNER, rules, gradients)
    step.before_call = _BeforeCall(rules, gradients, init_weights)
    ModuleMatmuls.add(new, has_new_units=True)
    return new


@dataclass(eq=False)
class _BeforeCall:
    """Hook that decides everything on the arguments of the first call.

    It decides on a layer that replaced another one before the next call.
    """

    # It is an object rather than a closure, so that a copied module decides for itself.

    rules: RuleRewrite
    gradients: ParameterGradients
    init_weights: bool
    parameters: PlannedParameters | None = None

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Decide before a call of the step, if there is anything to decide on."""
        module, options, prior = step.owner.module, self.rules.options, self.rules.plan
        exchanged: list[str] = []
        if self.parameters is not None:
            exchanged = self.parameters.find_exchanged(module, prior)
            if not exchanged:
                return
            prior = prior.without(exchanged, step.name)
        with SESSION.being(None):  # the rehearsals' matmuls are not the call's
            plan = plan_step(step, args, kwargs, options, prior, init_weights=self.init_weights)
        if self.parameters is not None:
            plan, _ = self.parameters.settle(module, plan, self.rules.plan, exchanged)
            self.gradients.forget(exchanged)
        elif self.init_weights and already_at_unit_scale(module, plan.parameters):
            warnings.warn(
                f"unit_scale: the weights of {type(module).__name__} have RMS near 1 already, "
                "as after training at unit scale, so weights and biases stay unchanged. "
                "To load a checkpoint, call the module once before load_state_dict.",
                stacklevel=4,
            )
        else:
            plan = replace(plan, parameters=set_to_unit_scale(module, plan.parameters))
        self.rules.plan = plan
        step.invalidate()
        self.gradients.start(num_accumulated=1)
        self.parameters = self.parameters or PlannedParameters()
        self.parameters.record(module, plan)


def muon_param_groups(
    module: nn.Module, *example_args: Any, **example_kwargs: Any
) -> list[dict[str, Any]]:
    """Return parameter groups of a module: hidden matrices for Muon, the others for AdamW.

    The roles are read from the graph of a call, which a copy of the module runs once. Embeddings,
    the readout, vectors, tied weights and parameters that the call does not read are the others.
    Frozen parameters are in no group. The module is not changed.

    Args:
        module: A module that Dynamo can capture.
        example_args: Arguments of a call, such as a batch.
        example_kwargs: Its keyword arguments.

    Returns:
        Two groups for :class:`MuonAdamW`, with ``use_muon`` true and false. A group without
        parameters is left out. Optimizers of other packages use the same key for Muon's groups.

    Examples:
        >>> groups = muon_param_groups(model, tokens)  # doctest: +SKIP
        >>> optimizer = MuonAdamW(groups, lr=3e-4, muon_lr=0.02)  # doctest: +SKIP
    """
    scaled = unit_scale(module, init_weights=False, on_unknown="keep")
    scaled(*example_args, **example_kwargs)
    steps = steps_of(scaled)
    assert steps is not None
    (rules,) = [each for each in steps.passes if isinstance(each, RuleRewrite)]
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            plan = rules.plan.parameters.get(name)
            is_hidden = plan is not None and takes_muon(plan.info, parameter.shape)
            groups[is_hidden].append(parameter)
    return [{"params": found, "use_muon": key} for key, found in groups.items() if found]
