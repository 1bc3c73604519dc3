"""The pass that has a captured graph call FSDP's hooks, around the operations of their modules."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from lightning_unitscale.capture.sharded import ShardedModule, ShardedPart
from lightning_unitscale.dynamo.graphs import is_checkpoint
from lightning_unitscale.graph.aliasing import memory_roots
from lightning_unitscale.graph.nodes import (
    INPUT,
    INTERNAL,
    MODULE,
    NAME,
    is_float_tensor,
    requires_grad,
)
from lightning_unitscale.graph.passes import GraphPass, Phase, StepGraph

_Parts = tuple[ShardedPart, ...]


@dataclass
class _Run:
    """Consecutive operations of a part."""

    part: ShardedPart
    nodes: list[fx.Node] = field(default_factory=list)


class GatherParameters(GraphPass):
    """Has FSDP gather parameters before they are read, and free them after that."""

    name = "gather parameters"
    phase = Phase.GATHER

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        owners = self._owners(graph.graph)
        _sink(graph.graph, owners)
        runs = self._runs(graph, owners)
        # The outer ones first: what an inner run reads may have come in by an outer one.
        for run in runs:
            self._surround(graph.graph, run)
        counts = Counter(run.part.path for run in runs)
        return tuple(
            f"{path or 'the module itself'}: gathered {'once' if count == 1 else f'{count} times'}"
            for path, count in counts.items()
        )

    def _owners(self, graph: fx.Graph) -> dict[fx.Node, ShardedPart]:
        """The part whose parameter each node is, or is a view of."""
        by_path = self._sharded.owners
        roots = memory_roots(graph)
        owners: dict[fx.Node, ShardedPart] = {}
        for node in graph.nodes:
            # What taps a gradient has its parameter's description, and a unit may be 1.
            origin = node.meta.get(INPUT) or roots[node].meta.get(INPUT)
            sources = node.all_input_nodes if node.meta.get(INTERNAL) and NAME in node.meta else ()
            if origin is not None and origin.kind == "parameter" and origin.fqn in by_path:
                owners[node] = by_path[origin.fqn]
            elif (source := next((node for node in sources if node in owners), None)) is not None:
                owners[node] = owners[source]
        return owners

    def _runs(self, graph: StepGraph, owners: dict[fx.Node, ShardedPart]) -> list[_Run]:
        runs: list[_Run] = []
        running: list[_Run] = []
        for node in graph.graph.nodes:
            if node.op in {"placeholder", "get_attr", "output"}:
                continue
            needed = self._needed(graph, node, owners)
            if needed is not None:
                kept = 0
                while kept < min(len(running), len(needed)):
                    if running[kept].part is not needed[kept]:
                        break
                    kept += 1
                del running[kept:]
                new = [_Run(part) for part in needed[kept:]]
                runs += new
                running += new
            for run in running:
                run.nodes.append(node)
        return runs

    def _needed(
        self, graph: StepGraph, node: fx.Node, owners: dict[fx.Node, ShardedPart]
    ) -> _Parts | None:
        """The parts that are to be gathered while a node runs; ``None`` for whichever are."""
        read = [owners[source] for source in node.all_input_nodes if source in owners]
        if is_checkpoint(node):
            # What it reads stays gathered while it runs, and runs again for the backward pass.
            body = getattr(graph.graph_module, str(node.args[0].target))  # type: ignore[union-attr]
            paths = [
                inner.meta[MODULE]
                for inner in body.graph.nodes
                if inner.op != "placeholder" and MODULE in inner.meta
            ]
            around = _shared([self._sharded.parts_around(path) for path in paths])
        elif NAME in node.meta and not node.meta.get(INTERNAL):
            around = self._sharded.parts_around(node.meta.get(MODULE, ""))
        elif not read:
            return None
        else:
            around = ()
        needed = dict.fromkeys(around)
        for part in read:
            needed |= dict.fromkeys(self._sharded.parts_around(part.path))
        return tuple(sorted(needed, key=self._sharded.parts.index))

    def _surround(self, graph: fx.Graph, run: _Run) -> None:
        """Have FSDP's hooks called before and after a run, on what it reads and makes."""
        inside = set(run.nodes)
        read = dict.fromkeys(
            source
            for node in run.nodes
            for source in node.all_input_nodes
            if source not in inside and _takes_gradient(source)
        )
        with graph.inserting_before(run.nodes[0]):
            came_in = self._call(graph, run.part, "enter", list(read))
        for node in run.nodes:
            for source, value in came_in.items():
                node.replace_input_with(source, value)
        outside = {
            node: users
            for node in run.nodes
            if (users := [user for user in node.users if user not in inside])
        }
        with graph.inserting_after(run.nodes[-1]):
            came_out = self._call(graph, run.part, "leave", list(outside))
        for node, users in outside.items():
            for user in users:
                user.replace_input_with(node, came_out[node])

    def _call(
        self, graph: fx.Graph, part: ShardedPart, hook: str, nodes: Sequence[fx.Node]
    ) -> dict[fx.Node, fx.Node]:
        """Call a hook of a part with the values of nodes; returns what it makes of each."""
        # Dynamo keeps what it has compiled, and must not keep the module by it.
        sharded, index = weakref.ref(self._sharded), self._sharded.parts.index(part)

        def call_hook(*values: Any) -> tuple[Any, ...]:
            owner = sharded()
            assert owner is not None, "a captured graph was called after its module was restored"
            made: tuple[Any, ...] = getattr(owner.parts[index], hook)(*values)
            return made

        called = point = graph.call_function(call_hook, tuple(nodes))
        called.meta[INTERNAL] = True
        values = {}
        for position, node in enumerate(nodes):
            with graph.inserting_after(point):
                point = values[node] = graph.call_function(operator.getitem, (called, position))
            point.meta.update(node.meta)
        return values


def _shared(several: Sequence[_Parts]) -> _Parts:
    """What all begin with."""
    shared = several[0] if several else ()
    for parts in several[1:]:
        shared = tuple(a for a, b in zip(shared, parts, strict=False) if a is b)
    return shared


def _sink(graph: fx.Graph, owners: dict[fx.Node, ShardedPart]) -> None:
    """Move what passes do to a parameter at the start of a graph to where the parameter is read.

    FSDP takes the gradients of a part once its operations have had their backward pass, and those
    that ran before it was entered come later.
    """
    for parameter in graph.find_nodes(op="placeholder"):
        if parameter not in owners:
            continue
        added = [user for user in parameter.users if _is_added(user)]
        readers = [user for node in (parameter, *added) for user in node.users]
        reader = min((user for user in readers if not _is_added(user)), default=None)
        if reader is None or reader.op == "output":
            continue
        for node in sorted(added):
            if node < reader:
                reader.prepend(node)


def _is_added(node: fx.Node) -> bool:
    """Whether a pass has put the node into the graph to measure a parameter."""
    return node.op == "call_function" and (INPUT in node.meta or NAME not in node.meta)


def _takes_gradient(node: fx.Node) -> bool:
    """Whether a gradient of what a part reads goes on from there."""
    if node.op == "placeholder":
        origin = node.meta.get(INPUT)
        return origin is not None and origin.kind == "input" and requires_grad(node)
    return node.op != "get_attr" and is_float_tensor(node) and requires_grad(node)
