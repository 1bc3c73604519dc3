"""The rules of lossless unit scaling: which changes of units stand around each node.

For a matrix product ``y = f(x, w) + b``, at both depths, let ``x = u_x x'`` and ``w = u_w w'`` be
the operands in units of their own, ``c = u_x u_w``, and ``g = a g'`` the gradient arriving at ``y``
in the unit ``a``. Then

- forward ``y = c (f(x', w') + b / c)``;
- backward ``dx = (a c / u_x) dx'``, ``dw = (a c / u_w) dw'``, ``db = a db'``,

where the primed gradients are what the product's own backward makes of ``g'``. Where the
neighbours are stored in units of their own, those divide out.

At depth "all" every tensor that the step keeps has units of its own. For an operation
``y = f(p, ...)`` with ``p = sigma_p p'`` and ``y = sigma_y y'``, and gradients in units gamma, the
backward pass is linear in what arrives, so no gradient is ever made in true units:

========================= ================== ============================ ===================
kind of operation         argument, forward  argument, backward           result, forward
========================= ================== ============================ ===================
keeps units (view, relu)  1                  1                            1
linear (sum, cat)         sigma_p / sigma_y  gamma_y / gamma_p            1
product, gated product    1                  gamma_y c/(sigma_p gamma_p)  c / sigma_y
any other                 sigma_p            gamma_y / gamma_p            1 / sigma_y
opaque (several results)  sigma_p            1 / gamma_p                  1
========================= ================== ============================ ===================

with ``c`` the product of the sigmas. An operation that keeps units hands on those of its argument,
so a chain of them has one pair in the gauge. All factors are powers of two, so both passes give the
plain model's bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

from torch import fx

from lightning_unitscale.graph.aliasing import (
    aliased_by_mutation,
    same_tensor,
    viewed_argument,
    written_arguments,
)
from lightning_unitscale.graph.grad_order import repeated_reads
from lightning_unitscale.graph.matmuls import Operand, Product, product_of
from lightning_unitscale.graph.nodes import (
    TRANSFORMED,
    Path,
    argument_paths,
    example_tensor,
    float_arguments,
    is_float_tensor,
    op_name,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.graph.passes import Region
from lightning_unitscale.lossless.gauge import ONE, Factor, Gauge, Key, gamma, sigma
from lightning_unitscale.lossless.units import Edit, NodePlan, Units, held_parameters

# Positively homogeneous in their first argument, which is the only one that matters. So are views;
# some of these are views of one layout or type, and copies of another.
_KEEPS_UNITS = {
    "relu", "leaky_relu", "neg", "clone", "abs", "identity", "positive", "contiguous", "reshape",
    "reshape_as", "flatten", "ravel", "to", "type", "type_as", "float", "half", "bfloat16",
    "double", "cpu", "cuda", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "feature_dropout", "from_local", "to_local", "redistribute",
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


def operand_name(product: Product, operand: Operand) -> str:
    """Name of an operand in the gauge."""
    return f"{tensor_name(product.node)}:{operand.role}"


def plan_product(product: Product, region: Region, gauge: Gauge, units: Units) -> NodePlan:
    """Decide the factors around one product.

    Args:
        product: The product.
        region: The graph that it is in.
        gauge: The current gauge, which matters for a fused attention only, where the units of query
            and key meet inside the kernel's temperature, a Python number. Their product is
            therefore fixed when the graph is built; later gauges share out drift between the two.
        units: Units in which the tensors around the product are stored.
    """
    node = product.node
    name = tensor_name(node)
    arriving = gamma(name)
    own = {operand.role: sigma(operand_name(product, operand)) for operand in product.operands}
    kwargs: tuple[tuple[str, float], ...] = ()
    if product.rule.fused_attention:
        common = own["value"]
        logit_scale = _logit_scale(product)
        if logit_scale is None:
            own["query"] = own["key"] = ONE
        else:
            exponent = own["query"].exponent(gauge) + own["key"].exponent(gauge)
            own["query"] = Factor(constant=exponent) / own["key"]
            kwargs = (("scale", math.ldexp(logit_scale, exponent)),)
    else:
        common = ONE
        for unit in own.values():
            common = common * unit
    edits = [
        Edit(
            path=operand.path,
            source=operand.node,
            name=operand_name(product, operand),
            forward=units.sigma(operand.node) / own[operand.role],
            backward=arriving * common / own[operand.role] / units.gamma(operand.node),
            forward_name=operand_name(product, operand),
            forward_unit=own[operand.role],
        )
        for operand in product.operands
    ]
    edits += [
        Edit(
            path=addend.path,
            source=addend.node,
            name=f"{name}:{addend.role}",
            forward=units.sigma(addend.node) / common,
            backward=arriving / units.gamma(addend.node),
        )
        for addend in (product.addends if product.reads_addends else ())
    ]
    if product.rule.fused_attention:
        edits += _mask_edit(product, arriving * common, units)
    result = Edit(
        path=None,
        source=node,
        name=name,
        forward=common / units.sigma(node),
        backward=units.gamma(node) / arriving,
        backward_name=name,
    )
    return NodePlan(node, region, (*edits, result), kwargs)


def _logit_scale(product: Product) -> float | None:
    """The number by which a fused attention multiplies its logits, if it is one."""
    scale = product.node.kwargs.get("scale")
    if scale is None:
        query = example_tensor(product.operands[0].node)
        size = None if query is None else query.size(-1)
        return 1.0 / math.sqrt(size) if isinstance(size, int) else None
    return float(scale) if isinstance(scale, (int, float)) else None


def _mask_edit(product: Product, backward: Factor, units: Units) -> list[Edit]:
    """A learned attention bias is added inside the kernel, in true units; its gradient is not."""
    node = product.node
    in_kwargs = "attn_mask" in node.kwargs
    mask = node.kwargs.get("attn_mask") if in_kwargs else (*node.args, None, None, None, None)[3]
    if not isinstance(mask, fx.Node) or not is_float_tensor(mask):
        return []
    backward = backward / units.gamma(mask) if requires_grad(mask) else ONE
    path: Path = ("attn_mask",) if in_kwargs else (3,)
    return [Edit(path, mask, f"{tensor_name(node)}:attn_mask", units.sigma(mask), backward)]


class StoredUnits(Units):
    """Units of every tensor of one graph at depth "all".

    Args:
        graph: The nodes, with in-place operations made out of place where that is safe.
        holds_parameters: Whether parameters come in units of their own.
    """

    def __init__(self, graph: fx.Graph, *, holds_parameters: bool = False) -> None:
        # By owner: the unit of its gradient where that is another tensor's, and whose value is
        # stored as the model means it.
        self._gammas: dict[Key, Factor] = {}
        self._in_true_values: set[Key] = set()
        excluded = _without_units(graph)
        super().__init__(held_parameters(graph, excluded) if holds_parameters else None)
        repeated: dict[fx.Node, fx.Node] = {}
        for node, read in repeated_reads(graph).items():
            if has_own_units(node) and node not in excluded and len(read) == 1:
                repeated[node] = read[0]
            else:
                excluded.update(read)
        for node in graph.nodes:
            if node in self._keys:
                continue
            self._keys[node] = None if node in excluded else self._key_of(node)
            if node in repeated:
                self._take_gradient_of(node, repeated[node])

    def sigma(self, node: fx.Node) -> Factor:
        """Forward unit of the node's tensor."""
        return ONE if self.owner(node) in self._in_true_values else super().sigma(node)

    def gamma(self, node: fx.Node) -> Factor:
        """Gradient unit of the node's tensor."""
        key = self.owner(node)
        if key is None or not requires_grad(node):
            return ONE
        return self._gammas.get(key) or super().gamma(node)

    def _key_of(self, node: fx.Node) -> Key | None:
        source = kept_argument(node)
        if source is not None:
            return self._keys.get(source)
        return tensor_name(node) if has_own_units(node) else None

    def _take_gradient_of(self, node: fx.Node, argument: fx.Node) -> None:
        """Nothing stands between ``node`` and an argument that it reads several times.

        So the argument's value is true, and the gradient goes through in the argument's unit.
        """
        self._gammas[tensor_name(node)] = self.gamma(argument)
        owner = self._keys.get(argument)
        if owner is not None and argument.op != "placeholder":
            self._in_true_values.add(owner)


