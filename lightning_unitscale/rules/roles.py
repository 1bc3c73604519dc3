"""Find the role of each operation and parameter of a step from its uses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import networkx as nx
from torch import fx

from lightning_unitscale.capture import graph_nodes
from lightning_unitscale.capture.graph_matmuls import MatmulNode, matmul_of
from lightning_unitscale.rules.flow import (
    EMBEDDINGS,
    RULE_ERRORS,
    TIMES,
    Flow,
    added_tensors,
    handed_on,
    is_attention,
    numel,
    output_factor,
    parameter_path,
    rule_of,
)
from lightning_unitscale.rules.learning_rates import ParameterInfo, Role
from lightning_unitscale.rules.patterns import Averages, find_averages, logit_factor
from lightning_unitscale.rules.plan import Action, ParameterPlan
from lightning_unitscale.rules.residuals import Residual, find_residuals

UseKind = Literal["weight", "embedding", "sum", "bias", "norm", "scale", "other"]
# The role that decides for a weight that has several ("A tied weight" in
# docs/explanation/rules.md). A hidden layer diverges above its own rate. A readout stops learning
# below its own as it gets wider. An embedding tolerates that rate.
_ORDER = (Role.OTHER, Role.HIDDEN, Role.READOUT, Role.EMBEDDING, Role.INPUT, Role.NORM, Role.BIAS)
_ROLES = {"embedding": Role.EMBEDDING, "sum": Role.EMBEDDING, "bias": Role.BIAS}
_ROLES |= {"norm": Role.NORM, "scale": Role.NORM, "other": Role.OTHER}
# Maximum number of operations named in the reason for leaving a parameter unscaled.
_MAX_NAMED = 3
_JOINS = frozenset({"cat", "concat", "stack", "concatenate"})


@dataclass(frozen=True)
class Use:
    """One operation that reads a parameter, as the argument at a path."""

    kind: UseKind
    node: fx.Node
    path: graph_nodes.Path


@dataclass(frozen=True)
class Structure:
    """Structure of a step, which the rules find before they read any number."""

    flow: Flow
    residuals: Mapping[fx.Node, Residual]
    plain_adds: frozenset[fx.Node]  # with a factor of their own
    readouts: frozenset[fx.Node]  # matmuls whose result goes to a loss and to no other matmul
    averaging: frozenset[fx.Node] = frozenset()  # they only average parameters
    uses: dict[str, tuple[Use, ...]] = field(default_factory=dict)


def find_structure(flow: Flow) -> Structure:
    """Find the roles of everything in a step, in one pass forward and one backward."""
    residuals = find_residuals(flow)
    averages = find_averages(flow)
    plain_adds = frozenset(_plain_adds(flow, residuals)) - averages.nodes
    readouts = frozenset(_readouts(flow, residuals))
    structure = Structure(flow, residuals, plain_adds, readouts, averages.nodes)
    uses = {fqn: tuple(_uses(structure, node)) for fqn, node in flow.parameters.items()}
    structure.uses.update(_with_averages(uses, averages))
    return structure


def _with_averages(
    uses: Mapping[str, tuple[Use, ...]], averages: Averages
) -> dict[str, tuple[Use, ...]]:
    """Ignore averages of parameters that are all set to unit scale."""
    # A parameter that nothing else reads, such as an average for validation alone, takes the use of
    # the parameter that it averages.

    def others(fqn: str) -> tuple[Use, ...]:
        return tuple(use for use in uses[fqn] if use.node not in averages.nodes)

    found = {fqn: others(fqn) for fqn in uses}
    for group in averages.groups:
        read = next((found[fqn] for fqn in sorted(group) if found[fqn]), ())
        found |= {fqn: found[fqn] or read for fqn in group}
    apart: set[str] = set()
    while True:
        mixed = {
            fqn
            for group in averages.groups
            if len({_action(found[member], init_weights=True)[0] for member in group}) > 1
            for fqn in group - apart
        }
        if not mixed:
            return found
        apart |= mixed
        found |= {fqn: uses[fqn] for fqn in mixed}


def plan_parameters(structure: Structure, *, init_weights: bool) -> dict[str, ParameterPlan]:
    """Plan each parameter by its role. It is rescaled only if rules rewrite every use of it."""
    # The number of branches of the innermost stream that a node is in.
    depths: dict[fx.Node, int] = {}
    for residual in sorted(structure.residuals.values(), key=lambda each: -len(each.nodes)):
        depths |= dict.fromkeys(residual.nodes, residual.length)
    plans = {}
    for fqn, uses in structure.uses.items():
        action, reason = _action(uses, init_weights=init_weights)
        plans[fqn] = ParameterPlan(_info(structure, fqn, uses, depths), action, reason)
    return plans


def _action(uses: Sequence[Use], *, init_weights: bool) -> tuple[Action, str]:
    """Return the action on a parameter, and its reason."""
    kinds = {use.kind for use in uses}
    if not uses:
        return "left", "not read"
    if "other" in kinds:
        others = [graph_nodes.tensor_name(use.node) for use in uses if use.kind == "other"]
        names = ", ".join(others[:_MAX_NAMED])
        if len(others) > _MAX_NAMED:
            names += f" and {len(others) - _MAX_NAMED} more"
        return "left", f"read by {names}, which no rule rewrites"
    if not init_weights:
        return "left", "init_weights=False"
    if kinds == {"bias"}:
        return "zeroed", "a bias"
    if kinds <= {"weight", "embedding", "sum"}:
        return "scaled", "every use of it is rewritten"
    return "left", f"used as {' and '.join(sorted(kinds))}"


def is_bias_add(flow: Flow, node: fx.Node) -> bool:
    """Check whether the node adds a bias to a matmul."""
    operands = added_tensors(node)
    if operands is None:
        return False
    (_, first), (_, second) = operands
    return _is_bias_of(flow, first, second) or _is_bias_of(flow, second, first)


def weight_of(flow: Flow, matmul: MatmulNode) -> str | None:
    """Return the parameter that is the weight of a matmul."""
    if is_attention(matmul.node):
        return None
    fqns = [flow.parameter_of(operand.node) for operand in reversed(matmul.operands)]
    return next((fqn for fqn in fqns if fqn is not None), None)


def multiplies_gradients(flow: Flow, matmul: MatmulNode) -> bool:
    """Check whether a matmul multiplies gradients that the step reads, so not the model's."""
    return any(
        flow.is_of_gradients(operand.node) and not flow.is_learned(operand.node)
        for operand in matmul.operands
    )


