"""What is left to do in the forward and in the backward graph of what the user compiles.

Inductor decides late whether a product and a sum run as one, and it should decide as it does
without units. So a product that is added to something gets its units here, when that has been
decided. Looks at products come last.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import fx

from lightning_unitscale.dispatch.compiled_graphs import GRAPHS
from lightning_unitscale.dispatch.compiled_looks import FoundProduct, looks_of
from lightning_unitscale.dispatch.compiled_products import CompiledProduct, PlainProduct
from lightning_unitscale.dispatch.compiled_sites import PRODUCT, rule_of, tangents_of, value_of
from lightning_unitscale.dispatch.compiler_internals import GraphPass
from lightning_unitscale.dispatch.scaled_nodes import Scaling
from lightning_unitscale.graph.nodes import first_operation
from lightning_unitscale.graph.operators import ProductRule

_OURS = torch.ops.lightning_unitscale


@dataclass(frozen=True)
class _Known:
    """A product as it was before Inductor joined it with a sum, or parted it from one.

    Attributes:
        name: Name of its node.
        operands: Names of the nodes that it reads.
        index: Which product of its graph it is.
    """

    name: str
    operands: tuple[str, ...]
    index: int


class _Noted(threading.local):
    """The products of the graph that this thread is compiling, and the number of the graph."""

    products: tuple[_Known, ...] = ()
    graph: int | None = None


_NOTED = _Noted()


def note_products(graph: fx.Graph) -> None:
    """Note the products of a graph."""
    products = []
    _NOTED.graph = None
    for node in graph.nodes:
        if PRODUCT in node.meta:
            _NOTED.graph, index = node.meta[PRODUCT]
            if (rule := rule_of(node)) is not None:
                products.append(_Known(node.name, _operands(rule, node), index))
    _NOTED.products = tuple(products)


def finish_graph(graph: fx.Graph) -> None:
    """Let products of a graph be looked at, and run in units those that do not yet."""
    if _NOTED.graph is not None:
        _Finishing(graph, _NOTED.graph, list(_NOTED.products)).run()
        _NOTED.products, _NOTED.graph = (), None


PASSES = (
    GraphPass("post_grad_custom_pre_pass", note_products),
    GraphPass("post_grad_custom_post_pass", finish_graph),
)


class _Finishing:
    """Rewrites one graph."""

    def __init__(self, graph: fx.Graph, index: int, known: list[_Known]) -> None:
        self._graph = graph
        self._index = index
        self._known = known
        self._scaling = Scaling(graph)

    def run(self) -> None:
        """Rewrite it."""
        products = GRAPHS[self._index].products
        found = []
        for node in list(self._graph.nodes):
            rule = rule_of(node)
            index = self._found(rule, node)
            if index is not None:
                found.append((node, rule, index))
        if not found:
            return
        is_backward = bool(tangents_of(self._graph))
        device = value_of(found[0][0].all_input_nodes[0]).device
        first = first_operation(self._graph)
        new = self._scaling.new
        with self._graph.inserting_before(first):
            order = new(_OURS.compiled_order.default, self._index, device, is_backward)
        looked_at = []
        for node, rule, index in found:
            product = products[index]
            site, reads = None, []
            if rule is not None and isinstance(product, CompiledProduct):
                if not product.is_scaled:
                    self._find_factors(first, device, is_backward)
                    self._scaling.scale(node, rule, product)
                reads = [*rule.operands_in(node.args)]
                reads += [node.args[position] for position in rule.addends_in(node.args)]
                site = product.forward
            looked_at.append(FoundProduct(node, index, site, reads))
        for look in looks_of(self._graph, looked_at, is_backward=is_backward):
            number = GRAPHS[self._index].add_look(look.products)
            with self._graph.inserting_before(look.before):
                new(_OURS.look.default, look.tensors, order, self._index, number)

    def _find_factors(self, first: fx.Node, device: torch.device, is_backward: bool) -> None:
        if self._scaling.parts is not None:
            return
        new, parts_of = self._scaling.new, _OURS.parts_of_factors.default
        for node in self._graph.find_nodes(op="call_function", target=parts_of):
            self._scaling.parts = node
            return
        with self._graph.inserting_before(first):
            factors = new(_OURS.compiled_factors.default, self._index, device, is_backward)
            self._scaling.parts = new(parts_of, factors, None, self._index, [])

    def _found(self, rule: ProductRule | None, node: fx.Node) -> int | None:
        """The product that a node was; one that Inductor has joined with a sum has another name."""
        if PRODUCT in node.meta:
            product = GRAPHS[self._index].products[node.meta[PRODUCT][1]]
            # What a node was made of may have left it its ``meta``.
            if isinstance(product, PlainProduct) and product.operator == str(node.target):
                return node.meta[PRODUCT][1]
        if rule is None:
            return None
        operands = _operands(rule, node)
        matching = [
            known
            for known in self._known
            if len(known.operands) == len(operands)
            and (known.name == node.name or set(known.operands) & set(operands))
        ]
        if not matching:
            return None
        best = max(
            matching,
            key=lambda known: (
                known.name == node.name,
                sum(a == b for a, b in zip(known.operands, operands, strict=True)),
            ),
        )
        self._known.remove(best)
        return best.index


def _operands(rule: ProductRule, node: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, rule.operands_in(node.args)))
