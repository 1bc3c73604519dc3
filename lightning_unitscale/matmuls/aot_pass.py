"""Scale and measure the matmuls in the forward and backward graphs that Inductor compiles.

Inductor decides late whether to fuse a matmul and a sum, and scaling must not change its choice.
So this pass scales a matmul with an addend after that choice. Measurements come last. Each costs
a call per step, so matmuls share them.

A measurement never extends a tensor's lifetime. The inputs and results of a forward graph are
alive at its end, so matmuls that read only those are measured there. In a backward graph the
matmuls of a site read one gradient. They are measured with the first of them if their other
operands exist by then, and the gradient is measured once.
"""

from __future__ import annotations

import functools
import json
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lightning_unitscale.capture.graph_nodes import first_operation
from lightning_unitscale.capture.operators import MatmulRule
from lightning_unitscale.matmuls.compiled_graphs import GRAPHS
from lightning_unitscale.matmuls.compiled_runs import CompiledMatmul, LookedAt, PlainMatmul
from lightning_unitscale.matmuls.compiler_internals import InductorPass
from lightning_unitscale.matmuls.joint_graphs import (
    MATMUL,
    arranged,
    identity_of,
    matmul_rule_of,
    tangents_of,
    value_of,
)
from lightning_unitscale.matmuls.joint_units import Scaling

_ATEN = torch.ops.aten
_OURS = torch.ops.lightning_unitscale


@dataclass(frozen=True)
class _NotedMatmul:
    """A matmul before Inductor fused it with a sum or split it from one."""

    name: str  # of its node
    operands: tuple[str, ...]  # names of the nodes that it reads
    index: int  # which matmul of its graph it is


class _Noted(threading.local):
    matmuls: tuple[_NotedMatmul, ...] = ()  # of the graph that this thread is compiling
    graph: int | None = None  # its number


_NOTED = _Noted()


def note_matmuls(graph: fx.Graph) -> None:
    """Record the matmuls of a graph."""
    matmuls = []
    _NOTED.graph = None
    for node in graph.nodes:
        if MATMUL in node.meta:
            _NOTED.graph, index = node.meta[MATMUL]
            if (rule := matmul_rule_of(node)) is not None:
                matmuls.append(_NotedMatmul(node.name, _operands(rule, node), index))
    _NOTED.matmuls = tuple(matmuls)


def finish_graph(graph: fx.Graph) -> None:
    """Insert the measurements of a graph's matmuls, and scale those that are still unscaled."""
    if _NOTED.graph is not None:
        _Finishing(graph, _NOTED.graph, list(_NOTED.matmuls)).run()
        _NOTED.matmuls, _NOTED.graph = (), None


PASSES = (
    InductorPass("post_grad_custom_pre_pass", note_matmuls, identity_of),
    InductorPass("post_grad_custom_post_pass", finish_graph, identity_of),
)


class _Finishing:
    """The rewriting of one graph."""

    def __init__(self, graph: fx.Graph, number: int, known: list[_NotedMatmul]) -> None:
        self._graph = graph
        self._compiled = GRAPHS[number]
        self._number, self._text = self._compiled.description
        self._known = known
        self._scaling = Scaling(graph)

    def run(self) -> None:
        """Rewrite the graph."""
        matmuls = self._compiled.matmuls
        found = []
        for node in list(self._graph.nodes):
            rule = matmul_rule_of(node)
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
            args = (self._number, self._text, device, is_backward)
            order = new(_OURS.compiled_order.default, *args)
        looked_at = []
        for node, rule, index in found:
            matmul = matmuls[index]
            site, reads = None, []
            if rule is not None and isinstance(matmul, CompiledMatmul):
                if not matmul.is_scaled:
                    self._find_factors(first, device, is_backward)
                    self._scaling.scale(node, rule, matmul)
                reads = [*rule.operands_in(node.args)]
                reads += [node.args[position] for position in rule.addends_in(node.args)]
                site = matmul.forward
            looked_at.append(FoundMatmul(node, index, site, reads))
        for look in looks_of(self._graph, looked_at, is_backward=is_backward):
            with self._graph.inserting_before(look.before):
                new(_OURS.look.default, look.tensors, order, self._number, look.text)

    def _find_factors(self, first: fx.Node, device: torch.device, is_backward: bool) -> None:
        if self._scaling.parts is not None:
            return
        new, parts_of = self._scaling.new, _OURS.parts_of_factors.default
        for node in self._graph.find_nodes(op="call_function", target=parts_of):
            self._scaling.parts = node
            return
        with self._graph.inserting_before(first):
            args = (self._number, self._text, device, is_backward)
            factors = new(_OURS.compiled_factors.default, *args)
            self._scaling.parts = new(parts_of, factors, None, self._number)

    def _found(self, rule: MatmulRule | None, node: fx.Node) -> int | None:
        """Return the index of a node's matmul, which Inductor renames when it fuses a sum."""
        if MATMUL in node.meta:
            matmul = self._compiled.matmuls[node.meta[MATMUL][1]]
            # A node may have inherited the ``meta`` of the node that it was made from.
            if isinstance(matmul, PlainMatmul) and matmul.operator == str(node.target):
                return node.meta[MATMUL][1]
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