def _has_weight(flow: Flow, matmul: MatmulNode) -> bool:
    """Check whether data are multiplied by a weight, which may be computed from parameters."""
    if is_attention(matmul.node):
        return False
    are_weights = [flow.is_weight(operand.node) for operand in matmul.operands]
    return weight_of(flow, matmul) is not None or (any(are_weights) and not all(are_weights))


def _is_bias_of(flow: Flow, bias: fx.Node, matmul: fx.Node) -> bool:
    if flow.parameter_of(bias) is None or matmul_of(flow.root(matmul)) is None:
        return False
    tensor = graph_nodes.example_tensor(bias)
    assert tensor is not None
    return sum(size != 1 for size in tensor.shape) <= 1


def _losses(flow: Flow) -> Iterator[fx.Node]:
    for node in flow.nodes:
        rule = rule_of(node)
        if rule is not None and rule.kind == "loss" and flow.is_learned(node):
            yield node
    for node in flow.outputs:
        if numel(node) == 1 and flow.is_learned(node):
            yield node


def _plain_adds(flow: Flow, residuals: Mapping[fx.Node, Residual]) -> Iterator[fx.Node]:
    """Return the sums of tensors that the rules themselves have brought to RMS 1."""
    # Any other sum is part of a hand-written function, which a factor would change.
    ours: set[fx.Node] = set()
    for node in flow.nodes:
        rule = rule_of(node)
        if node.op == "placeholder":
            if parameter_path(node) is not None:
                ours.add(node)
        elif (
            matmul_of(node) is not None
            or node in residuals
            or (rule is not None and (rule.kind == "normalization" or rule.name in EMBEDDINGS))
        ):
            ours.add(node)
        elif graph_nodes.op_name(node) in _JOINS:
            if all(flow.root(source) in ours for _, source in graph_nodes.float_arguments(node)):
                ours.add(node)
        elif (operands := added_tensors(node)) is not None and logit_factor(flow, node) is None:
            (_, first), (_, second) = operands
            if flow.root(first) in ours and flow.root(second) in ours:
                ours.add(node)
                if not is_bias_add(flow, node):
                    yield node


def _uses(structure: Structure, parameter: fx.Node) -> Iterator[Use]:
    flow = structure.flow
    pending = [parameter]
    seen = {parameter}
    while pending:
        node = pending.pop()
        for reader in flow.readers(node):
            source = handed_on(reader)
            # Parameters that are joined with no data have the uses of the whole.
            is_join = graph_nodes.op_name(reader) in _JOINS and flow.is_weight(reader)
            if is_join or (source is not None and flow.resolve(source) is node):
                if reader not in seen:
                    seen.add(reader)
                    pending.append(reader)
                continue
            for path, argument in graph_nodes.float_arguments(reader):
                if flow.resolve(argument) is node:
                    yield Use(_use(structure, reader, path), reader, path)


