"""The rules of lossless unit scaling: which changes of units stand around each node.

For a matrix product ``y = f(x, w) + b``, let ``x = u_x x'`` and ``w = u_w w'`` be
the operands in units of their own, ``c = u_x u_w``, and ``g = a g'`` the gradient arriving at ``y``
in the unit ``a``. Then

- forward ``y = c (f(x', w') + b / c)``;
- backward ``dx = (a c / u_x) dx'``, ``dw = (a c / u_w) dw'``, ``db = a db'``,

where the primed gradients are what the product's own backward makes of ``g'``. All factors are
powers of two, so both passes give the plain model's bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import fx

from lightning_unitscale.graph.matmuls import Operand, Product, product_of
from lightning_unitscale.graph.nodes import (
    Path,
    example_tensor,
    is_float_tensor,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.graph.passes import Region
from lightning_unitscale.lossless.gauge import ONE, Factor, Gauge, gamma, sigma
from lightning_unitscale.lossless.units import Edit, NodePlan


def operand_name(product: Product, operand: Operand) -> str:
    """Name of an operand in the gauge."""
    return f"{tensor_name(product.node)}:{operand.role}"


def plan_product(product: Product, region: Region, gauge: Gauge) -> NodePlan:
    """Decide the factors around one product."""
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
            forward=own[operand.role].inverse(),
            backward=arriving * common / own[operand.role],
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
            forward=common.inverse(),
            backward=arriving,
        )
        for addend in (product.addends if product.reads_addends else ())
    ]
    if product.rule.fused_attention:
        edits += _mask_edit(product, arriving * common)
    result = Edit(
        path=None,
        source=node,
        name=name,
        forward=common,
        backward=arriving.inverse(),
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


def _mask_edit(product: Product, backward: Factor) -> list[Edit]:
    """A learned attention bias is added inside the kernel, in true units; its gradient is not."""
    node = product.node
    in_kwargs = "attn_mask" in node.kwargs
    mask = node.kwargs.get("attn_mask") if in_kwargs else (*node.args, None, None, None, None)[3]
    if not isinstance(mask, fx.Node) or not is_float_tensor(mask):
        return []
    path: Path = ("attn_mask",) if in_kwargs else (3,)
    factor = backward if requires_grad(mask) else ONE
    return [Edit(path, mask, f"{tensor_name(node)}:attn_mask", ONE, factor)]


def plan_region(region: Region, gauge: Gauge) -> Iterator[NodePlan]:
    """Plans for every product of a graph."""
    for node in list(region.graph.nodes):
        product = product_of(node)
        if product is not None:
            yield plan_product(product, region, gauge)
