"""Copy Dynamo's graphs, add inputs to them, and run their operators without numbers."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._dynamo.source import GlobalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import tree_map

from lightning_unitscale.functional.rules import hint_of

# Keys of a node's meta: path of the module whose ``forward`` made the node, and its tensor's name.
MODULE = "module_path"
NAME = "tensor_name"

_IN_NUMBERS: WeakKeyDictionary[FakeTensorMode, FakeTensorMode] = WeakKeyDictionary()


def rename_node(node: fx.Node, name: str) -> None:
    """Rename a node, with a suffix if another node has the name."""
    node._rename(name)


def copy_graph_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph module for rewriting: nodes, metadata and nested graphs, but not tensors."""
    # Its code is written when it first runs, since most copies are rewritten or copied again.
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        if node.target is operator.imatmul:
            # Tensors have no in-place matmul: ``x @= w`` makes a new tensor. FX 2.13 writes it out
            # as a statement that rebinds ``x`` for its other readers too.
            copies[node].target = operator.matmul
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    copy = _LazyGraphModule(graph_module, graph)
    copy.meta = dict(graph_module.meta)
    for node in graph.find_nodes(op="get_attr"):
        nested = getattr(graph_module, node.target, None)
        if isinstance(nested, fx.GraphModule):
            setattr(copy, node.target, copy_graph_module(nested))
    return copy


def compiled_forward(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """Return the function of a rewritten graph, as code."""
    graph_module.recompile()
    _LazyGraphModule.force_recompile(graph_module)
    forward: Any = graph_module.forward
    # Without this, all matmuls of a graph would have only the name of the step.
    start = getattr(graph_module, "_prologue_start", None)
    if start is not None:
        code = forward.__func__.__code__
        names = tuple(
            (str(node.meta.get(MODULE, "")), str(node.meta.get(NAME, "")))
            for node in graph_module.graph.nodes
        )
        LINES[id(code)] = _Lines(names, graph_module._lineno_map or {}, start)
        weakref.finalize(code, LINES.pop, id(code), None).atexit = False
    return cast(Callable[..., Any], forward)


class _Lines(NamedTuple):
    """Module and result of each line of a graph's code."""

    names: tuple[tuple[str, str], ...]  # each node's module path and tensor name
    nodes: Mapping[int, int | None]  # node of each line of the body, by index
    start: int  # line before the body's first


LINES: dict[int, _Lines] = {}  # keyed by the id of the code of a graph's ``forward``


def names_of_line(frame: FrameType) -> tuple[str, str] | None:
    """Return the module whose operation a frame of a graph's code runs, and the result's name."""
    lines = LINES.get(id(frame.f_code))
    if lines is None:
        return None
    node = lines.nodes.get(frame.f_lineno - lines.start)
    return ("", "") if node is None else lines.names[node]


def add_placeholder(
    graph: fx.Graph, name: str, example: Tensor, *, nested: bool = False
) -> fx.Node:
    """Append an input of our own after the graph's inputs."""
    # AOTAutograd refuses an input without a source if the others have one, since it builds its
    # aliasing guards from them. So ours gets the source of a global without a guard.
    placeholders = graph.find_nodes(op="placeholder")
    first = next(iter(graph.nodes))
    with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(first):
        node = graph.placeholder(name)
    if not nested:
        node._dynamo_source = GlobalSource(name)
    node.meta["example_value"] = example
    return node


def fake_like(graph: fx.Graph, tensor: Tensor) -> Tensor:
    """Return ``tensor`` as a fake tensor of the graph's fake mode, or itself without one."""
    mode: Any = fake_mode_of(graph)
    return tensor if isinstance(mode, contextlib.nullcontext) else mode.from_tensor(tensor)


def fake_mode_of(graph: fx.Graph) -> contextlib.AbstractContextManager[Any]:
    """Return the fake mode in which the graph's example values can be combined."""
    for node in graph.nodes:
        mode = getattr(node.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            context: contextlib.AbstractContextManager[Any] = mode
            return context
    return contextlib.nullcontext()


def stand_ins(mode: Any, arguments: list[fx.Node]) -> tuple[Any, dict[fx.Node, Any]]:
    """Return stand-ins for arguments, with their own memory, and the fake mode to run them in."""
    # Symbolic sizes become the numbers of the capture where these are known, since an operator
    # takes up to a hundred times as long with symbols.
    if mode not in _IN_NUMBERS:  # creating one is slow
        _IN_NUMBERS[mode] = FakeTensorMode(allow_non_fake_inputs=mode.allow_non_fake_inputs)
    in_numbers = _IN_NUMBERS[mode]
    examples = {node: node.meta.get("example_value") for node in arguments}
    try:
        return in_numbers, _made(in_numbers, examples, _known_number)
    except LookupError:
        return mode, _made(mode, examples, lambda symbol: symbol)


def _known_number(value: Any) -> Any:
    number = hint_of(value)
    if number is None and value is not None:
        raise LookupError(f"{value} depends on the values of a tensor")
    return number


def _made(
    mode: Any, examples: Mapping[fx.Node, Any], number: Callable[[Any], Any]
) -> dict[fx.Node, Any]:
    def stand_in(example: Any) -> Any:
        if not isinstance(example, Tensor):
            return number(example)
        if example.layout is not torch.strided or example.is_nested:
            if example.fake_mode is not mode:  # type: ignore[attr-defined]
                raise LookupError("only its own mode has such a tensor")
            return example.detach()
        size, stride = map(number, example.size()), map(number, example.stride())
        options: Any = {"dtype": example.dtype, "device": example.device}
        return torch.empty_strided(tuple(size), tuple(stride), **options)

    with mode:
        return {node: tree_map(stand_in, example) for node, example in examples.items()}


def is_checkpoint(node: fx.Node) -> bool:
    """Check whether the node is a region of ``torch.utils.checkpoint``."""
    return (
        node.op == "call_function"
        and node.target is torch.ops.higher_order.tag_activation_checkpoint
    )


def is_higher_order(node: fx.Node) -> bool:
    """Check whether the node is a control-flow or similar operator with graphs as arguments."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def autocast_dtypes(graph: fx.Graph) -> dict[fx.Node, torch.dtype]:
    """Return autocast's type for each node that runs under autocast around or in the graph."""
    states: dict[fx.Node, torch.dtype] = {}
    entered: dict[fx.Node, tuple[str, torch.dtype, bool]] = {}
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._enter_autocast:
            device, dtype, enabled = (*node.args, None, None, True)[:3]
            dtype = dtype or torch.get_autocast_dtype(str(device))
            entered[node] = (str(device), dtype, bool(enabled))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            entered.pop(node.args[0], None)
        else:
            example = node.meta.get("example_value")
            device_type = example.device.type if isinstance(example, Tensor) else "cpu"
            inner = [state for state in entered.values() if state[0] == device_type]
            if inner:
                enabled, dtype = inner[-1][2], inner[-1][1]
            elif not torch.amp.is_autocast_available(device_type):
                continue
            else:
                enabled = torch.is_autocast_enabled(device_type)
                dtype = torch.get_autocast_dtype(device_type)
            if enabled:
                states[node] = dtype
    return states
