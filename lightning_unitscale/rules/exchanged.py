"""Find parameters that the user exchanged after rules had planned them, and set the new ones.

A plan names parameters by their paths. A layer that replaces another one has its path but not its
unit scale, so its numbers would get the factors of the old layer.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.rules.learning_rates import ParameterInfo
from lightning_unitscale.rules.plan import ParameterPlan, RulePlan
from lightning_unitscale.rules.unit_weights import is_at_unit_scale, set_to_unit_scale

PARAMETERS_ATTRIBUTE = "_unit_scale_parameters"  # attribute of a module for its PlannedParameters


class _Structure:
    """The layers and parameters of a module, to check before each step whether all are the same."""

    def __init__(self, module: nn.Module) -> None:
        parts = [(path, vars(one)) for path, one in module.named_modules()]
        found = (values.get(kind) for _, values in parts for kind in ("_parameters", "_modules"))
        # Those of a traced module are no dictionaries, and nothing in it can be exchanged.
        self._holders = [holder for holder in found if isinstance(holder, dict)]
        # They are kept, so that no other one can take the identity of one of them.
        self._held = self._found()
        # The state of each layer that PEFT can merge its adapters into, by path.
        self.adapted = [(path, values) for path, values in parts if "merged_adapters" in values]

    def is_intact(self) -> bool:
        """Check whether nothing was added, removed or exchanged."""
        found = self._found()
        return len(found) == len(self._held) and all(map(operator.is_, found, self._held))

    def _found(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._holders)))


class PlannedParameters:
    """The parameters that a module had when its steps were planned, by identity."""

    # A copy of the module has the record of its own parameters.

    def __init__(self, planned: Iterable[tuple[Tensor, ParameterPlan | None]] = ()) -> None:
        self._plans: Any = WeakTensorKeyDictionary(dict(planned))
        self._structure: _Structure | None = None  # when no parameter differed

    def __reduce__(self) -> Any:
        return type(self), (list(self._plans.items()),)

    @property
    def infos(self) -> dict[Tensor, ParameterInfo]:
        """Return how each planned parameter is trained."""
        return {param: plan.info for param, plan in self._plans.items() if plan is not None}

    def record(self, module: nn.Module, plan: RulePlan) -> None:
        """Record the parameters that a module has now."""
        self._structure = None
        for fqn, parameter in module.named_parameters():
            # One that moved to another path keeps its values, and so its plan.
            known = self._plans.get(parameter)
            self._plans[parameter] = plan.parameters.get(fqn, known)

    def find_exchanged(self, module: nn.Module, plan: RulePlan) -> list[str]:
        """Return the paths of parameters that are not the planned ones."""
        if self._structure is not None and self._structure.is_intact():
            return []
        if not self._plans:  # the plan comes from a checkpoint, and so do the numbers
            self.record(module, plan)
        found = [fqn for fqn, one in module.named_parameters() if self._differs(one, fqn, plan)]
        self._structure = None if found else _Structure(module)
        return found

    def _differs(self, parameter: Tensor, fqn: str, plan: RulePlan) -> bool:
        if parameter not in self._plans:
            return True
        planned, own = plan.parameters.get(fqn), self._plans[parameter]
        # Layers of one kind may change places.
        return planned is not None and (own is None or _of_kind(own) != _of_kind(planned))

    def settle(
        self, module: nn.Module, plan: RulePlan, before: RulePlan, exchanged: Collection[str]
    ) -> tuple[RulePlan, list[str]]:
        """Set exchanged parameters to unit scale, and return the plan and the paths of these."""
        parameters = dict(module.named_parameters())
        decided = {fqn for decision in before.values() for fqn in decision.reads}
        plans, new = dict(plan.parameters), dict[str, ParameterPlan]()
        for fqn in plans.keys() - (before.parameters.keys() - set(exchanged)):
            known = self._plans.get(parameters[fqn])
            old = known or before.parameters.get(fqn)
            sigma = 1.0 if old is None else old.info.sigma
            plans[fqn] = replace(plans[fqn], info=replace(plans[fqn].info, sigma=sigma))
            if fqn not in exchanged and fqn in decided:
                plans[fqn] = replace(plans[fqn], action="left", reason="trained as it was")
            elif known is None:
                new[fqn] = plans[fqn]
        # A weight at unit scale was computed from the old one: a copy, an average, a wider layer.
        modules = {
            _parent(fqn)
            for fqn, one in new.items()
            if one.action == "scaled" and not is_at_unit_scale(one.info, parameters[fqn])
        }
        unscaled = {fqn: one for fqn, one in new.items() if _parent(fqn) in modules}
        plans |= set_to_unit_scale(module, unscaled)
        return replace(plan, parameters=plans), sorted(unscaled)

    def refuse_in_evaluation(
        self, title: str, module: nn.Module, plan: RulePlan, exchanged: Collection[str]
    ) -> None:
        """Raise if an evaluation would apply factors to weights that are not at unit scale."""
        parameters = dict(module.named_parameters())
        fresh = [
            fqn
            for fqn in exchanged
            if fqn in plan.parameters
            and plan.parameters[fqn].action == "scaled"
            and not is_at_unit_scale(plan.parameters[fqn].info, parameters[fqn])
        ]
        if fresh:
            raise CaptureError.by_rules(
                title,
                f"{', '.join(fresh)} replaced what was set to unit scale",
                "Only a training batch sets new weights to unit scale",
                "Train it for a batch before you evaluate it",
            )

    def refuse_merged(self, title: str, plan: RulePlan) -> None:
        """Raise if an adapter of PEFT was merged into its layer after both were set to unit scale.

        Call it after :meth:`find_exchanged`.
        """
        adapted = () if self._structure is None else self._structure.adapted
        for path in (path for path, values in adapted if values["merged_adapters"]):
            own = (fqn for fqn in plan.parameters if fqn.startswith(f"{path}."))
            if any(not fqn.startswith(f"{path}.base_layer.") for fqn in own):
                raise CaptureError.by_rules(
                    title,
                    f"the adapter of {path} is merged into its layer",
                    "Both are at unit scale, with factors of their own, so their sum is another "
                    "model",
                    "Leave merge_adapter() out. Unmerged it computes the same",
                )


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _of_kind(plan: ParameterPlan) -> tuple[Any, ...]:
    return plan.action, replace(plan.info, fqn="", sigma=1.0)
