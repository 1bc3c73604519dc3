"""Follow the RMS of tensors through a step, by rules or else by measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.nn.functional as F
from torch import fx

from lightning_unitscale.capture.graph_nodes import MODULE, float_arguments, op_name, tensor_name
from lightning_unitscale.rules.flow import (
    ADDS,
    RULE_ERRORS,
    SUBTRACTS,
    TIMES,
    Flow,
    added_tensors,
    example_of,
    handed_on,
    made_rms,
    numel,
    output_factor,
    parameter_path,
    rule_of,
    writes,
)
from lightning_unitscale.rules.patterns import derived_rms, times_number
from lightning_unitscale.rules.plan import Decision, OnUnknown, Origin, ParameterPlan

# The RMS of a tensor in the step, or None if it is not measured.
Measure = Callable[[fx.Node], float | None]
TRUSTED = 1.5  # a measured RMS replaces a predicted one that is off by more
# Masked logits are not a scale.
_LARGEST = 1e30
_SUMS = ADDS | SUBTRACTS | {"rsub"}


class Scales:
    """Predicted RMS of every tensor of a step, corrected by measurement if that is enabled."""

    def __init__(
        self,
        flow: Flow,
        parameters: Mapping[str, ParameterPlan],
        measure: Measure,
        on_unknown: OnUnknown,
        decisions: dict[str, Decision],
    ) -> None:
        self.flow = flow
        self.parameters = parameters
        self._measure = measure
        self._on_unknown = on_unknown
        self._decisions = decisions
        self._rms: dict[fx.Node, float] = {}
        # Tensors whose scale the model learns (a scale per channel), which must not be undone.
        self._chosen: set[fx.Node] = set()
        self._reasons: dict[fx.Node, str] = {}
        self._combined: set[fx.Node] = set()

    def set(self, node: fx.Node, rms: float) -> None:
        """Set the RMS of a node's result."""
        self._rms[node] = rms

    def of(self, node: fx.Node) -> float:
        """Return the RMS that a factor is based on, or 1 if nothing is known."""
        predicted = self._derived(node)
        if self._is_chosen(node):
            return predicted if predicted is not None else 1.0
        measured = self.measured(node)
        if not measured:  # not measured, or zero everywhere
            if predicted is None:
                root = self.flow.root(node)
                self.require(root, self._reasons.get(root, "no rule"))
            return predicted if predicted is not None else 1.0
        if predicted and 1 / TRUSTED < measured / predicted < TRUSTED:
            return predicted
        self._rms[self.flow.resolve(node)] = measured
        reason = f"measured RMS {measured:.3g}; "
        reason += "{}" if predicted is None else f"where {predicted:.3g} was expected ({{}})"
        self._note(self.flow.root(node), "calibrated", reason)
        return measured

    def require(self, node: fx.Node, reason: str) -> None:
        """Refuse an operation whose needed scale is unknown, if ``on_unknown`` asks for it."""
        if self._on_unknown != "error" or node.op == "placeholder":
            return
        where = node.meta.get(MODULE) or "the step"
        raise RuntimeError(
            f"on_unknown='error': {tensor_name(node)} in {where} ({op_name(node)}): {reason}. "
            "Expected an operation with a scale rule. Register one with "
            "functional.rules.register_rule, name a function for it in replace=, or pass "
            "on_unknown='calibrate' to measure it."
        )

    def measured(self, node: fx.Node) -> float | None:
        """Return the measured RMS of the tensor itself, if measuring is enabled."""
        if self._on_unknown != "calibrate":
            return None
        measured = self._measure(node)
        return None if measured is None or not measured < _LARGEST else measured

    def predicted(self, node: fx.Node) -> float | None:
        """Return the predicted RMS of a tensor, through operations that only pass it on."""
        node = self.flow.resolve(node)
        factor = 1.0
        while node not in self._rms:
            fqn = parameter_path(node)
            if fqn is not None:
                plan = self.parameters.get(fqn)
                return factor if plan is not None and plan.action == "scaled" else None
            source = handed_on(node)
            if source is None:
                return None
            factor /= _kept_by_dropout(node)
            node = self.flow.resolve(source)
        return factor * self._rms[node]

    def follow(self, node: fx.Node, mult: float) -> tuple[float | None, str]:
        """Predict the RMS of an operation's result from its arguments, with the reason."""
        rms, reason = self._predict(node, mult)
        if rms is None:
            self._reasons[node] = reason
            return None, reason
        self._rms[node] = rms
        if any(self._is_chosen(source) for _, source in float_arguments(node)):
            self._chosen.add(node)
        return rms, reason

    def _derived(self, node: fx.Node) -> float | None:
        """Return the predicted RMS, by quadrature for a hand-written activation."""
        predicted, root = self.predicted(node), self.flow.root(node)
        reason = self._reasons.get(root)
        # A sum or a product of one tensor with itself has another RMS than that of two.
        if reason is None and predicted is not None and root not in self._combined:
            return predicted
        rms = derived_rms(self.flow, root, self.predicted)
        if rms is None:
            return predicted
        self._rms[root] = rms
        self._note(root, "derived", f"RMS {rms:.3g} of a hand-written activation, by quadrature")
        return self.predicted(node)

    def _note(self, node: fx.Node, origin: Origin, reason: str) -> None:
        """Give a decision without factors another reason, with the old one in its braces."""
        name = tensor_name(node)
        decision = self._decisions.get(name)
        if decision is not None and not decision.changes:
            reason = reason.replace("{}", decision.reason)
            self._decisions[name] = replace(decision, origin=origin, reason=reason)

    def _is_chosen(self, node: fx.Node) -> bool:
        return self.flow.resolve(node) in self._chosen or self.flow.root(node) in self._chosen

    def _predict(self, node: fx.Node, mult: float) -> tuple[float | None, str]:
        if handed_on(node) is not None:
            return self.predicted(node), HANDS_ON
        scaled = times_number(self.flow, node)
        if scaled is not None:
            source, number = scaled
            rms = self.predicted(source)
            return None if rms is None else rms * number, "times a number, unchanged"
        rms = made_rms(node)
        if rms is not None and not any(map(writes, self.flow.readers(node))):
            return rms, "made by the step itself"
        tensors = [source for _, source in float_arguments(node)]
        if op_name(node) in TIMES and len(tensors) == 2:
            return self._product(node, tensors[0], tensors[1])
        if added_tensors(node) is not None:
            self._combined.add(node)
            return self._sum(tensors)
        rule = rule_of(node)
        if rule is None or not tensors:
            return None, "no rule"
        if op_name(node) in _SUMS:
            return None, "a sum with something that is not a unit-scaled tensor"
        if rule.kind == "normalization":
            return 1.0, rule.reference
        rms = self.predicted(tensors[0])
        if not rms:
            return None, f"{rule.name} of a tensor of unknown scale"
        # A homogeneous map passes the scale on. For another map it is part of the function.
        is_homogeneous = rule.kind in {"linear", "sum"}
        try:
            factor = output_factor(node, mult=1.0 if is_homogeneous else rms * mult)
        except RULE_ERRORS as error:
            return None, f"its rule does not apply: {error}"
        assert factor is not None
        return (rms if is_homogeneous else 1.0) / factor, rule.reference

    def _product(self, node: fx.Node, first: fx.Node, second: fx.Node) -> tuple[float | None, str]:
        for scale, data in ((first, second), (second, first)):
            # Rows of an embedding, with a number for each, are not a scale.
            is_smaller = numel(scale) <= numel(data)
            is_learned_scale = is_smaller and self.flow.parameter_of(scale) is not None
            if is_learned_scale and self.flow.parameter_of(data) is None:
                self._chosen.add(node)
                rms = self.predicted(data)
                # Only here the data can be measured without their scale.
                rms = self.measured(data) or None if rms is None else rms
                return rms, "times a learned scale, unchanged"
        left, right = self.predicted(first), self.predicted(second)
        if left is None or right is None:
            return None, "a product in which not every scale is known"
        self._combined.add(node)
        return left * right, "a product of two tensors, unchanged"

    def _sum(self, tensors: list[fx.Node]) -> tuple[float | None, str]:
        scales = [self.predicted(tensor) for tensor in tensors]
        if None in scales:
            return None, "a sum in which not every scale is known"
        return math.hypot(*scales), "a sum, unchanged"  # type: ignore[arg-type]


# The reason of a decision on an operation that only passes a tensor on.
HANDS_ON = "passes its tensor on"


def _kept_by_dropout(node: fx.Node) -> float:
    """Return the square root of the share that dropout keeps; 1 for other operations."""
    if "dropout" not in op_name(node):
        return 1.0
    rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    if node.target is F.dropout and not training:
        return 1.0
    rate = example_of(rate)
    return math.sqrt(1 - rate) if isinstance(rate, (int, float)) and rate < 1 else 1.0
