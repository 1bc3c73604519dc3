"""Decide which factors the rules apply, operation by operation, in execution order.

A factor changes the function unless the following operations are homogeneous in it. So factors are
applied in four places only: to the result of a matmul, to the operands of a matmul, to the summands
of a residual add, and to sums of tensors that are at RMS 1 already. All other operations stay as
written. The rules follow the RMS through them, by each operation's own rule or, without one, by
measuring the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from lightning_unitscale.capture.graph_matmuls import MatmulNode, matmul_of
from lightning_unitscale.capture.graph_nodes import (
    Path,
    example_tensor,
    float_arguments,
    function_of,
    op_name,
    tensor_name,
)
from lightning_unitscale.rules.flow import (
    EMBEDDINGS,
    RULE_ERRORS,
    added_tensors,
    is_attention,
    is_operation,
    may_be_float,
    output_factor,
    reads_of,
    rule_of,
)
from lightning_unitscale.rules.patterns import logit_factor
from lightning_unitscale.rules.plan import (
    Argument,
    Decision,
    Origin,
    ParameterPlan,
    RuleOptions,
    RulePlan,
    changes_alike,
)
from lightning_unitscale.rules.propagate import TRUSTED, Measure, Scales
from lightning_unitscale.rules.residuals import branch_weights
from lightning_unitscale.rules.roles import Structure, multiplies_gradients, weight_of

ATTENTION = "attention"  # first word of the reason of a decision on an attention
_NEGLIGIBLE = 1.1  # a factor nearer to 1 than this is not worth an operation


class Decider:
    """Decisions of the rules, one operation at a time, without side effects."""

    def __init__(
        self,
        structure: Structure,
        parameters: Mapping[str, ParameterPlan],
        options: RuleOptions,
        measure: Measure,
        prior: RulePlan | None = None,
        step: str = "",
    ) -> None:
        self.structure = structure
        self.flow = structure.flow
        self.parameters = parameters
        self.options = options
        self.weights = branch_weights(structure.residuals, options)
        self.decisions: dict[str, Decision] = {}
        self.scales = Scales(
            structure.flow, parameters, measure, options.on_unknown, self.decisions
        )
        self.prior = prior or RulePlan()
        self._steps = sorted(self.prior.steps())
        # The planned step, if another one was planned first, as training is before evaluation.
        first = next((name.partition(":")[0] for name in self.prior), step)
        self._evaluation = None if step == first else step

    def before(self, node: fx.Node) -> Decision | None:
        """Return the factors on the arguments of a node that is about to run."""
        if not is_operation(node) or not may_be_float(node):
            return None
        return self._keep(node, self._decide(node))

    def after(self, node: fx.Node, decision: Decision) -> Decision:
        """Return the decision with the factor on the result, which can now be measured."""
        matmul = matmul_of(node)
        if (
            matmul is None
            or weight_of(self.flow, matmul) is not None
            or node in self.structure.readouts
            or self._from_prior(node, decision) is not None
            or logit_factor(self.flow, node) is not None
            or "alpha" in dict(decision.kwargs)
        ):
            return decision
        measured = self.scales.measured(node)
        if not measured or 1 / TRUSTED < measured * decision.output < TRUSTED:
            return decision
        changed = replace(
            decision,
            origin="calibrated",
            output=1 / measured,
            reason=f"measured RMS {measured:.3g}, where the rule says {1 / decision.output:.3g}",
        )
        return self._keep(node, changed)

    def _decide(self, node: fx.Node) -> Decision:
        matmul = matmul_of(node)
        if matmul is not None and multiplies_gradients(self.flow, matmul):
            return _decision(node, "kept", "a matmul of gradients")
        if matmul is not None:
            return self._matmul(node, matmul)
        if node in self.structure.residuals:
            return self._residual(node)
        if node in self.structure.plain_adds:
            return self._plain_add(node)
        if node in self.structure.averaging:
            return _decision(node, "kept", "it averages parameters")
        return self._other(node)

    def _matmul(self, node: fx.Node, matmul: MatmulNode) -> Decision:
        arguments = self._unit_operands(matmul)
        try:
            output = output_factor(node)
        except RULE_ERRORS as error:
            return self._unruled_matmul(node, arguments, f"its rule does not apply: {error}")
        rule = rule_of(node)
        reference = rule.reference if rule is not None else ""
        if output is None:
            return self._unruled_matmul(node, arguments, "no rule")
        if is_attention(node):
            self.scales.set(node, 1.0)
            return _decision(
                node,
                "rule",
                f"{ATTENTION}: logits (m / d) q.k; {reference}",
                output=output,
                arguments=arguments,
                kwargs=(("scale", self.options.attention_mult / _width(matmul)),),
            )
        logits = logit_factor(self.flow, node)
        if node in self.structure.readouts:
            output, reference = output**2, f"readout: 1/fan_in ({reference})"
            self.scales.set(node, output**0.5)
        elif logits is not None and weight_of(self.flow, matmul) is None:
            # For unit queries and keys of size d the logits are (m / d) q.k, whatever the author's
            # own factor.
            alpha, natural = 1.0, 1 / output
            if self._adds_data(matmul):
                alpha = abs(float(node.kwargs.get("alpha", 1.0))) or 1.0  # type: ignore[arg-type]
                natural = alpha * math.sqrt(_width(matmul))
            output = self.options.attention_mult * alpha / (natural**2 * logits)
            reference = f"{ATTENTION} logits: m/d (u-muP, arXiv 2407.17465, section 4.1)"
            self.scales.set(node, natural * output)
        else:
            self.scales.set(node, 1.0)
        if self._adds_data(matmul):
            # The addend is data (a bias of attention scores), so only the matmul is scaled.
            alpha = float(node.kwargs.get("alpha", 1.0)) * output  # type: ignore[arg-type]
            kwargs = (("alpha", alpha),)
            return _decision(node, "rule", reference, arguments=arguments, kwargs=kwargs)
        return _decision(node, "rule", reference, output=output, arguments=arguments)

    def _unruled_matmul(
        self, node: fx.Node, arguments: tuple[Argument, ...], reason: str
    ) -> Decision:
        self.scales.require(node, reason)
        if self.options.on_unknown == "keep":
            return _decision(node, "kept", reason, arguments=arguments)
        self.scales.set(node, 1.0)
        return _decision(node, "calibrated", reason, arguments=arguments)

    def _unit_operands(self, matmul: MatmulNode) -> tuple[Argument, ...]:
        return tuple(
            Argument(operand.path, 1 / rms)
            for operand in matmul.operands
            if _matters(rms := self.scales.of(operand.node))
        )

    def _residual(self, node: fx.Node) -> Decision:
        residual = self.structure.residuals[node]
        operands = dict(added_tensors(node) or ())
        tau = self.weights[node]
        total = math.hypot(1, tau)
        shares = {residual.skip: 1 / total, residual.branch: tau / total}
        arguments = []
        for path, share in shares.items():
            rms = self.scales.of(operands[path])
            factor = share / rms if rms > 0 else share
            arguments.append(Argument(path, factor))
        self.scales.set(node, 1.0)
        kind = "attention" if residual.has_attention else "feed-forward"
        is_given = self.options.residual is not None
        source = "given" if is_given else "u-muP, arXiv 2407.17465, appendix G.2"
        return _decision(
            node,
            "residual",
            f"{kind} branch {residual.index + 1} of {residual.length}, tau = {tau:.4g} ({source})",
            arguments=tuple(arguments),
        )

    def _plain_add(self, node: fx.Node) -> Decision:
        squares = [self.scales.of(source) ** 2 for _, source in added_tensors(node) or ()]
        total = math.sqrt(sum(squares))
        self.scales.set(node, 1.0)
        output = 1 / total if _matters(total) else 1.0
        reason = "sum of tensors at RMS 1 (arXiv 2303.11257, table A.2)"
        return _decision(node, "rule", reason, output=output)

    def _other(self, node: fx.Node) -> Decision:
        rule = rule_of(node)
        first: Path = (0,) if node.args else ("input",)
        if rule is not None and rule.kind == "loss":
            mult = self.options.loss_mult if op_name(node) == "cross_entropy" else 1.0
            arguments = (Argument(first, mult),) if mult != 1.0 else ()
            return _decision(node, "loss", "its value is the unscaled loss", arguments=arguments)
        mult = self._activation_mult(node)
        rms, reason = self.scales.follow(node, mult)
        if rms is None:
            return _decision(node, "kept", reason)
        arguments = (Argument(first, mult),) if mult != 1.0 else ()
        origin: Origin = "kept"
        if rule is not None and rule.kind == "activation":
            origin = "derived"
        elif rule is not None and (rule.kind == "normalization" or rule.name in EMBEDDINGS):
            origin = "rule"
        return _decision(node, origin, reason, arguments=arguments)

    def _adds_data(self, matmul: MatmulNode) -> bool:
        if "add" not in op_name(matmul.node):  # as in addmm and baddbmm
            return False
        return any(self.flow.parameter_of(addend.node) is None for addend in matmul.addends)

    def _activation_mult(self, node: fx.Node) -> float:
        rule = rule_of(node)
        if self.options.activation_mult == 1.0 or rule is None or rule.kind != "activation":
            return 1.0
        tensors = [source for _, source in float_arguments(node)]
        if not tensors or matmul_of(self.flow.root(tensors[0])) is None:
            return 1.0
        return self.options.activation_mult

    def _keep(self, node: fx.Node, decision: Decision) -> Decision:
        decision = self._from_prior(node, decision) or self._as_written(node, decision)
        self.decisions[tensor_name(node)] = decision
        return decision

    def _as_written(self, node: fx.Node, decision: Decision) -> Decision:
        """Leave what only the code of an evaluation does, outside of all modules, as it is."""
        # This is a metric or an average of predictions, and not the model.
        name, matmul = tensor_name(node), matmul_of(node)
        if (
            self._evaluation is None
            or node.meta.get("nn_module_stack")
            or (matmul and any(self.flow.is_weight(one.node) for one in matmul.operands))
        ):
            return decision
        if self._evaluation == function_of(node) or not changes_alike(self.prior, name):
            return _decision(node, "kept", f"only {self._evaluation} runs it")
        return decision

    def _from_prior(self, node: fx.Node, decision: Decision) -> Decision | None:
        for step in self._steps:
            prior = self.prior.find(step, tensor_name(node), decision.identity)
            if prior is not None:
                return prior
        for step in self._steps:
            prior = self.prior.find_alike(
                step, tensor_name(node), decision.identity, is_matmul=matmul_of(node) is not None
            )
            if prior is not None:
                return replace(prior, reads=decision.reads)
        return None


def _width(matmul: MatmulNode) -> int:
    """Return the size of the vectors that a matmul of queries and keys sums over."""
    query = example_tensor(matmul.operands[0].node)
    assert query is not None
    return int(query.shape[-1])


def _matters(rms: float) -> bool:
    return rms > 0 and not 1 / _NEGLIGIBLE < rms < _NEGLIGIBLE


def _decision(
    node: fx.Node,
    origin: Origin,
    reason: str,
    *,
    output: float = 1.0,
    arguments: tuple[Argument, ...] = (),
    kwargs: tuple[tuple[str, Any], ...] = (),
) -> Decision:
    return Decision(op_name(node), reads_of(node), origin, reason, output, arguments, kwargs)