def _operands(rule: MatmulRule, node: fx.Node) -> tuple[str, ...]:
    return tuple(map(str, rule.operands_in(node.args)))


@dataclass(frozen=True)
class FoundMatmul:
    """A matmul of a graph."""

    node: fx.Node
    index: int  # which matmul of the graph
    site: Any  # ``None`` if it runs unscaled
    reads: Sequence[Any]  # operands and addends; empty if it runs unscaled


@dataclass
class Look:
    """Matmuls that are measured together, before a node."""

    before: fx.Node
    tensors: list[fx.Node] = field(default_factory=list)  # to measure
    matmuls: list[LookedAt] = field(default_factory=list)
    # Keyed by the node of which they are views or copies.
    _positions: dict[fx.Node, int] = field(default_factory=dict)

    def take(self, matmul: FoundMatmul, there: Callable[[fx.Node], fx.Node | None]) -> bool:
        """Add a matmul if its operands, or the sources of its copies, exist by then."""
        reads = []
        for read in matmul.reads:
            node, whole = there(read), _whole(read)
            is_copy = node is None and _is_copy(whole)
            if is_copy:
                source: Any = whole.args[0]
                node = there(source)
            if node is None:
                return False
            reads.append((node, not is_copy))
        where = tuple((self._position(node), in_units) for node, in_units in reads)
        self.matmuls.append(LookedAt(matmul.index, where))
        return True

    @property
    def text(self) -> str:
        """Return the measured operands as text, from which :meth:`CompiledGraph.look` reads it."""
        return json.dumps([(one.index, one.reads) for one in self.matmuls])

    def _position(self, node: fx.Node) -> int:
        position = self._positions.setdefault(_whole(node), len(self.tensors))
        if position == len(self.tensors):
            self.tensors.append(node)
        return position


def looks_of(graph: fx.Graph, found: Sequence[FoundMatmul], *, is_backward: bool) -> list[Look]:
    """Distribute matmuls over shared measurements."""
    # A graph may write its inputs at the end, so measure before that.
    end = next(node for node in graph.nodes if node.op == "output" or _writes(node))
    kept: dict[fx.Node, fx.Node] = {}
    if not is_backward:
        nodes = [*graph.find_nodes(op="placeholder"), *graph.output_node().all_input_nodes]
        kept.update((_whole(node), node) for node in nodes)
    place = {node: index for index, node in enumerate(graph.nodes)}

    def there(look: Look, node: fx.Node) -> fx.Node | None:
        if look is at_end:
            return kept.get(_whole(node))
        # Take the layout that the matmul reads, since Inductor would materialize any other.
        return next((n for n in arranged(node) if place[n] < place[look.before]), None)

    at_end = Look(end)
    looks = [at_end]
    of_site: dict[Any, Look] = {}
    for matmul in found:
        for look in (at_end, of_site.get(matmul.site)):
            if look is not None and look.take(matmul, functools.partial(there, look)):
                break
        else:
            look = of_site[matmul.site] = Look(matmul.node)
            look.take(matmul, lambda node: node)
            looks.append(look)
    return [look for look in looks if look.matmuls]


def _whole(node: Any) -> fx.Node:
    """Return the node of which this one is a view or a copy in another layout."""
    *_, whole = arranged(node)
    return whole


def _is_copy(node: fx.Node) -> bool:
    """Check whether a node is a tensor times one of our factors."""
    factor: Any = node.args[1] if node.target is _ATEN.mul.Tensor else None
    if not isinstance(factor, fx.Node) or factor.target is not _ATEN.select.int:
        return False
    factors: Any = factor.args[0]
    if factors.target is not operator.getitem:
        return False
    return factors.args[0].target is _OURS.parts_of_factors.default


def _writes(node: fx.Node) -> bool:
    return node.target is _ATEN.copy_.default
