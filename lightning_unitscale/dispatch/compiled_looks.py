"""Which products of a compiled graph are looked at together: each look costs a call in each step.

Nothing stays in memory for longer because of it. What a forward graph is given and what it returns
is there when it ends, so that products that read nothing else are looked at then. In a backward
graph the products of a site read one gradient: they are looked at with the first of them, where all
that the others read is there by then, and the gradient is measured once.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_unitscale.dispatch.compiled_products import LookedAt
from lightning_unitscale.dispatch.compiled_sites import arranged

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class FoundProduct:
    """A product of a graph.

    Attributes:
        node: Its node.
        index: Which product of the graph it is.
        site: Of which it is; ``None`` where it runs plain.
        reads: Its operands, and what is added to it; empty where it runs plain.
    """

    node: fx.Node
    index: int
    site: Any
    reads: Sequence[Any]


@dataclass
class Look:
    """Products that are looked at together.

    Attributes:
        before: The node before which they are.
        tensors: What is measured for them.
        products: The products.
    """

    before: fx.Node
    tensors: list[fx.Node] = field(default_factory=list)
    products: list[LookedAt] = field(default_factory=list)
    # By what they are arrangements of.
    _positions: dict[fx.Node, int] = field(default_factory=dict)

    def take(self, product: FoundProduct, there: Callable[[fx.Node], fx.Node | None]) -> bool:
        """Look at a product as well, if all that it reads, or is a copy of, is there by then."""
        reads = []
        for read in product.reads:
            node, whole = there(read), _whole(read)
            is_copy = node is None and _is_copy(whole)
            if is_copy:
                source: Any = whole.args[0]
                node = there(source)
            if node is None:
                return False
            reads.append((node, not is_copy))
        where = tuple((self._position(node), in_units) for node, in_units in reads)
        self.products.append(LookedAt(product.index, where))
        return True

    def _position(self, node: fx.Node) -> int:
        position = self._positions.setdefault(_whole(node), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(node)
        return position


def looks_of(graph: fx.Graph, found: Sequence[FoundProduct], *, is_backward: bool) -> list[Look]:
    """Distribute products over looks."""
    # Inputs may be written at the end.
    end = next(node for node in graph.nodes if node.op == "output" or _writes(node))
    kept: dict[fx.Node, fx.Node] = {}
    if not is_backward:
        nodes = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
        kept.update((_whole(node), node) for node in nodes)
    place = {node: index for index, node in enumerate(graph.nodes)}

    def there(look: Look, node: fx.Node) -> fx.Node | None:
        if look is at_end:
            return kept.get(_whole(node))
        # What the product itself reads: Inductor would write another arrangement beside it.
        return next((n for n in arranged(node) if place[n] < place[look.before]), None)

    at_end = Look(end)
    looks = [at_end]
    of_site: dict[Any, Look] = {}
    for product in found:
        for look in (at_end, of_site.get(product.site)):
            if look is not None and look.take(product, functools.partial(there, look)):
                break
        else:
            look = of_site[product.site] = Look(product.node)
            look.take(product, lambda node: node)
            looks.append(look)
    return [look for look in looks if look.products]


def _whole(node: Any) -> fx.Node:
    """What a node is another arrangement of."""
    *_, whole = arranged(node)
    return whole


def _is_copy(node: fx.Node) -> bool:
    """Whether it is a tensor times a factor."""
    factor: Any = node.args[1] if node.target is _ATEN.mul.Tensor else None
    if not isinstance(factor, fx.Node) or factor.target is not _ATEN.select.int:
        return False
    factors: Any = factor.args[0]
    if factors.target is not operator.getitem:
        return False
    return factors.args[0].target is torch.ops.lightning_unitscale.parts_of_factors.default


def _writes(node: fx.Node) -> bool:
    return node.target is _ATEN.copy_.default
