"""Find and describe the matmuls of a graph of aten operators, add nodes to it, and identify it."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.capture.operators import RULES, MatmulRule, Sources, UnreachedRule
from lightning_unitscale.compiling import compiles_frame
from lightning_unitscale.matmuls.compiled_runs import GraphMatmul, MatmulNames
from lightning_unitscale.matmuls.compiler_internals import (
    is_of_backward,
    note_compiled,
    number_of_key,
)
from lightning_unitscale.matmuls.execute import least_size
from lightning_unitscale.matmuls.owners import running_session
from lightning_unitscale.matmuls.session import SESSION, MatmulSession
from lightning_unitscale.matmuls.sites import Sites
from lightning_unitscale.matmuls.torch_internals import current_node, fake_mode_of
from lightning_unitscale.memory.costs import concrete

_RULES = {f"aten.{rule.operator}.default": rule for rule in RULES}
# Operators that rearrange a tensor. The factor goes before them, so that a matmul reads the same
# arrangement of the same memory, and BLAS sums in the same order.
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
CONVERT = torch.ops.prims.convert_element_type.default
CAST = str(CONVERT)
# In the ``meta`` of a node: number of its compiled graph, and which of that graph's matmuls it is.
MATMUL = "lightning_unitscale_matmul"
# Keys of ``meta`` that a partitioner reads: whether a node is recomputed, and its checkpoint.
RECOMPUTE, CHECKPOINT = "recompute", "ac_graph_id"
_SAME = ARRANGED | {"aten.clone.default", "aten._unsafe_view.default", CAST}


class NewNodes:
    """Adds nodes to a graph, with the fake tensors that they make."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._fake_mode = fake_mode_of([value_of(n) for n in graph.nodes if "val" in n.meta])

    def new(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node."""
        node = self._graph.call_function(target, args, kwargs)
        values, options = fx.map_arg((args, kwargs), value_of)
        with self._fake_mode:
            node.meta["val"] = target(*values, **options)
        return node


class JointMatmuls:
    """Describes the matmuls of the graph of both passes, in their order."""

    def __init__(self, graph: fx.Graph, session: MatmulSession, *, guesses: bool) -> None:
        self._session = session
        self._guesses = guesses
        run = session.sites.run_of(current_node())
        self.root = "" if run is None else run.path
        # The nodes that the backward pass computes from the gradients that arrive.
        self.after_tangents = set(tangents_of(graph))
        for node in graph.nodes:
            if not self.after_tangents.isdisjoint(node.all_input_nodes):
                self.after_tangents.add(node)
        # By the number of the autograd node: forward matmuls with their operands.
        self._forward: dict[int, list[tuple[GraphMatmul, list[Any]]]] = defaultdict(list)
        self._visits: Counter[int] = Counter()

    def describe(self, node: fx.Node, rule: MatmulRule, number: int) -> GraphMatmul:
        """Describe a matmul before it runs."""
        word, roles = rule.name_in(arguments_of(node))
        names = MatmulNames(word, roles, self.path_of(node))
        operands, autograd_node = rule.operands_in(node.args), node.meta.get("seq_nr")
        sources, flops = tuple(range(len(operands))), flops_of(rule, node)
        found = GraphMatmul(rule, names, number, number, sources, flops)
        known = [] if autograd_node is None else self._forward[autograd_node]
        if not (node in self.after_tangents or is_of_backward(node)):
            known.append((found, operands))
        elif (belongs := self._forward_of(rule, operands, known, autograd_node)) is not None:
            forward, found.sources = belongs
            found.forward, found.matmul_names = forward.number, forward.matmul_names
        else:
            found.matmul_names = names._replace(word=f"{word}@backward")
        return found

    def _forward_of(
        self, rule: MatmulRule, operands: list[Any], known: list[Any], autograd_node: Any
    ) -> tuple[GraphMatmul, Sources] | None:
        """Return the forward matmul of a backward one, and the sources of the operands."""
        self._visits[autograd_node] += 1
        for forward, saved in known:
            if (sources := known_sources(rule, operands, saved)) is not None:
                return forward, sources
        if not known or not self._guesses:
            return None
        # Autograd computes the gradients in this order.
        return known[0][0], (None, 1) if self._visits[autograd_node] == 1 else (0, None)

    def path_of(self, node: fx.Node) -> str:
        """Return the path of the module that a node belongs to."""
        return path_of(node, self._session.sites, self.root)


def path_of(node: fx.Node, sites: Sites, root: str) -> str:
    """Return the path of the module that a node belongs to, by default ``root``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    for key in reversed(list(stack)):
        path = sites.path_of(int(str(key).partition("@")[0]))
        if path is not None:
            return path
    return root


def matmul_rule_of(node: fx.Node) -> MatmulRule | None:
    """Return the rule of a node that is a matmul of real tensors; ``None`` for others."""
    rule = _RULES.get(str(node.target)) if node.op == "call_function" else None
    if rule is None or len((rule := rule.reading(node.args, node.kwargs)).operands) < 2:
        return None
    operands = rule.operands_in(node.args)
    if not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    values = [value_of(operand) for operand in operands]
    if not all(isinstance(value, Tensor) for value in values) or least_size(values) is None:
        return None
    return rule


def value_of(node: Any) -> Any:
    """Return the fake tensor or the number that a node makes."""
    return node.meta["val"]


def arrangements(node: Any, operators: Container[str] = _SAME) -> Iterator[fx.Node]:
    """Yield a node, and those that it is another arrangement of."""
    yield node
    while str(node.target) in operators:
        node = node.args[0]
        yield node


def arranged(node: Any) -> Iterator[fx.Node]:
    """Yield a node, and those that it is a view of. The whole is last."""
    return arrangements(node, ARRANGED)


def known_sources(rule: MatmulRule, operands: list[Any], saved: list[Any]) -> Sources | None:
    """Return the sources of a backward matmul's operands, or ``None`` if they are unknown."""
    if rule.sources:
        return rule.sources
    found = tuple(_source(list(arrangements(operand)), saved) for operand in operands)
    return found if found.count(None) == 1 else None


def _source(nodes: list[fx.Node], saved: list[Any]) -> int | None:
    exact = (k for node in nodes for k, other in enumerate(saved) if other is node)
    similar = (k for k, other in enumerate(saved) if not set(arrangements(other)).isdisjoint(nodes))
    return next(exact, next(similar, None))


def tangents_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the gradients that arrive at a step. The graph of a forward pass has none."""
    return [n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")]


def arguments_of(node: fx.Node) -> Any:
    """Return a node's arguments with fake tensors of concrete sizes in place of nodes."""
    return concrete(fx.node.map_arg(node.args, lambda read: read.meta.get("val")))


def flops_of(rule: MatmulRule | UnreachedRule, node: fx.Node) -> int:
    """Return the floating-point operations of a node, for the sizes at compile time."""
    return int(rule.flops(arguments_of(node), concrete(value_of(node))))


# A graph from Inductor's caches skips our passes. So its key must contain what they read besides
# the graph's code: the modules of its nodes, which give the matmuls their names, and the numbers
# that matmuls got in the joint graph. Graphs with these operators read tables of this process.
_NAMES = ("begin", "fp8_numbers", "matmul")
_UNCACHED = frozenset(f"lightning_unitscale.{name}.default" for name in _NAMES)


@functools.cache
def _sources() -> str:
    """Return a digest of this package's code, since another version may rewrite differently."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def identity_of(graph: fx.Graph) -> str | None:
    """Return what our passes read besides a graph's code; ``None`` if it must not be cached."""
    rounding = running_session()
    if rounding is not None and rounding.numerics:
        return None
    if any(str(node.target) in _UNCACHED for node in graph.nodes):
        return None
    session = SESSION.get() if compiles_frame() else None
    notes = [node.meta.get(MATMUL) for node in graph.nodes]
    if session is None:
        return f"{_sources()} {notes}" if any(notes) else ""
    if (number := number_of_key()) is not None:
        note_compiled(number)
    run = session.sites.run_of(current_node())
    root = "" if run is None else run.path
    paths = [path_of(node, session.sites, root) for node in graph.nodes]
    digest = hashlib.sha256(repr((root, paths, notes)).encode()).hexdigest()
    return f"{_sources()} {digest}"
