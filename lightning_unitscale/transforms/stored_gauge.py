"""Lossless unit scaling at depth "all": every tensor that the step keeps has units of its own.

For an operation ``y = f(a, ...)`` with ``a = sigma_a a'`` and ``y = sigma_y y'``, and gradients in
units gamma, the backward pass is linear in what arrives, so no gradient is ever made in true units:

========================= ================== ============================ ===================
kind of operation         argument, forward  argument, backward           result, forward
========================= ================== ============================ ===================
keeps units (view, relu)  1                  1                            1
linear (sum, cat)         sigma_a / sigma_y  gamma_y / gamma_a            1
product, gated product    1                  gamma_y c/(sigma_a gamma_a)  c / sigma_y
any other                 sigma_a            gamma_y / gamma_a            1 / sigma_y
opaque (several results)  sigma_a            1 / gamma_a                  1
========================= ================== ============================ ===================

with ``c`` the product of the sigmas. An operation that keeps units hands on those of its argument,
so a chain of them has one gauge.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from lightning_unitscale.graph.aliasing import (
    aliased_by_mutation,
    same_tensor,
    viewed_argument,
    written_arguments,
)
from lightning_unitscale.graph.nodes import (
    TRANSFORMED,
    example_tensor,
    is_float_tensor,
    op_name,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.graph.passes import Region
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.graph.repeated_reads import repeated_reads
from lightning_unitscale.transforms.gauge import ONE, Factor, Gauge, gamma, sigma
from lightning_unitscale.transforms.held_units import held_parameters, refuse_unreachable
from lightning_unitscale.transforms.product_gauge import plan_product
from lightning_unitscale.transforms.units import Edit, NodePlan, Path, Units

# Positively homogeneous in their first argument, which is the only one that matters. So are views;
# some of these are views of one layout or type, and copies of another.
_KEEPS_UNITS = {
    "relu", "leaky_relu", "neg", "clone", "abs", "identity", "positive", "contiguous", "reshape",
    "reshape_as", "flatten", "ravel", "to", "type", "type_as", "float", "half", "bfloat16",
    "double", "cpu", "cuda", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "feature_dropout",
}  # fmt: skip
# They return their argument in evaluation, and add a constant to it in training.
_NOT_HOMOGENEOUS = {"alpha_dropout", "feature_alpha_dropout"}
_LINEAR = {"add", "sub", "cat", "concat", "stack", "hstack", "vstack", "iadd", "isub"}
_GATED = {"mul", "imul", "multiply"}
# Their backward pass is not linear to the last bit: it squares a matrix as often as the gradient's
# size asks for, or takes the gradient's logarithm.
_GRADIENT_MATTERS = {"matrix_exp", "linalg_matrix_exp", "logcumsumexp"}
# They hand the gradient of their argument to the user.
_HOOKS = {"register_hook"}


class StoredUnits(Units):
    """Units of every tensor of one graph at depth "all".

    Args:
        graph: The nodes, with in-place operations made out of place where that is safe.
        holds_parameters: Whether parameters come in units of their own.
    """

    def __init__(self, graph: fx.Graph, *, holds_parameters: bool = False) -> None:
        self._names: dict[fx.Node, str | None] = {}
        # By owner: the unit of its gradient where that is another tensor's, and whose value is
        # stored as the model means it.
        self._gammas: dict[str, Factor] = {}
        self._in_true_values: set[str] = set()
        excluded = _without_units(graph)
        if holds_parameters:
            self._names.update(held_parameters(graph))
            refuse_unreachable(self._names, excluded)
        repeated: dict[fx.Node, fx.Node] = {}
        for node, read in repeated_reads(graph).items():
            if _has_own_units(node) and node not in excluded and len(read) == 1:
                repeated[node] = read[0]
            else:
                excluded.update(read)
        for node in graph.nodes:
            if node in self._names:
                continue
            self._names[node] = None if node in excluded else self._name_of(node)
            if node in repeated:
                self._take_gradient_of(node, repeated[node])

    def owner(self, node: fx.Node) -> str | None:
        """Name in the gauge that holds the node's units, ``None`` for units 1."""
        return self._names.get(node)

    def is_owner(self, node: fx.Node) -> bool:
        """Whether the units are the node's own, not handed on from another."""
        return self._names.get(node) == tensor_name(node)

    def sigma(self, node: fx.Node) -> Factor:
        """Forward unit of the node's tensor."""
        name = self._names.get(node)
        return ONE if name is None or name in self._in_true_values else sigma(name)

    def gamma(self, node: fx.Node) -> Factor:
        """Gradient unit of the node's tensor."""
        name = self._names.get(node)
        if name is None or not requires_grad(node):
            return ONE
        return self._gammas.get(name) or gamma(name)

    def _name_of(self, node: fx.Node) -> str | None:
        if node.op not in {"call_function", "call_method"}:
            return None
        source = kept_argument(node)
        if source is not None:
            return self._names.get(source)
        return tensor_name(node) if _has_own_units(node) else None

    def _take_gradient_of(self, node: fx.Node, argument: fx.Node) -> None:
        """Nothing stands between ``node`` and an argument that it reads several times.

        So the argument's value is true, and the gradient goes through in the argument's unit.
        """
        self._gammas[tensor_name(node)] = self.gamma(argument)
        owner = self._names.get(argument)
        if owner is not None and argument.op != "placeholder":
            self._in_true_values.add(owner)


