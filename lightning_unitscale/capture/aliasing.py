"""Find which nodes of a captured graph share memory, and which write into it.

The effects of an operation are found by running it on stand-ins, which have no numbers. Its name is
not enough: ``.data``, ``einsum("ij->ji")`` and ``.float()`` may return the memory of their input,
and ``numpy()[:] *= 2`` writes into it.

A probe or a gauge replaces a tensor by a new one. An in-place operation on the old one would then
be lost, or refused by autograd. So :func:`make_out_of_place` rewrites it first, where the result is
the same: for a tensor that the graph made, that owns its memory, and that has no view.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from networkx.utils import UnionFind
from torch import Tensor, fx

from lightning_unitscale.capture.aot_backend import Writes
from lightning_unitscale.capture.copy_graphs import (
    fake_mode_of,
    is_higher_order,
    stand_ins,
)
from lightning_unitscale.capture.graph_nodes import (
    Path,
    argument_at,
    argument_paths,
    call,
    example_tensor,
    tensor_name,
    tensors_in,
)

_OWN_PACKAGE = __name__.partition(".")[0]
# Key of ``node.meta``: the effects of a node, and the operation that they belong to.
_EFFECTS = "effects"

# Their out-of-place forms compute something else. ``Tensor.bernoulli`` reads its probabilities from
# the values that ``bernoulli_`` overwrites. ELU and its kin compute in-place gradients from the
# result, whose last bits differ from those computed from the input.
_NO_COUNTERPART = {"bernoulli", "elu", "celu", "selu"}


@dataclass(frozen=True)
class Effects:
    """Effects of an operation on the memory of its arguments, which are given by their paths."""

    writes: tuple[Path, ...] = ()
    views: tuple[Path, ...] = ()  # arguments that the result is a view of
    same: Path | None = None  # argument that is returned as the same tensor, not even as a view
    is_random: bool = False  # draws from torch's generators


_NOTHING = Effects()


def written_arguments(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that the node writes into."""
    return _arguments(node, _effects(node).writes)


def is_random(node: fx.Node) -> bool:
    """Check whether the node draws random numbers, if it can run by itself without data."""
    return _effects(node).is_random


def is_view(node: fx.Node) -> bool:
    """Check whether a node returns a view of an argument."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(value.alias_info is not None for value in schema.returns)


def same_tensor(node: fx.Node) -> fx.Node | None:
    """Return the argument that the operation returns as the same tensor, such as ``x.float()``."""
    # With a probe between the two, autograd would add up the gradient of that one tensor in another
    # order, which changes its last bits.
    effects = _effects(node)
    if effects.same is None or effects.writes:
        return None
    return argument_at(node, effects.same)


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node to the input that its memory came from, or else to the node that made it."""
    groups = UnionFind(graph.nodes)
    inputs: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if _is_input(node):
            # One storage may be the memory of several inputs, as several views of it.
            keys: list[Any] = [*_storages(node.meta.get("example_value"))]
            keys += [node.target] if node.op == "get_attr" else []
            for key in keys:
                groups.union(node, inputs.setdefault(key, node))
        groups.union(node, *_arguments(node, _effects(node).views))
    order = {node: (not _is_input(node), index) for index, node in enumerate(graph.nodes)}
    roots: dict[fx.Node, fx.Node] = {}
    for group in groups.to_sets():
        roots |= dict.fromkeys(group, min(group, key=order.__getitem__))
    return {node: roots[node] for node in graph.nodes}