def _without_units(graph: fx.Graph) -> set[fx.Node]:
    """Tensors that are left as the model means them, value and gradient."""
    # Tensors that are still written into in place, or alias such ones: the write would be in its
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
    tensors = [source for source in node.all_input_nodes if example_tensor(source) is not None]
    is_real = [is_float_tensor(tensor) for tensor in tensors]
    return any(is_real) and any(
        requires_grad(tensor) and not real for tensor, real in zip(tensors, is_real, strict=True)
    )


def has_own_units(node: fx.Node) -> bool:
    """Whether an operation makes a tensor that may have units other than its arguments'."""
    is_operation = node.op in {"call_function", "call_method"}
    makes_float = is_operation and is_float_tensor(node) and requires_grad(node)
    return makes_float and kept_argument(node) is None


def kept_argument(node: fx.Node) -> fx.Node | None:
    """The argument whose units the node hands on, or ``None`` when it has units of its own."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or written_arguments(node):
        return None
    if viewed_argument(node) is not first and op_name(node) not in _KEEPS_UNITS:
        return None
    if node.op == "call_function" and node.target is operator.getitem and not _is_view(first):
        return None
    read, result = example_tensor(first), example_tensor(node)
    if any(tensor is not None and not tensor.is_floating_point() for tensor in (read, result)):
        # An index that is cast to float has no units to hand on, a complex tensor takes none.
        return None
    if op_name(node) in _NOT_HOMOGENEOUS:
        return same_tensor(node)
    if op_name(node) == "view" and read is not None and result is not None:
        # ``view(dtype)`` reads the same bits as other numbers.
        return first if read.dtype == result.dtype else None
    return first


def plan_region(region: Region, gauge: Gauge, units: Units) -> Iterator[NodePlan]:
    """Plans for every node of a graph that reads or makes a tensor with units.

    Args:
        region: The graph.
        gauge: The current gauge.
        units: Those of its tensors.
    """
    for node in list(region.graph.nodes):
        product = product_of(node)
        if product is not None:
            yield plan_product(product, region, gauge, units)
        elif edits := tuple(edit for edit in _edits(node, units) if edit.is_needed):
            yield NodePlan(node, region, edits)


def _edits(node: fx.Node, units: Units) -> Iterator[Edit]:
    source, owner = kept_argument(node), units.owner(node)
    hands_on = source is not None and units.owner(source) == owner
    if hands_on or node.op == "placeholder":
        return
    if owner is None:
        # Opaque: several results, no gradient, or written into. It sees true units on both sides.
        yield from _true_arguments(node, units)
        return
    arguments = list(float_arguments(node))
    if not arguments:
        # One result of an opaque operation, whose gradient must arrive there in true units.
        yield Edit(None, node, tensor_name(node), units.sigma(node).inverse(), units.gamma(node))
        return
    tensors = [source for _, source in arguments]
    kind = op_name(node)
    own_sigma, own_gamma = units.sigma(node), units.gamma(node)
    alone = len(tensors) == _num_values(node)
    if kind in _LINEAR and alone and "alpha" not in node.kwargs:
        for path, source in arguments:
            forward = units.sigma(source) / own_sigma
            yield _argument(node, path, source, forward, own_gamma / units.gamma(source))
        return
    if kind in _GATED and alone and len(tensors) == 2:
        common = units.sigma(tensors[0]) * units.sigma(tensors[1])
        for path, source in arguments:
            backward = own_gamma * common / units.sigma(source) / units.gamma(source)
            yield _argument(node, path, source, ONE, backward)
        yield _result(node, common / own_sigma, units)
        return
    for path, source in arguments:
        yield _argument(node, path, source, units.sigma(source), own_gamma / units.gamma(source))
    yield _result(node, own_sigma.inverse(), units)


def _true_arguments(node: fx.Node, units: Units) -> Iterator[Edit]:
    """Changes to true units of every argument that is in others."""
    for path, source in float_arguments(node):
        yield _argument(node, path, source, units.sigma(source), units.gamma(source).inverse())


def _argument(
    node: fx.Node, path: Path, source: fx.Node, forward: Factor, backward: Factor
) -> Edit:
    if not requires_grad(source):
        backward = ONE
    return Edit(path, source, f"{tensor_name(node)}:{'.'.join(map(str, path))}", forward, backward)


def _result(node: fx.Node, forward: Factor, units: Units) -> Edit:
    name = tensor_name(node)
    return Edit(None, node, name, forward, ONE, name, units.sigma(node), name)


def _num_values(node: fx.Node) -> int:
    """How many tensors, and numbers in their places; a ``dim`` after a list of tensors is none."""
    tensors = len(list(argument_paths(node)))
    if any(isinstance(argument, (list, tuple)) for argument in node.args):
        return tensors
    return tensors + sum(isinstance(argument, (int, float)) for argument in node.args)


def _is_view(node: fx.Node) -> bool:
    """Whether items of this node are views: of a tensor, or of a split of one."""
    return is_float_tensor(node) or viewed_argument(node) is not None
