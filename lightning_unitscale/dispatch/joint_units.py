"""Units in what the user compiles, on AOTAutograd's joint graph of a forward and backward pass.

A module that the user gave to ``torch.compile`` runs no kernel under its own name. Its products get
their units in its graphs. The partitioner then saves a copy that both passes read in place of the
tensor that it was made of, and the factors with it, so a backward pass has those of its forward.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.dispatch.calls import Sources, slot_of
from lightning_unitscale.dispatch.compiled_graphs import (
    GRAPHS,
    CompiledGraph,
    CompiledProduct,
    PlainProduct,
)
from lightning_unitscale.dispatch.compiled_sites import (
    ARRANGED,
    PRODUCT,
    arguments_of,
    fake_mode_in,
    known_sources,
    path_of,
    rule_of,
    tangents_of,
    value_of,
)
from lightning_unitscale.dispatch.measurement import FORWARD, Site
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.torch_internals import (
    GraphPass,
    compiled_frame,
    is_compiling,
    is_of_backward,
)
from lightning_unitscale.dispatch.unreached import UNREACHED
from lightning_unitscale.graph.nodes import first_operation
from lightning_unitscale.profiler.costs import concrete

_ATEN = torch.ops.aten
_OURS = torch.ops.lightning_unitscale
_UNREACHED = {
    f"aten.{rule.operator}" + ("" if "." in rule.operator else ".default"): rule
    for rule in UNREACHED
}
# What formats have left: ``joint_formats.py`` cannot take a number that is known at run time only.
_NUMBER = "a number among its arguments that is known only when it runs, in a compiled graph"
# What a partitioner is told of a node within a checkpoint: whether it is computed again, and whose.
_RECOMPUTE, _CHECKPOINT = "recompute", "ac_graph_id"
# By session and the name of a site, the number of the compiled frame that its product is in.
_CLAIMS: WeakKeyDictionary[ProductSession, dict[str, int | None]] = WeakKeyDictionary()


def _give_units(graph: fx.Graph) -> None:
    """Give units to the products of a graph that is compiled in a step of a session's."""
    session = LOCAL.session
    if session is not None and is_compiling():
        _Units(graph, session).run()


PASS = GraphPass("joint_custom_post_pass", _give_units)


class _Units:
    """Rewrites one graph."""

    def __init__(self, graph: fx.Graph, session: ProductSession) -> None:
        self._graph = graph
        self._session = session
        self._frame = compiled_frame()
        self._root = session.sites.forward_run().path
        self._compiled = CompiledGraph(session)
        self._index = len(GRAPHS)
        tangents = tangents_of(graph)
        self._tangents = [node for node in tangents if isinstance(value_of(node), Tensor)]
        # What the backward pass computes of the gradients that arrive.
        self._after_tangents = set(tangents)
        self._taken: set[str] = set()
        # By the number of the autograd node: the site, and what its product reads.
        self._forward: dict[int, list[tuple[Site, list[fx.Node]]]] = defaultdict(list)
        self._visits: dict[int, int] = defaultdict(int)

    def run(self) -> None:
        """Rewrite it."""
        found = []
        for node in list(self._graph.nodes):
            if not self._after_tangents.isdisjoint(node.all_input_nodes):
                self._after_tangents.add(node)
            rule, unreached = rule_of(node), _UNREACHED.get(str(node.target))
            if rule is not None and not self._session.numerics:
                found.append((node, self._product(rule, node)))
            elif node.op == "call_function" and (left := rule or unreached) is not None:
                reason = _NUMBER if unreached is None else unreached.reason
                flops = int(left.flops(arguments_of(node), concrete(value_of(node))))
                path = path_of(node, self._session, self._root)
                self._add(node, PlainProduct(str(node.target), path, reason, flops))
        if not self._compiled.products:
            return
        GRAPHS.append(self._compiled)
        if found:
            self._rewrite(found)

    def _add(self, node: fx.Node, product: CompiledProduct | PlainProduct) -> None:
        node.meta[PRODUCT] = self._index, len(self._compiled.products)
        self._compiled.add(product)

    def _product(self, rule: ProductRule, node: fx.Node) -> CompiledProduct:
        """What is known of a product before it runs."""
        word, roles = rule.name_in(arguments_of(node))
        number = node.meta.get("seq_nr")
        operands = rule.operands_in(node.args)
        site: Site | None = None
        sources: Sources = tuple(range(len(operands)))
        if node in self._after_tangents or is_of_backward(node):
            if number is not None and self._forward[number]:
                site, saved = self._forward[number][0]
                sources = self._sources(rule, operands, saved, number)
            else:
                word += "@backward"
        slot = FORWARD if site is None else slot_of(sources)
        if site is None:
            site = self._claim(word, roles, path_of(node, self._session, self._root))
            if number is not None and not word.endswith("@backward"):
                self._forward[number].append((site, operands))
        product = CompiledProduct(
            rule,
            site,
            slot,
            sources,
            int(rule.flops(arguments_of(node), concrete(value_of(node)))),
            value_of(operands[0]).dtype,
            self._compiled.num_factors,
        )
        self._add(node, product)
        return product

    def _sources(
        self, rule: ProductRule, operands: list[fx.Node], saved: list[fx.Node], number: int
    ) -> Sources:
        """For each operand which forward operand it is; ``None``: the arriving gradient."""
        visit, self._visits[number] = self._visits[number], self._visits[number] + 1
        # What cannot be told is in the order in which autograd works.
        return known_sources(rule, operands, saved) or ((0, None) if visit else (None, 1))

    def _claim(self, word: str, roles: tuple[str, ...], path: str) -> Site:
        """The site of a forward product; the same one when its frame is compiled again."""
        claims = _CLAIMS.setdefault(self._session, {})
        for index in itertools.count():
            site = self._session.sites.numbered(word, roles, path, index)
            owner = claims.setdefault(site.name, self._frame)
            if owner == self._frame and site.name not in self._taken:
                break
        self._taken.add(site.name)
        return site

    def _rewrite(self, found: list[tuple[fx.Node, CompiledProduct]]) -> None:
        device = value_of(found[0][1].rule.operands_in(found[0][0].args)[0]).device
        # One for each pass, and the copies that each has made of what it may share.
        forward = Scaling(self._graph)
        backward = Scaling(self._graph, copies=forward.copies)
        with self._graph.inserting_before(first_operation(self._graph)):
            forward.factors = forward.new(
                _OURS.compiled_factors.default, self._index, device, False
            )
            # Another one in the backward graph would be those of another run.
            forward.factors.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if self._tangents:
                backward.factors = backward.new(
                    _OURS.saved_factors.default, forward.factors, self._tangents[0], self._index
                )
        for node, product in found:
            product.is_scaled = not _may_join_a_sum(node, product.rule)
            if product.is_scaled:
                scaling = backward if node in self._after_tangents else forward
                scaling.scale(node, product.rule, product)


