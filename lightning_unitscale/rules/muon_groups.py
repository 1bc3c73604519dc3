"""Divide the parameters of a module into those for Muon and those for AdamW, by their roles."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.learning_rates import takes_muon
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.transform import unit_scale


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
        parameters is left out. Optimizers of other packages that take Muon's parameters in groups
        of their own mark these by the same name.

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
