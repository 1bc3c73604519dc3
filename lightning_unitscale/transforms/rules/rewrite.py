"""The graph pass that puts the decided factors into a graph."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from lightning_unitscale.graph.aliasing import aliased_by_mutation
from lightning_unitscale.graph.nodes import (
    INPUT,
    INTERNAL,
    MODULE,
    NAME,
    argument_at,
    is_float_tensor,
    map_arguments,
    op_name,
    replace_other_uses,
    tensor_name,
)
from lightning_unitscale.graph.passes import GraphPass, Region, Stage, StepGraph
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.transforms.rules.coverage import coverage_report
from lightning_unitscale.transforms.rules.flow import is_operation, reads_of
from lightning_unitscale.transforms.rules.plan import Decision, RuleOptions, RulePlan
from lightning_unitscale.transforms.rules.planning import plan_graph
from lightning_unitscale.transforms.rules.residuals import added_tensors
from lightning_unitscale.transforms.units import FACTOR


class RuleRewrite(GraphPass):
    """Multiplies arguments and results by the factors of a plan; gradients follow by themselves.

    Attributes:
        plan: The decisions in force; graphs are captured anew when it changes.
    """

    name = "unit scale by rules"
    stage = Stage.REPARAMETRIZE
    out_of_place = True

    def __init__(
        self,
        options: RuleOptions | None = None,
        replace: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> None:
        self.options = options or RuleOptions()
        self.replace = checked_replace(replace)
        self.kept_whole = tuple(self.replace)
        self.plan = RulePlan()

    def set_plan(self, plan: RulePlan) -> None:
        """Put a plan into force; graphs that were rewritten before must be rewritten anew."""
        self.plan = plan

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        counts: Counter[str] = Counter()
        for region in graph.regions():
            counts["replaced"] += replace_functions(region.graph, self.replace)
        if self._is_new(graph):
            counts["branch taken later"] += 1
            self.plan = plan_graph(graph.graph_module, graph.step, self.options, self.plan)
        for region in graph.regions():
            mutated = aliased_by_mutation(region.graph)
            scaled: dict[tuple[fx.Node, float], fx.Node] = {}
            reads = {node: reads_of(node) for node in region.graph.nodes}
            for node in list(region.graph.nodes):
                # In a branch that is taken later another operation may have the name.
                identity = op_name(node), reads[node]
                decision = self.plan.find(graph.step, tensor_name(node), identity)
                if decision is None or not decision.changes:
                    continue
                counts[decision.how] += 1
                _apply(region, node, decision, mutated, scaled)
        if not counts.total():
            return ("nothing to scale",)
        what = ", ".join(f"{count} by {how}" for how, count in counts.items() if count)
        return (f"factors on {counts.total()} operations: {what}",)

    def report(self) -> str:
        """What the rules did with every operation and every parameter, and why."""
        return coverage_report(self.plan)

    def _is_new(self, graph: StepGraph) -> bool:
        """Whether a step that was decided on has operations that count and are not decided on."""
        if graph.step not in self.plan.steps():
            return False
        return any(
            self.plan.find(graph.step, tensor_name(node), (op_name(node), reads_of(node))) is None
            for region in graph.regions()
            for node in region.graph.nodes
            if is_operation(node) and is_float_tensor(node) and _counts(node)
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RuleRewrite:
        new = copy.copy(self)
        memo[id(self)] = new
        return new


def _counts(node: fx.Node) -> bool:
    """Whether a factor may belong to the node: to a product, to an add, or for a parameter."""
    return product_of(node) is not None or added_tensors(node) is not None or _reads_parameter(node)


def _reads_parameter(node: fx.Node) -> bool:
    return any(
        INPUT in one.meta and one.meta[INPUT].kind == "parameter"
        for one in node.all_input_nodes
        if one.op == "placeholder"
    )


def checked_replace(
    replace: Mapping[Callable[..., Any], Callable[..., Any]] | None,
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """A user's ``replace``, if it maps functions to functions.

    Raises:
        ValueError: If it does not.
    """
    if replace is None:
        return {}
    if not isinstance(replace, Mapping) or not all(
        callable(one) for pair in replace.items() for one in pair
    ):
        raise ValueError(
            f"replace={replace!r}: no map of functions; expected {{function: its replacement}}; "
            "pass for example replace={my_gelu: torch.nn.functional.gelu}."
        )
    return dict(replace)


def replace_functions(
    graph: fx.Graph, replace: Mapping[Callable[..., Any], Callable[..., Any]]
) -> int:
    """Put the user's replacements in the place of his functions; returns how many calls."""
    count = 0
    for node in graph.nodes:
        # Functions are compared by identity: a target need not be hashable.
        new = next((new for old, new in replace.items() if node.target is old), None)
        if node.op == "call_function" and new is not None:
            node.target = new
            count += 1
    return count


def _apply(
    region: Region,
    node: fx.Node,
    decision: Decision,
    mutated: set[fx.Node],
    scaled: dict[tuple[fx.Node, float], fx.Node],
) -> None:
    graph = region.graph
    replacements: dict[tuple[Any, ...], fx.Node] = {}
    for one in decision.arguments:
        source = argument_at(node, one.path)
        known = scaled.get((source, one.factor))
        if known is None:
            with graph.inserting_before(node):
                known = graph.call_function(torch.mul, (source, one.factor))
            _describe(known, source, node, f"{tensor_name(source)}:unit")
            known.meta[FACTOR] = one.factor
            known.meta[INTERNAL] = True
            if source not in mutated:
                scaled[source, one.factor] = known
        replacements[one.path] = known
    map_arguments(node, replacements)
    if decision.kwargs:
        node.kwargs = {**node.kwargs, **dict(decision.kwargs)}
    if decision.output != 1.0:
        with graph.inserting_after(node):
            result = graph.call_function(torch.mul, (node, decision.output))
        # The tensor that people know is the one that the rest of the model reads.
        _describe(result, node, node, tensor_name(node))
        result.meta[FACTOR] = decision.output
        replace_other_uses(node, result)
        node.meta[NAME] = f"{tensor_name(node)}:unscaled"
        node.meta[INTERNAL] = True


def _describe(new: fx.Node, like: fx.Node, at: fx.Node, name: str) -> None:
    example = like.meta["example_value"]
    # A tensor of its own: one and the same example would say that nothing was computed.
    new.meta["example_value"] = example.detach().requires_grad_(example.requires_grad)
    new.meta[MODULE] = at.meta.get(MODULE, "")
    new.meta[NAME] = name
