"""What each parameter of a step does, read from how it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from lightning_unitscale.graph.nodes import INPUT, example_tensor, op_name, tensor_name
from lightning_unitscale.graph.products import Product, product_of
from lightning_unitscale.transforms.parameter_info import ParameterInfo, Role
from lightning_unitscale.transforms.rules.flow import (
    Flow,
    Path,
    float_arguments,
    handed_on,
    is_attention,
    numel,
)
from lightning_unitscale.transforms.rules.logits import logit_factor
from lightning_unitscale.transforms.rules.lookup import rule_of
from lightning_unitscale.transforms.rules.plan import ParameterPlan
from lightning_unitscale.transforms.rules.residuals import Residual, added_tensors

UseKind = Literal["weight", "embedding", "sum", "bias", "norm", "scale", "other"]
EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
PRODUCTS_BY_ELEMENT = frozenset({"mul", "imul", "multiply"})
# Which role decides for a weight that has several (see "A tied weight" in docs/unit-scaling.md): a
# hidden layer diverges at a rate beyond its own. A readout stops learning at one below its own as
# it gets wider; an embedding can take it.
_ORDER = (Role.HIDDEN, Role.READOUT, Role.EMBEDDING, Role.INPUT, Role.NORM, Role.BIAS)
# Operations that the reason for leaving a parameter alone has the names of.
_MAX_NAMED = 3
_JOINS = frozenset({"cat", "concat", "stack", "concatenate"})


@dataclass(frozen=True)
class Use:
    """One place where a parameter is read.

    Attributes:
        kind: As what.
        node: The operation that reads it.
        path: As which of its arguments.
        is_part: Whether only some of its elements are read there.
    """

    kind: UseKind
    node: fx.Node
    path: Path
    is_part: bool


@dataclass(frozen=True)
class Structure:
    """What the rules know of a step before they look at a number.

    Attributes:
        flow: The operations.
        residuals: The residual adds.
        plain_adds: Adds that get a factor of their own.
        readouts: Products whose result goes to a loss and to no other product.
        losses: Where losses are computed.
        uses: How each parameter is used.
    """

    flow: Flow
    residuals: Mapping[fx.Node, Residual]
    plain_adds: frozenset[fx.Node]
    readouts: frozenset[fx.Node]
    losses: frozenset[fx.Node]
    uses: Mapping[str, tuple[Use, ...]]


def find_structure(flow: Flow, residuals: Mapping[fx.Node, Residual]) -> Structure:
    """Roles of everything in a step, in one pass forward and one backward."""
    losses = frozenset(_losses(flow))
    plain_adds = frozenset(_plain_adds(flow, residuals))
    uses = {
        fqn: tuple(_uses(flow, node, residuals, plain_adds))
        for fqn, node in flow.parameters().items()
    }
    readouts = frozenset(_readouts(flow, residuals, losses))
    return Structure(flow, residuals, plain_adds, readouts, losses, uses)


def plan_parameters(structure: Structure, *, init_weights: bool) -> dict[str, ParameterPlan]:
    """Role of each parameter, and whether it is set to unit scale.

    A parameter is rescaled only if every use of it is one that the rules rewrite.
    """
    depths = _depths(structure.residuals)
    plans = {}
    for fqn, uses in structure.uses.items():
        info = _info(structure, fqn, uses, depths)
        kinds = {one.kind for one in uses}
        if not uses or "other" in kinds:
            others = [tensor_name(one.node) for one in uses if one.kind == "other"]
            names = ", ".join(others[:_MAX_NAMED])
            if len(others) > _MAX_NAMED:
                names += f" and {len(others) - _MAX_NAMED} more"
            reason = f"read by {names}, which no rule rewrites" if names else "not read"
            plans[fqn] = ParameterPlan(info, "left", reason)
        elif not init_weights:
            plans[fqn] = ParameterPlan(info, "left", "init_weights=False")
        elif kinds == {"bias"}:
            plans[fqn] = ParameterPlan(info, "zeroed", "a bias")
        elif kinds <= {"weight", "embedding", "sum"}:
            plans[fqn] = ParameterPlan(info, "scaled", "every use of it is rewritten")
        else:
            what = " and ".join(sorted(kinds))
            plans[fqn] = ParameterPlan(info, "left", f"used as {what}")
    return plans


def is_bias_add(flow: Flow, node: fx.Node) -> bool:
    """Whether the node adds a bias to a product."""
    operands = added_tensors(node)
    if operands is None:
        return False
    (_, first), (_, second) = operands
    return _is_bias_of(flow, first, second) or _is_bias_of(flow, second, first)


def weight_of(flow: Flow, product: Product) -> str | None:
    """The parameter that is the weight of a product."""
    if is_attention(product.node):
        return None
    fqns = [flow.parameter_of(one.node) for one in reversed(product.operands)]
    return next((one for one in fqns if one is not None), None)


def multiplies_gradients(flow: Flow, product: Product) -> bool:
    """Whether a product is one of gradients that the step reads, so none of the model's."""
    return any(
        flow.is_of_gradients(one.node) and not flow.is_learned(one.node) for one in product.operands
    )


