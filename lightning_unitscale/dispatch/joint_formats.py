"""Formats in what the user compiles: its products become operators that round as they run.

The pass sees AOTAutograd's joint graph, forward and backward, before Inductor has joined a product
with anything: the products are those of the step as it is written.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.dispatch.compiled_formats import (
    GRAPHS,
    Changing,
    RoundedGraph,
    RoundedProduct,
)
from lightning_unitscale.dispatch.compiled_runs import Place
from lightning_unitscale.dispatch.compiled_sites import (
    ARRANGED,
    CAST,
    arguments_of,
    arrangements,
    fake_mode_in,
    known_sources,
    path_of,
    rule_of,
    value_of,
)
from lightning_unitscale.dispatch.compiler_internals import GraphPass, is_of_backward, note_strides
from lightning_unitscale.dispatch.fp8 import is_weight
from lightning_unitscale.dispatch.owners import running_session
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.torch_internals import Kernel, current_node
from lightning_unitscale.graph.nodes import first_operation
from lightning_unitscale.graph.operators import ProductRule
from lightning_unitscale.profiler.costs import concrete

_OURS = torch.ops.lightning_unitscale


def _round(graph: fx.Graph) -> None:
    """Let the products of a graph round, if it is compiled in a step whose products do."""
    session = running_session()
    if session is not None and session.numerics:
        FormatsInGraph(graph, session).run()


PASS = GraphPass("joint_custom_pre_pass", _round)


class FormatsInGraph:
    """Lets the products of one graph round."""

    def __init__(self, graph: fx.Graph, session: ProductSession) -> None:
        self._graph = graph
        self._session = session
        run = session.sites.run_of(current_node())
        root = "" if run is None else run.path
        self._root = root
        self._compiled = RoundedGraph(root)
        self._index = len(GRAPHS)
        # By the number of the autograd node: forward products, with the nodes of their operands.
        self._forward: dict[int, list[tuple[int, list[Any]]]] = defaultdict(list)
        self._inputs: list[fx.Node] = []

    def run(self) -> None:
        """Rewrite it."""
        found = [(node, rule) for node in self._graph.nodes if (rule := rule_of(node)) is not None]
        found = [(node, rule) for node, rule in found if _can_move(node)]
        if not found:
            return
        products = self._compiled.products
        for node, rule in found:
            self._compiled.add(self._product(rule, node))
        GRAPHS.append(self._compiled)
        with fake_mode_in(self._graph), self._graph.inserting_before(first_operation(self._graph)):
            begin = self._graph.call_function(_OURS.begin.default, (self._inputs, self._index))
            begin.meta["val"] = torch.empty((), dtype=torch.int64)
            # Another one in the backward graph would be another run.
            begin.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for index, ((node, _), product) in enumerate(zip(found, products, strict=True)):
            self._replace(index, node, product, begin)

    def _product(self, rule: ProductRule, node: fx.Node) -> RoundedProduct:
        """What is known of a product before it runs."""
        word, roles = rule.name_in(arguments_of(node))
        path, number = path_of(node, self._session, self._root), node.meta.get("seq_nr")
        value = value_of(node)
        results = None
        if not isinstance(value, Tensor):
            results = tuple(k for k, item in enumerate(value) if isinstance(item, Tensor))
        operands = rule.operands_in(node.args)
        place = Place(word, roles, path)
        flops = int(rule.flops(arguments_of(node), concrete(value)))
        product = RoundedProduct(rule, _operator(node), *_template(node), results, place, flops)
        if is_of_backward(node):
            for forward, saved in self._forward.get(number, []) if number is not None else []:
                sources = known_sources(rule, operands, saved)
                if sources is not None:
                    product.forward, product.sources = forward, sources
                    return product
            product.place = Place(f"{word}@backward", roles, path)
        elif number is not None:
            self._forward[number].append((len(self._compiled.products), operands))
        if len(operands) == 2:
            self._look_for_weight(product, operands[1])
        return product

    def _look_for_weight(self, product: RoundedProduct, node: fx.Node) -> None:
        """Find out what the second operand of a product is made of."""
        module = self._session.sites.module
        layer = None if module is None else module.get_submodule(product.place.path)
        product.is_weight = is_weight(product.place.word, value_of(node), layer)
        for source in arrangements(node):
            if source.op == "placeholder" and not product.is_weight:
                if source not in self._inputs:
                    self._inputs.append(source)
                product.input = self._inputs.index(source)
            if str(source.target) not in ARRANGED | {CAST}:
                break

    def _replace(self, index: int, node: fx.Node, product: RoundedProduct, begin: fx.Node) -> None:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        nodes = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        tensors = [leaf for leaf in nodes if isinstance(value_of(leaf), Tensor)]
        sizes = [leaf for leaf in nodes if not isinstance(value_of(leaf), Tensor)]
        with self._graph.inserting_before(node):
            new = self._graph.call_function(
                _OURS.product.default, (tensors, sizes, begin, self._index, index)
            )
            new.meta = dict(node.meta)
            new.meta["val"] = product.listed(value_of(node))
            note_strides(new, fx.map_arg(new.args, value_of))
            if product.results is None:
                node.replace_all_uses_with(self._item(new, 0, node))
        for user in list(node.users):
            with self._graph.inserting_before(user):
                assert product.results is not None
                item = self._item(new, product.results.index(user.args[1]), user)
            user.replace_all_uses_with(item)
            self._graph.erase_node(user)
        self._graph.erase_node(node)

    def _item(self, results: fx.Node, index: int, like: fx.Node) -> fx.Node:
        item = self._graph.call_function(operator.getitem, (results, index))
        item.meta = dict(like.meta)
        return item


def _operator(node: fx.Node) -> Kernel:
    assert callable(node.target), "it is an operator of aten"
    return node.target


def _can_move(node: fx.Node) -> bool:
    """Whether all that changes among a product's arguments, and all that is read, can be moved."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [value_of(leaf) for leaf in leaves if isinstance(leaf, fx.Node)]
    if not all(isinstance(value, (Tensor, int, torch.SymInt)) for value in values):
        return False
    if isinstance(value_of(node), Tensor):
        return True
    return all(
        user.target is operator.getitem and isinstance(user.meta.get("val"), Tensor)
        for user in node.users
    )


def _template(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node, with what changes numbered."""
    tensors, sizes = itertools.count(), itertools.count()

    def numbered(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        is_tensor = isinstance(value_of(leaf), Tensor)
        return Changing(next(tensors if is_tensor else sizes), is_tensor)

    args, kwargs = pytree.tree_map(numbered, (node.args, node.kwargs))
    return tuple(args), dict(kwargs)
