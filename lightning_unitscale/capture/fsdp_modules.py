"""Capture and plan modules whose parameters FSDP2 shards, as if they were not sharded.

FSDP gathers the parameters of a module in hooks around its call. Dynamo breaks the graph at each
hook, and captures no loop over such modules. So these hooks are disabled during capture, and the
graph calls them: before the first operation of their module and after the last one. FSDP still
gathers, frees and reduces. If tensor parallelism has split a module first, FSDP gathers its splits.

FSDP always gathers into the same ``Parameter``, whose storage is empty meanwhile.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from lightning_unitscale.capture.aliasing import memory_roots
from lightning_unitscale.capture.copy_graphs import is_checkpoint
from lightning_unitscale.capture.graph_nodes import (
    INPUT,
    INTERNAL,
    MODULE,
    NAME,
    is_float_tensor,
    requires_grad,
)
from lightning_unitscale.capture.graph_recorder import local_part
from lightning_unitscale.capture.passes import GraphPass, Phase, StepGraph
from lightning_unitscale.patching import shadowed

_FSDP = "torch.distributed.fsdp._fully_shard"
_MANAGED = "_is_fsdp_managed_module"  # FSDP's mark of sharded modules for Dynamo


@dataclass(frozen=True)
class ShardedPart:
    """Module whose parameters FSDP2 gathers together, with FSDP's hooks around its call."""

    path: str
    module: Any
    before: Callable[..., Any]
    after: Callable[..., Any]

    def enter(self, *tensors: Any) -> tuple[Any, ...]:
        """Gather the parameters, and return the module's inputs with FSDP's gradient hooks."""
        args, _ = self.before(self.module, tensors, {})
        return tuple(args)

    def leave(self, *tensors: Any) -> tuple[Any, ...]:
        """Free the gathered parameters, and return the module's outputs with FSDP's hooks."""
        return tuple(self.after(self.module, (), tensors))


@dataclass(frozen=True)
class _Slot:
    """Place of a parameter in a module: a shard, or the whole while it is gathered."""

    holder: dict[str, Any]
    name: str
    shard: nn.Parameter
    whole: nn.Parameter


class ShardedModule:
    """Module with parts that are sharded by ``fully_shard``."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_gathered = False  # True while all parameters are gathered
        self._slots: list[_Slot] | None = None
        self._owners: dict[str, ShardedPart] = {}

    @cached_property
    def parts(self) -> list[ShardedPart]:
        """Return the parts, outer ones first. They are known once the module is sharded."""
        return [
            ShardedPart(path, part, _hook(part._forward_pre_hooks), _hook(part._forward_hooks))
            for path, part in self.module.named_modules()
            if any(map(_is_of_fsdp, part._forward_pre_hooks.values()))
        ]

    @property
    def owners(self) -> dict[str, ShardedPart]:
        """Return the part that gathers each parameter, by path."""
        self._find_slots()
        return self._owners

    def parts_around(self, path: str) -> tuple[ShardedPart, ...]:
        """Return the parts that contain a module, or are it, outermost first."""
        return tuple(
            part
            for part in self.parts
            if not part.path or path == part.path or path.startswith(f"{part.path}.")
        )

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters. All ranks must enter this context together."""
        if self.is_gathered:
            yield
            return
        self._find_slots()
        for part in self.parts:
            part.module.unshard()
        self.is_gathered = True
        try:
            with self._without_hooks():
                yield
        finally:
            self.is_gathered = False
            self.shard()

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace shards by the gathered parameters, so that the module looks unsharded."""
        slots = self._find_slots()
        for slot in slots:
            slot.whole.requires_grad_(slot.shard.requires_grad)
            slot.holder[slot.name] = slot.whole
        try:
            with self._without_hooks():
                yield
        finally:
            for slot in slots:
                # FSDP leaves the parameters that the root has gathered where they are.
                is_gathered = local_part(slot.whole).untyped_storage().size() > 0
                if slot.holder[slot.name] is slot.whole and not is_gathered:
                    slot.holder[slot.name] = slot.shard

    def shard(self) -> None:
        """Free the gathered parameters."""
        for part in self.parts:
            part.module.reshard()

    def _find_slots(self) -> list[_Slot]:
        """Find the places of parameters. The first call gathers each once, on all ranks."""
        if self._slots is not None:
            return self._slots
        self.shard()
        slots: list[_Slot] = []
        holders = [(path, child._parameters) for path, child in self.module.named_modules()]
        for part in self.parts:
            shards = [dict(holder) for _, holder in holders]
            part.module.unshard()
            for (path, holder), before in zip(holders, shards, strict=True):
                for name, whole in holder.items():
                    shard = before[name]
                    if whole is not None and shard is not None and whole is not shard:
                        slots.append(_Slot(holder, name, shard, whole))
                        self._owners[f"{path}.{name}" if path else name] = part
            part.module.reshard()
        self._slots = slots
        return slots

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Disable FSDP's hooks, but still cast inputs and outputs."""
        with contextlib.ExitStack() as stack:
            # Dynamo does not guard on what it reads from modules that carry FSDP's mark.
            for module in self.module.modules():
                if vars(module).get(_MANAGED):
                    stack.enter_context(shadowed(module, **{_MANAGED: False}))
            for part in self.parts:
                policy = part.module._get_fsdp_state()._mp_policy
                dtype = policy.param_dtype if policy.cast_forward_inputs else None
                before = None if dtype is None else partial(_cast_inputs, dtype)
                dtype = policy.output_dtype
                after = None if dtype is None else partial(_cast_output, dtype)
                hooks = {
                    "_forward_pre_hooks": _replaced(part.module._forward_pre_hooks, before),
                    "_forward_hooks": _replaced(part.module._forward_hooks, after),
                }
                stack.enter_context(shadowed(part.module, **hooks))
            yield


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(_FSDP)