def _has_weight(flow: Flow, product: Product) -> bool:
    """Whether data are multiplied by a weight, which need not be a parameter itself."""
    if is_attention(product.node):
        return False
    are_weights = [flow.is_weight(one.node) for one in product.operands]
    return weight_of(flow, product) is not None or (any(are_weights) and not all(are_weights))


def _is_bias_of(flow: Flow, bias: fx.Node, product: fx.Node) -> bool:
    if flow.parameter_of(bias) is None or product_of(flow.root(product)) is None:
        return False
    tensor = example_tensor(bias)
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
    """Sums of tensors that the rules themselves have brought to RMS 1.

    Any other sum is part of a function that somebody wrote by hand, and a factor would change it.
    """
    ours: set[fx.Node] = set()
    for node in flow.nodes:
        rule = rule_of(node)
        if node.op == "placeholder":
            given = node.meta.get(INPUT)
            if given is not None and given.kind == "parameter":
                ours.add(node)
        elif (
            product_of(node) is not None
            or node in residuals
            or (rule is not None and (rule.kind == "normalization" or rule.name in EMBEDDINGS))
        ):
            ours.add(node)
        elif op_name(node) in _JOINS:
            if all(flow.root(one) in ours for _, one in float_arguments(node)):
                ours.add(node)
        elif added_tensors(node) is not None and logit_factor(flow, node) is None:
            operands = added_tensors(node)
            assert operands is not None
            (_, first), (_, second) = operands
            if flow.root(first) in ours and flow.root(second) in ours:
                ours.add(node)
                if not is_bias_add(flow, node):
                    yield node


def _uses(
    flow: Flow,
    parameter: fx.Node,
    residuals: Mapping[fx.Node, Residual],
    plain_adds: frozenset[fx.Node],
) -> Iterator[Use]:
    pending = [(parameter, False)]
    seen = {parameter}
    whole = numel(parameter)
    while pending:
        node, is_part = pending.pop()
        for reader in flow.readers(node):
            if handed_on(reader) is not None and flow.resolve(handed_on(reader)) is node:  # type: ignore[arg-type]
                if reader not in seen:
                    seen.add(reader)
                    # ``chunk`` makes a tuple: what is taken out of it is a part.
                    is_smaller = 0 < numel(reader) < whole
                    pending.append((reader, is_part or is_smaller))
                continue
            for path, one in float_arguments(reader):
                if flow.resolve(one) is node:
                    kind = _use(flow, reader, path, residuals, plain_adds)
                    yield Use(kind, reader, path, is_part)


def _use(
    flow: Flow,
    reader: fx.Node,
    path: Path,
    residuals: Mapping[fx.Node, Residual],
    plain_adds: frozenset[fx.Node],
) -> UseKind:
    product = product_of(reader)
    if product is not None:
        if multiplies_gradients(flow, product):
            return "other"
        for one in product.addends:
            if one.path == path:
                return "bias"
        for one in product.operands:
            if one.path == path:
                return "sum" if _is_data(flow, product, path) else "weight"
        return "other"
    rule = rule_of(reader)
    if rule is not None and rule.name in EMBEDDINGS:
        renormed = reader.kwargs.get("max_norm") or (len(reader.args) > 3 and reader.args[3])
        return "other" if renormed else "embedding"
    if rule is not None and rule.kind == "normalization":
        return "sum" if path in {(0,), ("input",)} else "norm"
    if op_name(reader) in PRODUCTS_BY_ELEMENT:
        return "scale"
    if is_bias_add(flow, reader):
        return "bias"
    if reader in plain_adds or reader in residuals or op_name(reader) in _JOINS:
        return "sum"
    return "other"