def _may_join_a_sum(node: fx.Node, rule: ProductRule) -> bool:
    """Whether Inductor may let a product and a sum run as one, as it does without units.

    It decides that later, in the forward and the backward graph: see ``aot_pass.py``.
    """
    if rule.operator != "mm":
        return False
    return any(getattr(user.target, "overloadpacket", None) is _ATEN.add for user in node.users)


class Scaling:
    """Puts nodes into a graph that divide tensors by units, and multiply results by them.

    Args:
        graph: The graph.
        copies: The copies of another one, to share those of what a graph computes. What it is
            given stays in memory anyway, and copies of that would be saved beside it.

    Attributes:
        factors: The node that gives all factors of the graph.
        copies: By what they were made of, and by the name of its unit.
    """

    def __init__(self, graph: fx.Graph, copies: Any = None) -> None:
        self.factors: Any = None
        self.copies: dict[tuple[fx.Node, str], fx.Node] = {} if copies is None else copies
        self._of_inputs: dict[tuple[fx.Node, str], fx.Node] = {}
        self._graph = graph
        self._fake_mode = fake_mode_in(graph)

    def new(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node."""
        node = self._graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), value_of)
        with self._fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def scale(self, node: fx.Node, rule: ProductRule, product: CompiledProduct) -> None:
        """Run a product in units.

        Args:
            node: The product.
            rule: Its operator.
            product: What is known of it.
        """
        start, args = product.start, list(node.args)
        addend = start + len(product.sources)
        names = product.site.names_of(product.sources)
        with self._graph.inserting_before(node):
            for index, position in enumerate(rule.operands):
                if not product.stays(index):
                    args[position] = self._scaled(args[position], start + index, node, names[index])
            for position in rule.addends_in(args):
                args[position] = self._scaled(args[position], addend, node)
            for position, which in rule.follows:
                args[position] = self._scaled(args[position], start + which, node)
        node.args = tuple(args)
        if isinstance(value_of(node), Tensor):
            self._scale_result(node, addend + 1)
            return
        for user in list(node.users):
            item: Any = user.args[1]
            if isinstance(item, int) and item < len(rule.results) and rule.results[item]:
                self._scale_result(user, addend + 1 + item)

    def _scale_result(self, node: fx.Node, factor: int) -> None:
        users = list(node.users)
        with self._graph.inserting_after(node):
            marker = node.next
        with self._graph.inserting_before(marker):
            scaled = self._times(node, factor, node.meta)
        for user in users:
            user.replace_input_with(node, scaled)

    def _scaled(self, node: Any, factor: int, product: fx.Node, name: str = "") -> fx.Node:
        """A tensor times a factor, in the same arrangement.

        Args:
            node: The tensor.
            factor: Index of the factor.
            product: What reads it.
            name: What the factor is the unit of: products of a site read one copy.
        """
        chain = []
        while str(node.target) in ARRANGED:
            chain.append(node)
            node = node.args[0]
        copies = self._of_inputs if node.op == "placeholder" else self.copies
        result = copies.get((node, name)) if name else None
        if result is None:
            meta = dict(product.meta)
            if _RECOMPUTE in meta:
                # Also where a policy has the product itself saved.
                meta[_RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE
            result = self._times(node, factor, meta)
        if name:
            copies[node, name] = result
        for view in reversed(chain):
            result = self.new(view.target, result, *view.args[1:], **view.kwargs)
        return result

    def _times(self, node: fx.Node, factor: int, meta: dict[str, Any]) -> fx.Node:
        number = self.new(_ATEN.select.int, self.factors, 0, factor)
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