def aliased_by_mutation(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that share memory with a tensor that the graph still writes into."""
    roots = memory_roots(graph)
    mutated = {roots[target] for node in graph.nodes for target in written_arguments(node)}
    return {node for node, root in roots.items() if root in mutated}


def returned_alone(graph: fx.Graph) -> set[fx.Node]:
    """Return the returned nodes that own their memory and share it with no other returned node."""
    # After a graph break the step may write into such a tensor without effect on any other.
    roots = memory_roots(graph)
    returned = graph.output_node().all_input_nodes
    looking = Counter(roots[node] for node in returned)
    alone: set[fx.Node] = set()
    for node in returned:
        if looking[roots[node]] > 1 or _is_input(roots[node]):
            continue
        handed: fx.Node | None = node
        while handed is not None:
            alone.add(handed)
            handed = same_tensor(handed)
    return alone


def find_effects(graph: fx.Graph) -> None:
    """Find the effects of every node. The example values must still be those of the capture."""
    for node in graph.nodes:
        _effects(node)


def make_out_of_place(graph: fx.Graph) -> tuple[str, ...]:
    """Rewrite in-place operations out of place where possible, and return a report of them."""
    changed, kept = 0, []
    find_effects(graph)
    for node in list(graph.nodes):
        if not written_arguments(node):
            continue
        target = _returned_argument(node)
        replacement = _functional(node)
        if (
            target is None
            or replacement is None
            or not _owns_memory(target, [user for user in target.users if user < node])
            or not _same_result(graph, node, target, replacement)
        ):
            kept.append(tensor_name(node))
            continue
        function, args, kwargs = replacement
        node.op = "call_function" if callable(function) else "call_method"
        node.target = function
        node.args, node.kwargs = args, kwargs
        node.meta[_EFFECTS] = (node.op, node.target, _NOTHING)
        # The old tensor and the result were one object, so later readers must see the new value.
        for user in list(target.users):
            if user > node:
                user.replace_input_with(target, node)
        changed += 1
    lines = [f"{changed} in-place operations made out of place"] if changed else []
    if kept:
        lines.append(f"{len(kept)} in-place operations kept: {', '.join(kept[:4])}")
    return tuple(lines)


def _returned_argument(node: fx.Node) -> fx.Node | None:
    """Return the one tensor that the node writes into and returns, as ``y.add_(x)`` does."""
    effects = _effects(node)
    written = _arguments(node, effects.writes)
    if effects.same is None or written != (argument_at(node, effects.same),):
        return None
    return written[0]


def _owns_memory(node: fx.Node, earlier: Sequence[fx.Node]) -> bool:
    """Check that the graph made this tensor, and that no earlier reader is a view of it."""
    is_fresh = node.op in {"call_function", "call_method"} and not _effects(node).views
    views = (_arguments(user, _effects(user).views) for user in earlier)
    return is_fresh and not any(node in viewed for viewed in views)


def _functional(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """Return the function or method that may compute the same out of place, by its name."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target and name.startswith("i"):
        function = getattr(operator, name[1:], None) or getattr(operator, f"{name[1:]}_", None)
        return None if function is None else (function, node.args, dict(node.kwargs))
    if name.rstrip("_") in _NO_COUNTERPART:
        return None
    position = _inplace_flag(node)
    if position is not None:
        args = tuple(False if i == position else arg for i, arg in enumerate(node.args))
        kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return node.target, args, kwargs
    if not name.endswith("_") or name.endswith("__"):
        return None
    if node.op == "call_method" and hasattr(Tensor, name[:-1]):
        return name[:-1], node.args, dict(node.kwargs)
    if node.op == "call_function" and hasattr(torch, name[:-1]):
        return getattr(torch, name[:-1]), node.args, dict(node.kwargs)
    return None


def _same_result(
    graph: fx.Graph, node: fx.Node, target: fx.Node, replacement: tuple[Any, tuple[Any, ...], Any]
) -> bool:
    """Check that the out-of-place form makes a new tensor of the same type, shape and layout."""
    # An in-place operation keeps the type of its target where the out-of-place one promotes.
    before, after = example_tensor(target), example_tensor(node)
    if before is None or after is None:
        return False
    function, args, kwargs = replacement
    values = fx.map_arg(args, lambda arg: arg.meta.get("example_value"))
    options = fx.map_arg(kwargs, lambda arg: arg.meta.get("example_value"))
    try:
        with fake_mode_of(graph), torch.no_grad():
            result = call(function, values, options)
    except Exception:
        return False
    return (
        isinstance(result, Tensor)
        and result.dtype == before.dtype
        and result.shape == before.shape
        and result.stride() == before.stride()
        and result.untyped_storage() is not before.untyped_storage()
    )


def _inplace_flag(node: fx.Node) -> int | None:
    """Return the position of the parameter ``inplace`` of the called function, if it is set."""
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None  # a method, or a function written in C
    if "inplace" not in names:
        return None
    position = names.index("inplace")
    value = node.args[position] if len(node.args) > position else node.kwargs.get("inplace")
    return position if value is True else None


def _effects(node: fx.Node) -> Effects:
    if node.op not in {"call_function", "call_method"}:
        return _NOTHING
    effects: Effects
    *operation, effects = node.meta.get(_EFFECTS, (None, None, _NOTHING))
    if operation != [node.op, node.target]:
        effects = _find(node)
        node.meta[_EFFECTS] = (node.op, node.target, effects)
    return effects


def _find(node: fx.Node) -> Effects:
    if (getattr(node.target, "__module__", None) or "").startswith(_OWN_PACKAGE):
        # Nodes that a pass inserts return a new tensor, and never write.
        return _NOTHING
    paths = [
        path
        for path in argument_paths(node)
        if tensors_in(argument_at(node, path).meta.get("example_value"))
    ]
    if not paths and example_tensor(node) is None:
        # Do not run it: it may enter autocast, or turn gradients off.
        return _NOTHING
    if is_higher_order(node):
        return _seen_in_examples(node, paths, _writes_of_body(node))
    if node.target is operator.getitem and example_tensor(node.args[0]) is None:
        # Running it would take a stand-in for every other item too.
        return _seen_in_examples(node, paths, ())
    mode = fake_mode_of(node.graph)
    try:
        # On real examples it would draw random numbers.
        if not isinstance(mode, contextlib.nullcontext):
            return _seen_by_running(node, paths, mode)
    except Exception:
        # The operation cannot run by itself.
        pass
    return _seen_in_examples(node, paths, ())


def _seen_by_running(node: fx.Node, paths: list[Path], mode: Any) -> Effects:
    mode, by_node = stand_ins(mode, node.all_input_nodes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        shape_env = mode.shape_env
        if shape_env is not None:
            stack.enter_context(shape_env.ignore_fresh_unbacked_symbols())
            # The capture has the guards it needs. C++ kernels would fix symbolic sizes.
            stack.enter_context(shape_env.suppress_guards())
        stack.enter_context(torch.no_grad())
        args, kwargs = fx.map_arg((node.args, node.kwargs), by_node.__getitem__)
        values = {path: by_node[argument_at(node, path)] for path in paths}
        before = {path: _memory(value) for path, value in values.items()}
        writes = stack.enter_context(Writes())
        result = call(node.target, args, kwargs)
    return Effects(
        tuple(
            path
            for path, value in values.items()
            # ``set_``, into which Dynamo turns ``.data = ...``, gives it other memory.
            if _is_written(value, writes) or _memory(value) != before[path]
        ),
        tuple(_sharing(result, values.items())),
        next((path for path, value in values.items() if result is value), None),
        writes.has_drawn,
    )


def _is_written(value: Any, writes: Writes) -> bool:
    # ``requires_grad_()`` calls no operator, and a stand-in has no gradient.
    asks = any(value.requires_grad for value in tensors_in(value))
    return asks or not writes.storages.isdisjoint(_storages(value))


def _seen_in_examples(node: fx.Node, paths: list[Path], writes: tuple[Path, ...]) -> Effects:
    """Read the effects off the captured tensors, for an operation that cannot run by itself."""
    result = node.meta.get("example_value")
    values = {path: argument_at(node, path).meta.get("example_value") for path in paths}
    same = (path for path, value in values.items() if isinstance(value, Tensor) and value is result)
    return Effects(writes, tuple(_sharing(result, values.items())), next(same, None))


def _writes_of_body(node: fx.Node) -> tuple[Path, ...]:
    """Return the arguments that the body of a checkpoint or an autograd function writes into."""
    # An autograd function's bodies are its forward and its backward pass.
    bodies: list[fx.GraphModule] = []
    for arg in node.args:
        target = str(arg.target) if isinstance(arg, fx.Node) and arg.op == "get_attr" else ""
        body = getattr(node.graph.owning_module, target, None)
        if not isinstance(body, fx.GraphModule):
            break
        bodies.append(body)
    if not bodies:
        return ()
    aliased = aliased_by_mutation(bodies[0].graph)
    inner = enumerate(bodies[0].graph.find_nodes(op="placeholder"), start=len(bodies))
    return tuple((index,) for index, placeholder in inner if placeholder in aliased)


def _sharing(result: Any, values: Iterable[tuple[Path, Any]]) -> Iterator[Path]:
    """Yield the paths of the values that share memory with a result."""
    storages = set(_storages(result))
    for path, value in values:
        if storages.intersection(_storages(value)):
            yield path


def _storages(value: Any) -> Iterator[Any]:
    for tensor in tensors_in(value):
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue  # sparse, or within a functorch transform


def _memory(value: Any) -> list[int]:
    return [storage._cdata for storage in _storages(value)]


def _arguments(node: fx.Node, paths: Iterable[Path]) -> tuple[fx.Node, ...]:
    return tuple(dict.fromkeys(argument_at(node, path) for path in paths))


def _is_input(node: fx.Node) -> bool:
    return node.op in {"placeholder", "get_attr"}