def _is_data(flow: Flow, product: Product, path: Path) -> bool:
    """Whether a parameter stands where data would: learned queries that a weight is applied to."""
    if is_attention(product.node):
        return True
    later = product.operands[1:]
    return path == product.operands[0].path and any(
        flow.parameter_of(one.node) is not None for one in later
    )


def _readouts(
    flow: Flow, residuals: Mapping[fx.Node, Residual], losses: frozenset[fx.Node]
) -> Iterator[fx.Node]:
    in_branch: set[fx.Node] = set().union(*(one.nodes for one in residuals.values()))
    to_loss: set[fx.Node] = set()
    to_product: set[fx.Node] = set()
    for node in reversed(flow.nodes):
        readers = flow.readers(node)
        if node in losses or any(one in to_loss for one in readers):
            to_loss.add(node)
        if any(one in to_product or product_of(one) is not None for one in readers):
            to_product.add(node)
        product = product_of(node)
        if (
            product is not None
            and node in to_loss
            and node not in to_product
            and node not in in_branch
            and _has_weight(flow, product)
        ):
            yield node


def _depths(residuals: Mapping[fx.Node, Residual]) -> dict[fx.Node, int]:
    """Number of branches of the innermost stream that each node is in."""
    depths: dict[fx.Node, int] = {}
    for one in sorted(residuals.values(), key=lambda one: -len(one.nodes)):
        for node in one.nodes:
            depths[node] = one.length
    return depths


def _info(
    structure: Structure, fqn: str, uses: Iterable[Use], depths: Mapping[fx.Node, int]
) -> ParameterInfo:
    flow = structure.flow
    node = flow.node_of_parameter(fqn)
    uses = tuple(uses)
    tensor = example_tensor(node)
    assert tensor is not None
    roles = [_role(structure, one) for one in uses]
    role = next((one for one in _ORDER if one in roles), Role.OTHER)
    if any(one is Role.OTHER for one in roles):
        role = Role.OTHER
    weights = [use for use in uses if use.kind == "weight"]
    # Sizes are those of the use that the role is of.
    weights.sort(key=lambda use: roles[uses.index(use)] is not role)
    total = numel(node)
    width = int(tensor.shape[-1]) if tensor.dim() else 1
    fan_in, fan_out = width, total if tensor.dim() <= 1 else width
    if weights:
        fan_in = _fan_in(weights[0])
        fan_out = max(1, _fan_out(weights[0], fan_in, total))
    # A parameter that several branches share (a tied block) counts as one of the first.
    depth = next((depths[one.node] for one in uses if one.node in depths), 0)
    return ParameterInfo(
        fqn,
        role,
        fan_in=max(1, fan_in),
        fan_out=fan_out,
        model_width=max(1, width),
        num_residuals=depth,
        is_tied=len({one for one in roles if one is not Role.BIAS}) > 1,
    )


def _role(structure: Structure, use: Use) -> Role:
    if use.kind == "weight":
        if use.node in structure.readouts:
            return Role.READOUT
        product = product_of(use.node)
        assert product is not None
        others = [one for one in product.operands if one.path != use.path]
        is_input = not any(structure.flow.is_learned(one.node) for one in others)
        return Role.INPUT if is_input else Role.HIDDEN
    return {
        "embedding": Role.EMBEDDING,
        "sum": Role.EMBEDDING,
        "bias": Role.BIAS,
        "norm": Role.NORM,
        "scale": Role.NORM,
        "other": Role.OTHER,
    }[use.kind]


def _fan_in(use: Use) -> int:
    factor = unit_factor(use.node)
    return max(1, round(factor**-2)) if factor else 1


def _fan_out(use: Use, fan_in: int, total: int) -> int:
    del use
    return math.ceil(total / fan_in)


def unit_factor(node: fx.Node) -> float | None:
    """The rule's factor on the result of an operation whose operands are at RMS 1."""
    factors = call_factors(node)
    return None if factors is None else factors[0]


def call_factors(node: fx.Node, *, mult: float = 1.0) -> tuple[float, Mapping[str, float]] | None:
    """Factors of the rule of an operation; ``None`` without a rule or where it does not apply."""
    rule = rule_of(node)
    if rule is None:
        return None
    args = fx.map_arg(node.args, lambda one: one.meta.get("example_value"))
    kwargs = fx.map_arg(node.kwargs, lambda one: one.meta.get("example_value"))
    bound = rule.bind(tuple(args), dict(kwargs))
    if mult != 1.0:
        bound["mult"] = mult
    factors = rule.factors(bound)
    return factors.output, factors.gradients
