"""The compiled executor of the table: units around the products of what the user compiles.

A module that the user gave to ``torch.compile`` runs no kernel under its own name. Its products are
rewritten within that compilation, in the forward and the backward graph of AOTAutograd.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from lightning_unitscale.dispatch.calls import Sources, slot_of
from lightning_unitscale.dispatch.compiled_graphs import GRAPHS, CompiledGraph, CompiledProduct
from lightning_unitscale.dispatch.compiled_sites import (
    ARRANGED,
    arguments_of,
    arrangements,
    path_of,
    rule_of,
    value_of,
)
from lightning_unitscale.dispatch.measurement import FORWARD, Site
from lightning_unitscale.dispatch.products import ProductRule
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.torch_internals import GraphPass, compile_id, fake_mode_of
from lightning_unitscale.dispatch.unreached import UNREACHED
from lightning_unitscale.profiler.costs import concrete

_ATEN = torch.ops.aten
_OURS = torch.ops.lightning_unitscale
_UNREACHED = {
    f"aten.{rule.operator}" + ("" if "." in rule.operator else ".default"): rule
    for rule in UNREACHED
}
# What formats have left: ``joint_pass.py`` could not take a number that is known at run time only.
_NUMBER = "a number among its arguments that is known only when it runs, in a compiled graph"


class _Forward:
    """What the backward graph of a compilation needs to know of its forward graph."""

    def __init__(self, session: ProductSession, root: str) -> None:
        self.session = session
        self.root = root
        # By the number of the autograd node: the site, and the names of its operands' nodes.
        self.products: dict[int, list[tuple[Site, list[set[str]]]]] = defaultdict(list)


# By session and the name of a site, the number of the compiled frame that its product is in.
_CLAIMS: WeakKeyDictionary[ProductSession, dict[str, int | None]] = WeakKeyDictionary()
_FORWARDS: dict[tuple[int | None, int | None], _Forward] = {}
_IDENTIFIED: dict[tuple[tuple[int | None, int | None], bool], _Rewriting] = {}


def _identify(graph: fx.Graph) -> None:
    """Find the sites of the products of a graph, if it is compiled in a step of a session's."""
    identity, is_backward = compile_id(), _is_backward(graph)
    if identity is None:
        return
    _IDENTIFIED.pop((identity, is_backward), None)
    if is_backward:
        forward = _FORWARDS.get(identity)
        if forward is None or not forward.session.is_open:
            return
    else:
        _FORWARDS.pop(identity, None)
        if LOCAL.session is None:
            return
        session = LOCAL.session
        forward = _Forward(session, session.sites.forward_run().path)
        _FORWARDS[identity] = forward
    rewriting = _Rewriting(graph, forward, identity[0], is_backward=is_backward)
    if not forward.session.numerics:
        rewriting.identify()
    _IDENTIFIED[identity, is_backward] = rewriting


def _rewrite(graph: fx.Graph) -> None:
    """Put units around the products whose sites were found."""
    identity = compile_id()
    if identity is not None:
        rewriting = _IDENTIFIED.pop((identity, _is_backward(graph)), None)
        if rewriting is not None:
            rewriting.run()


def _is_backward(graph: fx.Graph) -> bool:
    return any(
        node.op == "placeholder" and node.name.startswith("tangents_") for node in graph.nodes
    )


PASSES = (
    GraphPass("post_grad_custom_pre_pass", _identify),
    GraphPass("post_grad_custom_post_pass", _rewrite),
)


@dataclass(frozen=True)
class _Identified:
    """A product as it was before Inductor joined it with a sum, or parted it from one.

    Attributes:
        name: Name of its node.
        operands: Names of the nodes that it reads.
        site: Which product of the step it is, or the backward product of.
        slot: ``"forward"``, or which gradient it makes.
        sources: For each operand which forward operand it is; ``None``: the arriving gradient.
    """

    name: str
    operands: tuple[str, ...]
    site: Site
    slot: str
    sources: Sources


