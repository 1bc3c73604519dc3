"""The products of a graph of aten operators: which they are, and of which module."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor, fx

from lightning_unitscale.dispatch.execute import are_real
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.torch_internals import fake_mode_of
from lightning_unitscale.graph.operators import RULES, ProductRule, Sources
from lightning_unitscale.profiler.costs import concrete

_RULES = {f"aten.{rule.operator}.default": rule for rule in RULES}
# Other arrangements of a tensor: the factor goes before them, so that a product reads the same
# arrangement of the same memory, and BLAS adds in the same order.
ARRANGED = frozenset(
    f"aten.{name}"
    for name in (
        "permute.default",
        "t.default",
        "transpose.int",
        "view.default",
        "reshape.default",
        "expand.default",
        "unsqueeze.default",
        "squeeze.dim",
        "squeeze.dims",
    )
)
CAST = "prims.convert_element_type.default"
# In the ``meta`` of a node: number of its compiled graph, and which of that graph's products it is.
PRODUCT = "lightning_unitscale_product"
_SAME = ARRANGED | {"aten.clone.default", "aten._unsafe_view.default", CAST}


def path_of(node: fx.Node, session: ProductSession, root: str) -> str:
    """Path of the module that a node is of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for key in reversed(list(stack)):
        path = session.sites.path_of(int(str(key).partition("@")[0]))
        if path is not None:
            return path
    return root


def rule_of(node: fx.Node) -> ProductRule | None:
    """The rule of what a node reads that is a product of real tensors."""
    rule = _RULES.get(str(node.target)) if node.op == "call_function" else None
    if rule is None or len((rule := rule.reading(node.args, node.kwargs)).operands) < 2:
        return None
    operands = rule.operands_in(node.args)
    if not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    values = [value_of(operand) for operand in operands]
    is_product = all(isinstance(value, Tensor) for value in values) and are_real(values)
    return rule if is_product else None


def value_of(node: Any) -> Any:
    """What a node makes, without data."""
    return node.meta["val"]


def arrangements(node: Any, operators: Container[str] = _SAME) -> Iterator[fx.Node]:
    """A node, and those that it is another arrangement of."""
    yield node
    while str(node.target) in operators:
        node = node.args[0]
        yield node


def arranged(node: Any) -> Iterator[fx.Node]:
    """A node, and those that it is another arrangement of in the same memory; the whole is last."""
    return arrangements(node, ARRANGED)


def known_sources(rule: ProductRule, operands: list[Any], saved: list[Any]) -> Sources | None:
    """Which forward operand each operand of a backward product is; ``None``: the gradient."""
    if rule.sources:
        return rule.sources
    found = tuple(_source(list(arrangements(operand)), saved) for operand in operands)
    return found if found.count(None) == 1 else None


def _source(nodes: list[fx.Node], saved: list[Any]) -> int | None:
    exact = (k for node in nodes for k, other in enumerate(saved) if other is node)
    similar = (k for k, other in enumerate(saved) if not set(arrangements(other)).isdisjoint(nodes))
    return next(exact, next(similar, None))


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """The gradients that arrive at a step; none in the graph of a forward pass alone."""
    return [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")]


def fake_mode_in(graph: fx.Graph) -> Any:
    """The mode of a graph's tensors without data."""
    return fake_mode_of([value_of(node) for node in graph.nodes if "val" in node.meta])


def arguments_of(node: fx.Node) -> Any:
    """Tensors without data in place of the nodes that a node reads; their sizes are numbers."""
    return concrete(fx.node.map_arg(node.args, lambda read: read.meta.get("val")))
