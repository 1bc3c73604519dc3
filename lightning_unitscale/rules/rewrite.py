"""Apply the decided factors to a graph in a pass, and report its coverage."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from typing_extensions import override

from lightning_unitscale.arguments import nearest, shown
from lightning_unitscale.capture import graph_nodes
from lightning_unitscale.capture.aliasing import aliased_by_mutation
from lightning_unitscale.capture.breaks import graph_breaks_since, joined_reasons
from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_recorder import local_part
from lightning_unitscale.capture.passes import GraphPass, Phase, Region, StepGraph
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.matmuls.gauge import FACTOR, UNSCALED
from lightning_unitscale.rules.build_plan import plan_graph
from lightning_unitscale.rules.decide import ATTENTION
from lightning_unitscale.rules.flow import added_tensors, is_operation, parameter_path, reads_of
from lightning_unitscale.rules.plan import Decision, RuleOptions, RulePlan
from lightning_unitscale.rules.propagate import HANDS_ON


def coverage_report(plan: RulePlan) -> str:
    """Format two tables, of operations and of all parameters, and a summary of each."""
    if not plan.decisions:
        return "The rules have seen no step yet."
    kinds = Counter("passed on" if d.reason == HANDS_ON else d.origin for d in plan.values())
    operations = [
        (
            name,
            decision.op,
            decision.origin,
            f"{decision.output:.3g}" if decision.output != 1.0 else "",
            ", ".join(f"{'.'.join(map(str, a.path))}: {a.factor:.3g}" for a in decision.arguments),
            ", ".join(f"{key}={value:.3g}" for key, value in decision.kwargs),
            decision.reason,
        )
        for name, decision in plan.items()
        if decision.reason != HANDS_ON  # views, casts and dropout are counted only
    ]
    # The reason of a residual add may also begin with the kind of its branch.
    num_attentions = sum(
        decision.reason.startswith(ATTENTION) and decision.origin != "residual"
        for decision in plan.values()
    )
    parameters = [
        (
            fqn,
            param.action,
            param.info.role.value + (" (tied)" if param.info.is_tied else ""),
            f"{param.info.fan_in} -> {param.info.fan_out}",
            param.info.num_residuals or "",
            f"{param.info.sigma:.3g}",
            param.reason,
        )
        for fqn, param in plan.parameters.items()
    ]
    parameters += [(fqn, "left", "", "", "", "", reason) for fqn, reason in plan.unseen.items()]
    actions = Counter(row[1] for row in parameters)
    headers = ("operation", "op", "how", "output", "arguments", "set", "why")
    of_parameters = ("parameter", "action", "role", "fan", "branches", "RMS before", "why")
    return "\n\n".join(
        [
            f"Operations: {_counted(kinds)}.",
            tabulate(operations, headers, disable_numparse=True),
            f"Attention: {num_attentions} found. attention_mult multiplies their logits.",
            f"Parameters: {_counted(actions)}.",
            tabulate(parameters, of_parameters, disable_numparse=True),
        ]
    )


def _counted(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _is_of(read: Tensor, parameter: Tensor, *, or_copy: bool) -> bool:
    """Check whether a tensor is a parameter, a view of it, or a copy such as autocast's."""
    try:
        address = local_part(parameter).untyped_storage().data_ptr()
        if address and address == local_part(read).untyped_storage().data_ptr():
            return True
        # A linear layer reads its weight transposed.
        views = (parameter, parameter.t()) if or_copy and parameter.dim() == 2 else (parameter,)
        return or_copy and any(
            one.shape == read.shape and torch.equal(one.to(read.dtype), read) for one in views
        )
    except (NotImplementedError, RuntimeError):  # of a tensor subclass, or on another device
        return False