class _Rewriting:
    """Rewrites one graph."""

    def __init__(
        self, graph: fx.Graph, forward: _Forward, frame: int | None, *, is_backward: bool
    ) -> None:
        self._graph = graph
        self._forward = forward
        self._is_backward = is_backward
        self._compiled = CompiledGraph(forward.session)
        self._index = len(GRAPHS)
        self._frame = frame
        self._taken: set[str] = set()
        self._visits: dict[int, int] = defaultdict(int)
        self._identified: list[_Identified] = []
        self._fake_mode: Any = None
        # By site, and whether they are forward: products that read one copy of what both read.
        self._kin: dict[tuple[str, bool], list[CompiledProduct]] = defaultdict(list)
        self._copies: dict[tuple[fx.Node, str], fx.Node] = {}

    def identify(self) -> None:
        """Find the site of every product."""
        for node in self._graph.nodes:
            if (rule := rule_of(node)) is not None:
                self._identified.append(self._identify(rule, node))

    def run(self) -> None:
        """Rewrite it."""
        found = []
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            rule, unreached = rule_of(node), _UNREACHED.get(str(node.target))
            if rule is not None and not self._forward.session.numerics:
                found.append((node, self._plan(rule, node)))
            elif (left := rule or unreached) is not None:
                reason = _NUMBER if unreached is None else unreached.reason
                flops = int(left.flops(arguments_of(node), concrete(value_of(node))))
                self._compiled.unreached.append((self._path(node), reason, flops))
        if not found and not self._compiled.unreached:
            return
        GRAPHS.append(self._compiled)
        device = torch.device("cpu")
        if found:
            node, product = found[0]
            device = value_of(product.rule.operands_in(node.args)[0]).device
        first = next(node for node in self._graph.nodes if node.op != "placeholder")
        values = [value_of(node) for node in self._graph.nodes if "val" in node.meta]
        self._fake_mode = fake_mode_of(values)
        with self._graph.inserting_before(first):
            self._factors = self._new(_OURS.compiled_factors.default, self._index, device)
            self._order = self._new(_OURS.compiled_order.default, device) if found else None
        for index, (node, product) in enumerate(found):
            self._rewrite(index, node, product)

    def _identify(self, rule: ProductRule, node: fx.Node) -> _Identified:
        word, roles = rule.name_in(arguments_of(node))
        number = node.meta.get("seq_nr")
        slot = FORWARD
        sources: Sources = tuple(range(len(rule.operands)))
        site: Site | None = None
        if self._is_backward and node.meta.get("partitioner_tag") != "is_forward":
            known = self._forward.products.get(number) if number is not None else None
            if number is not None and known:
                site, operands = known[0]
                sources = self._sources(rule, node, operands, number)
                slot = slot_of(sources)
            else:
                word += "@backward"
        if site is None:
            site = self._claim(word, roles, self._path(node))
            if number is not None and not self._is_backward:
                names = [_names(operand) for operand in rule.operands_in(node.args)]
                self._forward.products[number].append((site, names))
        return _Identified(node.name, _operands(rule, node), site, slot, sources)

    def _claim(self, word: str, roles: tuple[str, ...], path: str) -> Site:
        """The site of a forward product; the same one when its frame is compiled again."""
        session = self._forward.session
        claims = _CLAIMS.setdefault(session, {})
        for index in itertools.count():
            site = session.sites.numbered(word, roles, path, index)
            owner = claims.setdefault(site.name, self._frame)
            if owner == self._frame and site.name not in self._taken:
                break
        self._taken.add(site.name)
        return site

    def _plan(self, rule: ProductRule, node: fx.Node) -> CompiledProduct:
        identified = self._found(rule, node)
        product = CompiledProduct(
            rule,
            identified.site,
            identified.slot,
            identified.sources,
            int(rule.flops(arguments_of(node), concrete(value_of(node)))),
            value_of(node.args[rule.operands[0]]).dtype,
            self._compiled.num_factors,
            self._kin[identified.site.name, identified.slot == FORWARD],
        )
        product.kin.append(product)
        self._compiled.products.append(product)
        return product

    def _found(self, rule: ProductRule, node: fx.Node) -> _Identified:
        """The product that a node was; one that Inductor has joined with a sum has another name."""
        operands = _operands(rule, node)
        matching = [
            known
            for known in self._identified
            if len(known.operands) == len(operands)
            and (known.name == node.name or set(known.operands) & set(operands))
        ]
        if not matching:
            return self._identify(rule, node)
        best = max(
            matching,
            key=lambda known: (
                known.name == node.name,
                sum(a == b for a, b in zip(known.operands, operands, strict=True)),
            ),
        )
        self._identified.remove(best)
        return best

    def _rewrite(self, index: int, node: fx.Node, product: CompiledProduct) -> None:
        rule, start = product.rule, product.start
        addend, result = start + len(product.sources), start + len(product.sources) + 1
        with self._graph.inserting_before(node):
            args = list(node.args)
            looked = []
            names = product.site.names_of(product.sources)
            for offset, position in enumerate(rule.operands):
                if not product.stays(offset):
                    args[position] = self._scaled(args[position], start + offset, names[offset])
                looked.append(args[position])
            for position in rule.addends_in(node.args):
                args[position] = self._scaled(args[position], addend)
                looked.append(args[position])
            for position, which in rule.follows:
                args[position] = self._scaled(args[position], start + which)
            self._new(_OURS.look.default, looked, self._order, self._index, index)
        node.args = tuple(args)
        if isinstance(value_of(node), Tensor):
            self._scale_result(node, result)
            return
        for user in list(node.users):
            item: Any = user.args[1]
            if isinstance(item, int) and item < len(rule.results) and rule.results[item]:
                self._scale_result(user, result + item)

    def _scale_result(self, node: fx.Node, factor: int) -> None:
        users = list(node.users)
        with self._graph.inserting_after(node):
            marker = node.next
        with self._graph.inserting_before(marker):
            scaled = self._times(node, factor)
        for user in users:
            user.replace_input_with(node, scaled)

    def _scaled(self, node: Any, factor: int, name: str = "") -> fx.Node:
        """A tensor times a factor, in the same arrangement.

        Args:
            node: The tensor.
            factor: Index of the factor.
            name: What the factor is the unit of: two products of a site read one copy.
        """
        chain = []
        while str(node.target) in ARRANGED:
            chain.append(node)
            node = node.args[0]
        result = self._copies.get((node, name))
        if result is None:
            result = self._times(node, factor)
        if name:
            self._copies[node, name] = result
        for view in reversed(chain):
            result = self._new(view.target, result, *view.args[1:], **view.kwargs)
        return result

    def _times(self, node: fx.Node, factor: int) -> fx.Node:
        number = self._new(_ATEN.select.int, self._factors, 0, factor)
        dtype = value_of(node).dtype
        if dtype is not torch.float16:
            return self._new(_ATEN.mul.Tensor, node, number)
        # A factor of FP32 need not be a number of FP16.
        convert = torch.ops.prims.convert_element_type.default
        wide = self._new(convert, node, torch.float32)
        return self._new(convert, self._new(_ATEN.mul.Tensor, wide, number), dtype)

    def _new(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), value_of)
        with self._fake_mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def _sources(
        self, rule: ProductRule, node: fx.Node, operands: list[set[str]], number: int
    ) -> Sources:
        """For each operand which forward operand it is; ``None``: the arriving gradient."""
        count = len(rule.operands)
        if rule.gradient is not None:
            return (None, *range(count - 1))
        visit = self._visits[number]
        self._visits[number] += 1
        found: list[int | None] = []
        for position in rule.operands:
            names = _names(node.args[position])
            matches = [k for k, known in enumerate(operands) if names & known]
            found.append(matches[0] if matches else None)
        if found.count(None) == 1:
            return tuple(found)
        return (None, 1) if visit == 0 else (0, None)

    def _path(self, node: fx.Node) -> str:
        return path_of(node, self._forward.session, self._forward.root)


def _operands(rule: ProductRule, node: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, rule.operands_in(node.args)))


def _names(node: Any) -> set[str]:
    """Names of a node and of those that it is another arrangement of."""
    return {arranged.name for arranged in arrangements(node)}
