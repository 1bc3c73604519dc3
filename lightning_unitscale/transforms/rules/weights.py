"""Set parameters to unit scale, once, and bring their gradients there."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.functional.scale import scale_bwd
from lightning_unitscale.graph.nodes import (
    INPUT,
    INTERNAL,
    MODULE,
    is_float_tensor,
    replace_other_uses,
    requires_grad,
)
from lightning_unitscale.graph.passes import GraphPass, Stage, StepGraph
from lightning_unitscale.transforms.rules.plan import ParameterPlan
from lightning_unitscale.transforms.rules.rehearsal import parameter_rms

# Beyond this a gradient is taken for zero, or for broken: its unit would be noise.
_MAX_LOG2 = 100


def set_to_unit_scale(
    module: nn.Module, plans: Mapping[str, ParameterPlan]
) -> dict[str, ParameterPlan]:
    """Divide each parameter that is to be scaled by its RMS, in place, and zero the biases.

    Returns:
        The plans with the RMS that each parameter had.
    """
    parameters = dict(module.named_parameters())
    done = {}
    with torch.no_grad():
        for fqn, plan in plans.items():
            info = plan.info
            if plan.action == "scaled":
                sigma = parameter_rms(parameters[fqn])
                parameters[fqn].div_(sigma)
                info = replace(info, sigma=sigma)
            elif plan.action == "zeroed":
                parameters[fqn].zero_()
            done[fqn] = replace(plan, info=info)
    return done


class ParameterGradients(GraphPass):
    """Brings the gradient of every parameter to RMS 1 by a power of two of its own.

    An optimizer that divides by the size of the gradient does not notice; it keeps 16-bit gradients
    in range, and gives SGD gradients of the size that its rule for learning rates is made for.

    Attributes:
        log2_factors: Exponent of the factor on the gradient, by path of the parameter.
    """

    name = "parameter gradients at RMS 1"
    stage = Stage.REWRITE

    def __init__(self) -> None:
        self.log2_factors: dict[str, int] = {}

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        nodes = [
            (node, node.meta[INPUT].fqn)
            for node in graph.graph.find_nodes(op="placeholder")
            if INPUT in node.meta
            and node.meta[INPUT].kind == "parameter"
            and is_float_tensor(node)
            and requires_grad(node)
        ]
        if not nodes:
            return ("no parameter",)
        fqns = [fqn for _, fqn in nodes]
        factors = _Factors(self, fqns, graph.device)
        vector = graph.add_state("gradient_factors", factors, factors())
        with graph.graph.inserting_after(vector):
            unbound = graph.graph.call_function(torch.unbind, (vector,))
        last = unbound
        for index, (node, _) in enumerate(nodes):
            with graph.graph.inserting_after(last):
                factor = graph.graph.call_function(operator.getitem, (unbound, index))
            with graph.graph.inserting_after(factor):
                scaled = graph.graph.call_function(scale_bwd, (node, factor))
            scaled.meta.update(
                {key: node.meta[key] for key in ("example_value", MODULE) if key in node.meta}
            )
            scaled.meta[INTERNAL] = True
            scaled.meta[INPUT] = node.meta[INPUT]
            replace_other_uses(node, scaled)
            last = scaled
        return (f"gradients of {len(nodes)} parameters",)

    def set_measured(
        self, measured: Mapping[str, float], *, num_accumulated: int = 1, num_replicas: int = 1
    ) -> None:
        """Take over what the gradients of one batch measured.

        Args:
            measured: RMS of each gradient, with the loss scaled as in training.
            num_accumulated: Batches whose gradients are summed up for one optimizer step.
            num_replicas: Ranks over whose gradients the mean is taken.
        """
        # Gradients of different batches are nearly independent: a sum of n grows by sqrt(n), a
        # mean over n shrinks by as much.
        global_batch = math.sqrt(num_accumulated / num_replicas)
        for fqn, rms in measured.items():
            total = rms * global_batch
            known = total > 0 and math.isfinite(total)
            exponent = -round(math.log2(total)) if known else 0
            self.log2_factors[fqn] = max(-_MAX_LOG2, min(_MAX_LOG2, exponent))

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterGradients:
        new = copy.copy(self)
        memo[id(self)] = new
        new.log2_factors = dict(self.log2_factors)
        return new


class _Factors:
    """The factors of one graph as a tensor, made anew only when they change."""

    def __init__(self, owner: ParameterGradients, fqns: list[str], device: torch.device) -> None:
        self._owner = owner
        self._fqns = fqns
        self._device = device
        self._exponents: list[int] = []
        self._tensor: Tensor | None = None

    def __call__(self) -> Tensor:
        exponents = [self._owner.log2_factors.get(fqn, 0) for fqn in self._fqns]
        if self._tensor is None or exponents != self._exponents:
            self._exponents = exponents
            values = [2.0**one for one in exponents]
            self._tensor = torch.tensor(values, device=self._device)
        return self._tensor