def _without_units(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are left as the model means them, value and gradient."""
    # One that is still written into in place, or seen through such a one: the write would be in its
    # units, not in ours.
    excluded = aliased_by_mutation(graph)
    for node in graph.nodes:
        if TRANSFORMED in node.meta:
            # What a ``vmap`` reads: no change of units can stand inside it.
            excluded.update((node, *node.all_input_nodes))
        elif op_name(node) in _GRADIENT_MATTERS or any(map(requires_grad, written_arguments(node))):
            # The latter must see the very tensor that it writes into.
            excluded.add(node)
        elif _has_complex_and_real_arguments(node):
            # No change of units can give the complex one its gradient.
            excluded.add(node)
        elif op_name(node) in _HOOKS:
            excluded.update((node, node.all_input_nodes[0]))
    return excluded


def _has_complex_and_real_arguments(node: fx.Node) -> bool:
    """Whether the backward pass of an operation makes complex gradients, but it has real inputs."""
    tensors = [one for one in node.all_input_nodes if example_tensor(one) is not None]
    is_real = [is_float_tensor(one) for one in tensors]
    return any(is_real) and any(
        requires_grad(one) and not real for one, real in zip(tensors, is_real, strict=True)
    )


def _has_own_units(node: fx.Node) -> bool:
    """Whether an operation makes a tensor that may have units other than its arguments'."""
    return is_float_tensor(node) and requires_grad(node) and kept_argument(node) is None


def kept_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose units the node hands on, or ``None`` when it has units of its own."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or written_arguments(node):
        return None
    if viewed_argument(node) is not first and op_name(node) not in _KEEPS_UNITS:
        return None
    if node.op == "call_function" and node.target is operator.getitem and not _is_view(first):
        return None
    read, made = example_tensor(first), example_tensor(node)
    if any(one is not None and not one.is_floating_point() for one in (read, made)):
        # An index that is cast to float has no units to hand on, a complex tensor takes none.
        return None
    if op_name(node) in _NOT_HOMOGENEOUS:
        return same_tensor(node)
    if op_name(node) == "view" and read is not None and made is not None:
        # ``view(dtype)`` reads the same bits as other numbers.
        return first if read.dtype == made.dtype else None
    return first


def plan_stored(
    region: Region, gauge: Gauge, *, holds_parameters: bool = False
) -> Iterator[NodePlan]:
    """Plans for every node of a graph that reads or makes a tensor with units."""
    units = StoredUnits(region.graph, holds_parameters=holds_parameters)
    for node in list(region.graph.nodes):
        if node.op == "output":
            yield NodePlan(node, region, tuple(true_arguments(node, units)))
        elif node.op in {"call_function", "call_method"} and not _hands_on(node, units):
            product = product_of(node)
            if product is not None:
                yield plan_product(product, region, gauge, units)
            else:
                yield NodePlan(node, region, tuple(_edits(node, units)))


def _hands_on(node: fx.Node, units: StoredUnits) -> bool:
    source = kept_argument(node)
    return source is not None and units.owner(source) == units.owner(node)


def _edits(node: fx.Node, units: StoredUnits) -> Iterator[Edit]:
    if units.owner(node) is None:
        # Opaque: several results, no gradient, or written into. It sees true units on both sides.
        yield from true_arguments(node, units)
        return
    arguments = list(float_arguments(node))
    if not arguments:
        # One result of an opaque operation, whose gradient must arrive there in true units.
        yield Edit(None, node, tensor_name(node), units.sigma(node).inverse(), units.gamma(node))
        return
    tensors = [one for _, one in arguments]
    kind = op_name(node)
    own_sigma, own_gamma = units.sigma(node), units.gamma(node)
    alone = len(tensors) == len(_values(node))
    if kind in _LINEAR and alone and "alpha" not in node.kwargs:
        for path, one in arguments:
            forward = units.sigma(one) / own_sigma
            yield _argument(node, path, one, forward, own_gamma / units.gamma(one))
        return
    if kind in _GATED and alone and len(tensors) == 2:
        common = units.sigma(tensors[0]) * units.sigma(tensors[1])
        for path, one in arguments:
            backward = own_gamma * common / units.sigma(one) / units.gamma(one)
            yield _argument(node, path, one, ONE, backward)
        yield _result(node, common / own_sigma, units)
        return
    for path, one in arguments:
        yield _argument(node, path, one, units.sigma(one), own_gamma / units.gamma(one))
    yield _result(node, own_sigma.inverse(), units)


def true_arguments(node: fx.Node, units: Units) -> Iterator[Edit]:
    """Changes to true units of every argument that is in others."""
    for path, one in float_arguments(node):
        yield _argument(node, path, one, units.sigma(one), units.gamma(one).inverse())


def _argument(
    node: fx.Node, path: Path, source: fx.Node, forward: Factor, backward: Factor
) -> Edit:
    if not requires_grad(source):
        backward = ONE
    return Edit(path, source, f"{tensor_name(node)}:{'.'.join(map(str, path))}", forward, backward)


def _result(node: fx.Node, forward: Factor, units: StoredUnits) -> Edit:
    name = tensor_name(node)
    return Edit(None, node, name, forward, ONE, name, units.sigma(node), name)


def float_arguments(node: fx.Node) -> Iterator[tuple[Path, fx.Node]]:
    """Every floating-point tensor argument of a node, with its path."""
    for path, value in _leaves(node):
        if is_float_tensor(value):
            yield path, value


def _values(node: fx.Node) -> list[Any]:
    """Positional leaves that are tensors or numbers; a ``dim`` after a list of tensors is none."""
    lists = any(isinstance(one, (list, tuple)) for one in node.args)
    return [
        value
        for path, value in _leaves(node)
        if isinstance(value, fx.Node)
        or (not lists and isinstance(value, (int, float)) and isinstance(path[0], int))
    ]


def _leaves(node: fx.Node) -> Iterator[tuple[Path, Any]]:
    pending: list[tuple[Path, Any]] = [((i,), one) for i, one in enumerate(node.args)]
    pending += [((key,), one) for key, one in node.kwargs.items()]
    while pending:
        path, value = pending.pop(0)
        if isinstance(value, (list, tuple)):
            pending += [((*path, i), one) for i, one in enumerate(value)]
        else:
            yield path, value


def _is_view(node: fx.Node) -> bool:
    """Whether items of this node are views: of a tensor, or of a split of one."""
    return is_float_tensor(node) or viewed_argument(node) is not None