def _hook(hooks: dict[int, Any]) -> Callable[..., Any]:
    return next(filter(_is_of_fsdp, hooks.values()))


def _replaced(hooks: dict[int, Any], hook: Any) -> OrderedDict[int, Any]:
    """Return the hooks with FSDP's replaced by another one, or removed."""
    items = ((key, hook if _is_of_fsdp(own) else own) for key, own in hooks.items())
    return OrderedDict((key, own) for key, own in items if own is not None)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, *values: Any) -> Any:
    """Cast the positional and the keyword arguments of a module."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return tree_map(cast, values)


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    (cast,) = _cast_inputs(dtype, module, output)
    return cast


@dataclass
class _OperationRun:
    """A run of consecutive operations of a part."""

    part: ShardedPart
    nodes: list[fx.Node] = field(default_factory=list)


class GatherParameters(GraphPass):
    """Pass that makes FSDP gather parameters before they are read, and free them afterwards."""

    name = "gather parameters"
    phase = Phase.GATHER

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        owners = self._owners(graph.graph)
        _sink(graph.graph, owners)
        runs = self._runs(graph, owners)
        # Outer parts first: an inner run may read a value that an outer one returned.
        for run in runs:
            self._surround(graph.graph, run)
        counts = Counter(run.part.path for run in runs)
        return tuple(
            f"{path or 'the module itself'}: gathered {'once' if count == 1 else f'{count} times'}"
            for path, count in counts.items()
        )

    def _owners(self, graph: fx.Graph) -> dict[fx.Node, ShardedPart]:
        """Map each node that is a parameter, or a view of one, to its part."""
        by_path = self._sharded.owners
        roots = memory_roots(graph)
        owners: dict[fx.Node, ShardedPart] = {}
        for node in graph.nodes:
            # A gradient tap has its parameter's description. A unit may be 1.
            origin = node.meta.get(INPUT) or roots[node].meta.get(INPUT)
            sources = node.all_input_nodes if node.meta.get(INTERNAL) and NAME in node.meta else ()
            if origin is not None and origin.kind == "parameter" and origin.fqn in by_path:
                owners[node] = by_path[origin.fqn]
            elif (source := next((node for node in sources if node in owners), None)) is not None:
                owners[node] = owners[source]
        return owners

    def _runs(self, graph: StepGraph, owners: dict[fx.Node, ShardedPart]) -> list[_OperationRun]:
        runs: list[_OperationRun] = []
        running: list[_OperationRun] = []
        for node in graph.graph.nodes:
            if node.op in {"placeholder", "get_attr", "output"}:
                continue
            needed = self._needed(graph, node, owners)
            if needed is not None:
                pairs = zip(running, needed, strict=False)
                kept = len(list(takewhile(lambda pair: pair[0].part is pair[1], pairs)))
                del running[kept:]
                new = [_OperationRun(part) for part in needed[kept:]]
                runs += new
                running += new
            for run in running:
                run.nodes.append(node)
        return runs

    def _needed(
        self, graph: StepGraph, node: fx.Node, owners: dict[fx.Node, ShardedPart]
    ) -> tuple[ShardedPart, ...] | None:
        """Return the parts that must be gathered while a node runs, or ``None`` for any."""
        read = [owners[source] for source in node.all_input_nodes if source in owners]
        if is_checkpoint(node):
            # Its inputs stay gathered while it runs, and again while it reruns for the backward
            # pass.
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

    def _surround(self, graph: fx.Graph, run: _OperationRun) -> None:
        """Call FSDP's hooks before and after a run, on its inputs and outputs."""
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
        """Call a hook of a part with the values of nodes, and return its results."""
        # Dynamo keeps its compiled code, which must not keep the module alive.
        sharded, index = weakref.ref(self._sharded), self._sharded.parts.index(part)

        def call_hook(*values: Any) -> tuple[Any, ...]:
            owner = sharded()
            assert owner is not None, "a captured graph was called after its module was restored"
            return getattr(owner.parts[index], hook)(*values)

        called = point = graph.call_function(call_hook, tuple(nodes))
        called.meta[INTERNAL] = True
        values = {}
        for position, node in enumerate(nodes):
            with graph.inserting_after(point):
                point = values[node] = graph.call_function(operator.getitem, (called, position))
            point.meta.update(node.meta)
        return values


def _shared(several: Sequence[tuple[ShardedPart, ...]]) -> tuple[ShardedPart, ...]:
    """Return the common beginning of the sequences."""
    shared = several[0] if several else ()
    for parts in several[1:]:
        shared = tuple(a for a, b in zip(shared, parts, strict=False) if a is b)
    return shared


def _sink(graph: fx.Graph, owners: dict[fx.Node, ShardedPart]) -> None:
    """Move a pass's operations on a parameter from the start of a graph to its first reader."""
    # FSDP reduces the gradients of a part once its operations have had their backward pass.
    # Operations that ran before the part was entered come later.
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
    """Check whether a pass has put the node into the graph to measure a parameter."""
    return node.op == "call_function" and (INPUT in node.meta or NAME not in node.meta)


def _takes_gradient(node: fx.Node) -> bool:
    """Check whether a gradient of a part's input flows on to other operations."""
    if node.op == "placeholder":
        origin = node.meta.get(INPUT)
        return origin is not None and origin.kind == "input" and requires_grad(node)
    return node.op != "get_attr" and is_float_tensor(node) and requires_grad(node)