class RuleRewrite(GraphPass):
    """Pass that multiplies arguments and results by a plan's factors. Gradients follow."""

    name = "unit scale by rules"
    phase = Phase.REPARAMETRIZE
    out_of_place = True

    def __init__(
        self,
        options: RuleOptions | None = None,
        replace: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> None:
        self.options = options or RuleOptions()
        self.replace = checked_replace(replace)
        self.kept_whole = tuple(self.replace)
        self.plan = RulePlan()  # when it changes, graphs must be rewritten again
        self.has_warned = False  # of a matmul outside of the steps
        # Names of the called functions, and of the replaced ones among them.
        self._called: dict[str, None] = {}
        self._replaced: set[str] = set()

    @property
    @override
    def attentions(self) -> Mapping[str, bool]:
        return self.plan.attentions

    def unmatched(self) -> list[str]:
        """Return warnings about the functions of ``replace`` that no step has called so far."""
        texts = []
        for name in map(_name_of, self.replace):
            if name not in self._replaced:
                meant = nearest(name, self._called)
                expected = "" if meant is None else f", such as {meant}"
                texts.append(
                    f"replace={{{name}: ...}}: the step does not call it. Expected a function that "
                    f"it calls{expected}. Correct it or leave it out."
                )
        return texts

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        counts: Counter[str] = Counter()
        for region in graph.regions():
            counts["replaced"] += self._replace_functions(region.graph)
        if self._is_new(graph):
            counts["branch taken later"] += 1
            self.plan = plan_graph(graph.graph_module, graph.step, self.options, self.plan)
        for region in graph.regions():
            mutated = aliased_by_mutation(region.graph)
            scaled: dict[tuple[fx.Node, float], fx.Node] = {}
            # Before anything is renamed.
            decided = [(node, self._decision(graph, node)) for node in region.graph.nodes]
            for node, decision in decided:
                if _may_switch_modes(node):
                    # A factor that was multiplied without gradients differs from one with them.
                    scaled.clear()
                if decision is not None and decision.changes:
                    counts[decision.origin] += 1
                    _apply(region, node, decision, mutated, scaled)
        if not counts.total():
            return ("nothing to scale",)
        origins = ", ".join(f"{count} by {name}" for name, count in counts.items() if count)
        return (f"factors on {counts.total()} operations: {origins}",)

    @override
    def see_uncaptured(self, module: nn.Module, read: Sequence[Tensor], *, in_step: bool) -> None:
        fqn = next(
            (
                fqn
                for fqn, parameter in module.named_parameters()
                if fqn in self.plan.parameters
                and self.plan.parameters[fqn].action == "scaled"
                and any(_is_of(one, parameter, or_copy=in_step) for one in read)
            ),
            "",
        )
        if not fqn:
            return
        name = type(module).__name__
        if in_step:
            breaks = joined_reasons(graph_breaks_since(0)[::-1])
            because = f" ({breaks})" if breaks else ""
            raise CaptureError.by_rules(
                name,
                f"a matmul reads {fqn} outside of the captured graphs{because}",
                "The weight is at unit scale, and only graphs have its factors",
                "Keep what breaks the graph, and threads, out of the step, or use "
                "method='lossless'",
            )
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"{name}: a matmul outside of its steps reads {fqn}. The weight is at unit scale, "
                "and only the steps have its factors, so the result is that of another model. Call "
                "the model in a step, such as validation_step or predict_step, or convert a copy "
                "with transforms.deploy(module, *example_args).",
                stacklevel=2,
            )

    def report(self) -> str:
        """List every operation and parameter, with its factors and their reasons."""
        return coverage_report(self.plan)

    def _replace_functions(self, graph: fx.Graph) -> int:
        """Replace the user's functions by others, and return the number of calls."""
        count = 0
        for node in graph.nodes if self.replace else ():
            if node.op != "call_function":
                continue
            name = _name_of(node.target)
            self._called[name] = None
            # Functions are compared by identity, since a target need not be hashable.
            new = next((new for old, new in self.replace.items() if node.target is old), None)
            if new is not None:
                node.target = new
                self._replaced.add(name)
                count += 1
        return count

    def _is_new(self, graph: StepGraph) -> bool:
        """Check whether a decided step has operations that need a decision and have none."""
        if graph.step not in self.plan.steps():
            return False
        return any(
            self._decision(graph, node) is None
            for region in graph.regions()
            for node in region.graph.nodes
            if is_operation(node) and graph_nodes.is_float_tensor(node) and _counts(node)
        )

    def _decision(self, graph: StepGraph, node: fx.Node) -> Decision | None:
        # In a branch that is taken later another operation may have the name.
        return self.plan.find(
            graph.step, graph_nodes.tensor_name(node), (graph_nodes.op_name(node), reads_of(node))
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RuleRewrite:
        new = copy.copy(self)
        memo[id(self)] = new
        return new


def _counts(node: fx.Node) -> bool:
    """Check whether a factor may apply to the node: a matmul, an add, or a parameter's reader."""
    reads_parameter = any(parameter_path(source) is not None for source in node.all_input_nodes)
    return matmul_of(node) is not None or added_tensors(node) is not None or reads_parameter


def _may_switch_modes(node: fx.Node) -> bool:
    """Check for a node without a tensor, which may switch gradients or inference mode."""
    tensors = map(graph_nodes.example_tensor, (node, *node.all_input_nodes))
    return is_operation(node) and all(tensor is None for tensor in tensors)


def checked_replace(
    replace: Mapping[Callable[..., Any], Callable[..., Any]] | None,
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return a user's ``replace``, or raise if it does not map functions to functions."""
    if replace is None:
        return {}
    if not isinstance(replace, Mapping) or not all(
        callable(function) for pair in replace.items() for function in pair
    ):
        raise ValueError(
            f"replace={shown(replace)}: not a mapping of functions. Expected {{function: its "
            "replacement}. Pass for example replace={my_gelu: torch.nn.functional.gelu}."
        )
    return dict(replace)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or function)


def _apply(
    region: Region,
    node: fx.Node,
    decision: Decision,
    mutated: set[fx.Node],
    scaled: dict[tuple[fx.Node, float], fx.Node],
) -> None:
    graph = region.graph
    args, kwargs = node.args, {**node.kwargs, **dict(decision.kwargs)}
    for argument in decision.arguments:
        source = graph_nodes.argument_at(node, argument.path)
        product = scaled.get((source, argument.factor))
        if product is None:
            with graph.inserting_before(node):
                product = graph.call_function(torch.mul, (source, argument.factor))
            _describe(product, source, node, f"{graph_nodes.tensor_name(source)}:unit")
            product.meta[FACTOR] = argument.factor
            product.meta[graph_nodes.INTERNAL] = True
            if source not in mutated:
                scaled[source, argument.factor] = product
        # One use of a tensor that the node may read several times.
        args, kwargs = graph_nodes.changed_arguments(args, kwargs, argument.path, product)
    node.args, node.kwargs = args, kwargs
    if decision.output != 1.0:
        with graph.inserting_after(node):
            result = graph.call_function(torch.mul, (node, decision.output))
        # The tensor that the rest of the model reads gets the name.
        _describe(result, node, node, graph_nodes.tensor_name(node))
        result.meta[FACTOR] = decision.output
        graph_nodes.replace_other_uses(node, result)
        node.meta[graph_nodes.NAME] = f"{graph_nodes.tensor_name(node)}{UNSCALED}"
        node.meta[graph_nodes.INTERNAL] = True


def _describe(new: fx.Node, like: fx.Node, at: fx.Node, name: str) -> None:
    example = like.meta["example_value"]
    # A separate tensor, since a shared example would mean that nothing was computed.
    new.meta["example_value"] = example.detach().requires_grad_(example.requires_grad)
    new.meta[graph_nodes.MODULE] = at.meta.get(graph_nodes.MODULE, "")
    new.meta[graph_nodes.NAME] = name
