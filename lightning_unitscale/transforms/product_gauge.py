"""The rule of lossless unit scaling for a matrix product, at both depths.

For ``y = f(x, w) + b`` let ``x = u_x x'`` and ``w = u_w w'`` be the operands in units of their own,
``c = u_x u_w``, and ``g = a g'`` the gradient arriving at ``y`` in the unit ``a``. Then

- forward ``y = c (f(x', w') + b / c)``;
- backward ``dx = (a c / u_x) dx'``, ``dw = (a c / u_w) dw'``, ``db = a db'``,

where the primed gradients are what the product's own backward makes of ``g'``. Where the
neighbours are stored in units of their own, those divide out. All factors are powers of two, so
both passes give the plain model's bits.
"""

from __future__ import annotations

import math

from torch import fx

from lightning_unitscale.graph.nodes import (
    example_tensor,
    is_float_tensor,
    requires_grad,
    tensor_name,
)
from lightning_unitscale.graph.passes import Region
from lightning_unitscale.graph.products import Operand, Product, product_of
from lightning_unitscale.transforms.gauge import ONE, Factor, Gauge, gamma, sigma
from lightning_unitscale.transforms.units import Edit, NodePlan, Units


def operand_name(product: Product, operand: Operand) -> str:
    """Name of an operand in the gauge."""
    return f"{tensor_name(product.node)}:{operand.role}"


def operands_to_measure(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """What a calibration measures before the node runs: the operands of a product."""
    product = product_of(node)
    if product is None:
        return []
    return [(operand_name(product, one), one.node) for one in product.operands]


def plan_product(product: Product, region: Region, gauge: Gauge, units: Units) -> NodePlan:
    """Decide the factors around one product.

    ``gauge`` matters for a fused attention only: the units of query and key meet inside the
    kernel's temperature, a Python number. Their product is therefore fixed when the graph is
    built; later gauges share out what drift there is between the two.
    """
    node = product.node
    name = tensor_name(node)
    arriving = gamma(name)
    own = {one.role: sigma(operand_name(product, one)) for one in product.operands}
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
            path=one.path,
            source=one.node,
            name=operand_name(product, one),
            forward=units.sigma(one.node) / own[one.role],
            backward=arriving * common / own[one.role] / units.gamma(one.node),
            forward_name=operand_name(product, one),
            forward_unit=own[one.role],
        )
        for one in product.operands
    ]
    edits += [
        Edit(
            path=one.path,
            source=one.node,
            name=f"{name}:{one.role}",
            forward=units.sigma(one.node) / common,
            backward=arriving / units.gamma(one.node),
        )
        for one in product.addends
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
    given = product.node.kwargs.get("scale")
    if given is None:
        query = example_tensor(product.operands[0].node)
        size = None if query is None else query.size(-1)
        return 1.0 / math.sqrt(size) if isinstance(size, int) else None
    return float(given) if isinstance(given, (int, float)) else None


def _mask_edit(product: Product, backward: Factor, units: Units) -> list[Edit]:
    """A learned attention bias is added inside the kernel, in true units; its gradient is not."""
    node = product.node
    in_kwargs = "attn_mask" in node.kwargs
    mask = node.kwargs.get("attn_mask") if in_kwargs else (*node.args, None, None, None, None)[3]
    if not isinstance(mask, fx.Node) or not is_float_tensor(mask):
        return []
    backward = backward / units.gamma(mask) if requires_grad(mask) else ONE
    path: tuple[int | str, ...] = ("attn_mask",) if in_kwargs else (3,)
    return [Edit(path, mask, f"{tensor_name(node)}:attn_mask", units.sigma(mask), backward)]
