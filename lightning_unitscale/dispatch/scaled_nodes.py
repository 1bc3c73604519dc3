"""Nodes of a compiled graph that divide tensors by units, and multiply results by them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.dispatch.compiled_products import CompiledProduct
from lightning_unitscale.dispatch.compiled_sites import ARRANGED, arranged, fake_mode_in, value_of
from lightning_unitscale.graph.operators import ProductRule
from lightning_unitscale.profiler.costs import concrete

_ATEN = torch.ops.aten
_Factor = tuple[fx.Node, int]
# Of a unit within a graph: the forward product, and which of its operands, or its gradient.
_Name = tuple[int, int | None]
# What a partitioner is told of a node within a checkpoint: whether it is computed again, and whose.
_RECOMPUTE, _CHECKPOINT = "recompute", "ac_graph_id"


class Scaling:
    """Puts such nodes into a graph.

    Attributes:
        parts: The node that gives the factors of products, in a tensor for each.
        copies: By what they were made of, and by the name of its unit.
    """

    def __init__(
        self, graph: fx.Graph, copies: Any = None, in_units: Collection[fx.Node] = ()
    ) -> None:
        self.parts: Any = None
        self.copies: dict[tuple[fx.Node, _Name | None], fx.Node] = {} if copies is None else copies
        self._of_inputs: dict[tuple[fx.Node, _Name | None], fx.Node] = {}
        self._in_units = in_units
        self._graph = graph
        self._fake_mode = fake_mode_in(graph)

    def new(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node."""
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = self._run(target, args, kwargs)
        return node

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = fx.map_arg((args, kwargs), value_of)
        with self._fake_mode:
            return target(*args, **kwargs)

    def _factors_of(self, product: CompiledProduct) -> fx.Node:
        *others, numbers = self.parts.args
        if product.number not in numbers:
            # Those that are there already are not made again: there is a product for each layer.
            added = self._run(self.parts.target, (*others, [product.number]), {})
            numbers = [*numbers, product.number]
            self.parts.args = (*others, numbers)
            self.parts.meta["val"] = [*value_of(self.parts), *added]
        position = numbers.index(product.number)
        with self._graph.inserting_after(self.parts):
            factors = self._graph.call_function(operator.getitem, (self.parts, position))
        factors.meta["val"] = value_of(self.parts)[position]
        return factors

    def scale(self, node: fx.Node, rule: ProductRule, product: CompiledProduct) -> None:
        """Run a product in units."""
        args, addend = list(node.args), len(product.sources)
        factors = self._factors_of(product)
        names = product.names
        with self._graph.inserting_before(node):
            for index, position in enumerate(rule.operands):
                if not product.stays(index):
                    factor = factors, index
                    back = product.num_factors - 1 if product.sources[index] is None else None
                    args[position] = self._scaled(args[position], factor, node, names[index], back)
            for position in rule.addends_in(args):
                args[position] = self._scaled(args[position], (factors, addend), node)
            for position, which in rule.follows:
                args[position] = self._scaled(args[position], (factors, which), node, names[which])
        node.args = tuple(args)
        results: list[tuple[Any, fx.Node]] = [(0, node)]
        if not isinstance(value_of(node), Tensor):
            results = [(user.args[1], user) for user in node.users]
        for index, result in results:
            if index < len(rule.results) and (powers := rule.results[index]) is not None:
                factor = factors, addend + 1 + index
                (scaled,) = self._read_through(result, [factor], result.meta)
                if 1 in powers and powers.count(0) == len(powers) - 1:
                    # What the operator has made is the copy of its result in that operand's unit.
                    self.copies[scaled, names[powers.index(1)]] = result

    def _read_through(
        self, node: fx.Node, factors: Sequence[_Factor], meta: dict[str, Any]
    ) -> list[fx.Node]:
        """Let whoever reads a node read it times all of these factors, one after the other."""
        users, products = list(node.users), [node]
        with self._graph.inserting_before(node.next):
            for factor in factors:
                products.append(self._times(products[-1], factor, meta))
        for user in users:
            user.replace_input_with(node, products[-1])
        return products[1:]

    def _scaled(
        self,
        node: Any,
        factor: _Factor,
        product: fx.Node,
        name: _Name | None = None,
        back: int | None = None,
    ) -> fx.Node:
        """A tensor times a factor, in the same arrangement."""
        chain = list(arranged(node))
        copies = self._of_inputs if chain[-1].op == "placeholder" else self.copies
        # Inductor would write a copy of what lies out of order twice: in order, and as it is read.
        in_order = [k for k, node in enumerate(chain) if concrete(value_of(node)).is_contiguous()]
        *chain, node = chain[: max(in_order, default=len(chain)) + 1]
        result = copies.get((node, name)) if name is not None else None
        if result is None:
            meta = dict(product.meta)
            if _RECOMPUTE in meta:
                # Also where a policy has the product itself saved.
                meta[_RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE
            if back is not None and copies is self.copies and self._may_stand_for(node):
                # Written once, as it is without units. Where elements would be lost in its unit
                # its products run plain, and the factor is 1.
                factors = [factor, (factor[0], back)]
                result, gradient = self._read_through(node, factors, meta)
                copies[gradient, name] = result
            else:
                result = self._times(node, factor, meta)
        if name is not None:
            copies[node, name] = result
        for view in reversed(chain):
            result = self.new(view.target, result, *view.args[1:], **view.kwargs)
        return result

    def _may_stand_for(self, node: fx.Node) -> bool:
        """Whether Inductor fuses what reads a tensor with reading it from a copy, exactly."""
        if not self._in_units:
            return False
        value = value_of(node)
        is_exact = value.dtype in (torch.float32, torch.float64)
        # A GPU may add a product that it has not rounded, but not with a scaling in between.
        is_rounded = value.device.type == "cpu"
        return is_exact and is_rounded and all(map(self._is_fused, node.users))

    def _is_fused(self, node: fx.Node) -> bool:
        if str(node.target) in ARRANGED:
            return all(map(self._is_fused, node.users))
        tags = getattr(node.target, "tags", ())
        is_sum = node.target is _ATEN.sum.dim_IntList
        return node in self._in_units or is_sum or torch.Tag.pointwise in tags

    def _times(self, node: fx.Node, factor: _Factor, meta: dict[str, Any]) -> fx.Node:
        number = self.new(_ATEN.select.int, factor[0], 0, factor[1])
        dtype = value_of(node).dtype
        if dtype is not torch.float16:
            nodes = [self.new(_ATEN.mul.Tensor, node, number)]
        else:
            # A factor of FP32 need not be a number of FP16.
            convert = torch.ops.prims.convert_element_type.default
            nodes = [self.new(convert, node, torch.float32)]
            nodes.append(self.new(_ATEN.mul.Tensor, nodes[-1], number))
            nodes.append(self.new(convert, nodes[-1], dtype))
        for new in nodes:
            new.meta.update({k: meta[k] for k in (_RECOMPUTE, _CHECKPOINT) if k in meta})
        return nodes[-1]
