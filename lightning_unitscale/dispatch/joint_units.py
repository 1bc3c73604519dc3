"""Units in what the user compiles, on AOTAutograd's joint graph of a forward and backward pass.

A module that the user gave to ``torch.compile`` runs no kernel under its own name. Its products get
their units in its graphs. The partitioner then saves a copy that both passes read in place of the
tensor that it was made of, and the factors with it, so a backward pass has those of its forward.
Likewise, on a CPU, a gradient is written in its unit alone where whoever else reads it is fused.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.compiling import compiles_frame
from lightning_unitscale.dispatch.calls import slot_of
from lightning_unitscale.dispatch.compiled_graphs import GRAPHS, CompiledGraph
from lightning_unitscale.dispatch.compiled_products import CompiledProduct, PlainProduct
from lightning_unitscale.dispatch.compiled_runs import Place
from lightning_unitscale.dispatch.compiled_sites import (
    PRODUCT,
    arguments_of,
    known_sources,
    path_of,
    rule_of,
    tangents_of,
    value_of,
)
from lightning_unitscale.dispatch.compiler_internals import GraphPass, is_of_backward
from lightning_unitscale.dispatch.measurement import FORWARD
from lightning_unitscale.dispatch.recompiling import note_compiled
from lightning_unitscale.dispatch.scaled_nodes import Scaling
from lightning_unitscale.dispatch.session import LOCAL, ProductSession
from lightning_unitscale.dispatch.torch_internals import current_node
from lightning_unitscale.dispatch.unreached import UNREACHED
from lightning_unitscale.graph.nodes import first_operation
from lightning_unitscale.graph.operators import ProductRule, Sources
from lightning_unitscale.profiler.costs import concrete

_ATEN = torch.ops.aten
_OURS = torch.ops.lightning_unitscale
_UNREACHED = {
    f"aten.{rule.operator}" + ("" if "." in rule.operator else ".default"): rule
    for rule in UNREACHED
}
# What formats have left: ``joint_formats.py`` cannot take a number that is known at run time only.
_NUMBER = "a number among its arguments that is known only when it runs, in a compiled graph"
# Its strides are those of either layout: Inductor goes by whether what it reads is saved for the
# backward pass, and a copy is not.
_ONE_CHANNEL = "a convolution of one channel, whose layout Inductor chooses, in a compiled graph"


def _give_units(graph: fx.Graph) -> None:
    """Give units to the products of a graph that is compiled in a step of a session's."""
    session = LOCAL.session
    if session is not None and session.rewrites_graphs and compiles_frame():
        note_compiled()
        UnitsInGraph(graph, session).run()


PASS = GraphPass("joint_custom_post_pass", _give_units)


class UnitsInGraph:
    """Gives units to the products of one graph."""

    def __init__(self, graph: fx.Graph, session: ProductSession, *, is_fused: bool = True) -> None:
        self._graph = graph
        self._session = session
        self._is_fused = is_fused
        run = session.sites.run_of(current_node())
        self._root = "" if run is None else run.path
        self._compiled = CompiledGraph(self._root)
        self._index = len(GRAPHS)
        tangents = tangents_of(graph)
        self._tangents = [node for node in tangents if isinstance(value_of(node), Tensor)]
        # What the backward pass computes of the gradients that arrive.
        self._after_tangents = set(tangents)
        # By the number of the autograd node: the product, and what it reads.
        self._forward: dict[int, list[tuple[CompiledProduct, list[fx.Node]]]] = defaultdict(list)
        self._visits: dict[int, int] = defaultdict(int)

    def run(self) -> None:
        """Rewrite it."""
        found = []
        for node in list(self._graph.nodes):
            if not self._after_tangents.isdisjoint(node.all_input_nodes):
                self._after_tangents.add(node)
            rule, unreached = rule_of(node), _UNREACHED.get(str(node.target))
            has_one = self._is_fused and rule is not None and _reads_one_channel(rule, node)
            if rule is not None and not (self._session.numerics or has_one):
                found.append((node, self._product(rule, node)))
            elif node.op == "call_function" and (left := rule or unreached) is not None:
                reason = _ONE_CHANNEL if has_one else _NUMBER
                reason = reason if unreached is None else unreached.reason
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
        forward: CompiledProduct | None = None
        sources: Sources = tuple(range(len(operands)))
        if node in self._after_tangents or is_of_backward(node):
            if number is not None and self._forward[number]:
                forward, saved = self._forward[number][0]
                sources = self._sources(rule, operands, saved, number)
            else:
                word += "@backward"
        path = path_of(node, self._session, self._root)
        product = CompiledProduct(
            rule,
            Place(word, roles, path) if forward is None else forward.place,
            len(self._compiled.products) if forward is None else forward.number,
            FORWARD if forward is None else slot_of(sources),
            sources,
            int(rule.flops(arguments_of(node), concrete(value_of(node)))),
            value_of(operands[0]).dtype,
        )
        self._add(node, product)
        if forward is None and number is not None and not word.endswith("@backward"):
            self._forward[number].append((product, operands))
        return product

    def _sources(
        self, rule: ProductRule, operands: list[fx.Node], saved: list[fx.Node], number: int
    ) -> Sources:
        """For each operand which forward operand it is; ``None``: the arriving gradient."""
        visit, self._visits[number] = self._visits[number], self._visits[number] + 1
        # What cannot be told is in the order in which autograd works.
        return known_sources(rule, operands, saved) or ((0, None) if visit else (None, 1))

    def _rewrite(self, found: list[tuple[fx.Node, CompiledProduct]]) -> None:
        device = value_of(found[0][1].rule.operands_in(found[0][0].args)[0]).device
        # One for each pass, and the copies that each has made of what it may share.
        in_units = {
            node
            for node, product in found
            if not (self._is_fused and _may_join_a_sum(node, product.rule))
        }
        forward = Scaling(self._graph)
        fused = in_units if self._is_fused else ()
        backward = Scaling(self._graph, forward.copies, fused)
        with self._graph.inserting_before(first_operation(self._graph)):
            factors = forward.new(_OURS.compiled_factors.default, self._index, device, False)
            # Another one in the backward graph would be those of another run.
            factors.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            parts_of = _OURS.parts_of_factors.default
            forward.parts = forward.new(parts_of, factors, None, self._index, [])
            if self._tangents:
                backward.parts = backward.new(parts_of, factors, self._tangents[0], self._index, [])
        for node, product in found:
            product.is_scaled = node in in_units
            if product.is_scaled:
                scaling = backward if node in self._after_tangents else forward
                scaling.scale(node, product.rule, product)


def _reads_one_channel(rule: ProductRule, node: fx.Node) -> bool:
    """Whether it is a convolution of images with one channel, or the backward product of one."""
    if not rule.operator.startswith("convolution"):
        return False
    # The gradient comes first, whether the input is read or not.
    shape = value_of(node.args[1 if rule.sources else 0]).shape
    return len(shape) == 4 and shape[1] == 1


def _may_join_a_sum(node: fx.Node, rule: ProductRule) -> bool:
    """Whether Inductor may let a product and a sum run as one, as it does without units.

    It decides that later, in the forward and the backward graph: see ``aot_pass.py``.
    """
    if rule.operator != "mm":
        return False
    return any(getattr(user.target, "overloadpacket", None) is _ATEN.add for user in node.users)