def _use(structure: Structure, reader: fx.Node, path: graph_nodes.Path) -> UseKind:
    flow = structure.flow
    matmul = matmul_of(reader)
    if matmul is not None:
        if multiplies_gradients(flow, matmul):
            return "other"
        if any(addend.path == path for addend in matmul.addends):
            return "bias"
        if any(operand.path == path for operand in matmul.operands):
            return "sum" if _is_data(flow, matmul, path) else "weight"
        return "other"
    rule = rule_of(reader)
    if rule is not None and rule.name in EMBEDDINGS:
        renormed = reader.kwargs.get("max_norm") or (len(reader.args) > 3 and reader.args[3])
        return "other" if renormed else "embedding"
    if rule is not None and rule.kind == "normalization":
        return "sum" if path in {(0,), ("input",)} else "norm"
    if graph_nodes.op_name(reader) in TIMES:
        return "scale"
    if is_bias_add(flow, reader):
        return "bias"
    is_add = reader in structure.plain_adds or reader in structure.residuals
    if is_add or graph_nodes.op_name(reader) in _JOINS:
        return "sum"
    return "other"


def _is_data(flow: Flow, matmul: MatmulNode, path: graph_nodes.Path) -> bool:
    """Check whether a parameter is used as data: learned queries that a weight is applied to."""
    if is_attention(matmul.node):
        return True
    later = matmul.operands[1:]
    return path == matmul.operands[0].path and any(
        flow.parameter_of(operand.node) is not None for operand in later
    )


def _readouts(flow: Flow, residuals: Mapping[fx.Node, Residual]) -> Iterator[fx.Node]:
    matmuls = {node: matmul for node in flow.nodes if (matmul := matmul_of(node)) is not None}
    read = {source for node in matmuls for source in flow.sources(node)}
    in_branch: set[fx.Node] = set().union(*(residual.nodes for residual in residuals.values()))

    def before(nodes: Iterable[fx.Node]) -> set[fx.Node]:
        layers = nx.bfs_layers(flow.graph.reverse(copy=False), [*nodes])
        return set(itertools.chain.from_iterable(layers))

    found = before(_losses(flow)) - before(read) - in_branch
    return (node for node in found & matmuls.keys() if _has_weight(flow, matmuls[node]))


def _info(
    structure: Structure, fqn: str, uses: Sequence[Use], depths: Mapping[fx.Node, int]
) -> ParameterInfo:
    flow = structure.flow
    node = flow.parameters[fqn]
    tensor = graph_nodes.example_tensor(node)
    assert tensor is not None
    roles = [_role(structure, use) for use in uses]
    role = next((role for role in _ORDER if role in roles), Role.OTHER)
    weights = [use for use in uses if use.kind == "weight"]
    # Sizes are those of the use that decides the role.
    weights.sort(key=lambda use: roles[uses.index(use)] is not role)
    total = numel(node)
    width = int(tensor.shape[-1]) if tensor.dim() else 1
    fan_in, fan_out = width, total if tensor.dim() <= 1 else width
    if weights:
        # The factor is the root of one over the number of terms.
        try:
            factor = output_factor(weights[0].node)
        except RULE_ERRORS:
            factor = None
        fan_in = max(1, round(factor**-2)) if factor else 1
        fan_out = max(1, math.ceil(total / fan_in))
    # A parameter that several branches share (a tied block) counts as one of the first.
    depth = next((depths[use.node] for use in uses if use.node in depths), 0)
    return ParameterInfo(
        fqn,
        role,
        fan_in=max(1, fan_in),
        fan_out=fan_out,
        model_width=max(1, width),
        num_residuals=depth,
        is_tied=len({role for role in roles if role is not Role.BIAS}) > 1,
    )


def _role(structure: Structure, use: Use) -> Role:
    if use.kind == "weight":
        if use.node in structure.readouts:
            return Role.READOUT
        matmul = matmul_of(use.node)
        assert matmul is not None
        others = [operand for operand in matmul.operands if operand.path != use.path]
        is_input = not any(structure.flow.is_learned(operand.node) for operand in others)
        return Role.INPUT if is_input else Role.HIDDEN
    return _ROLES[use.kind]
