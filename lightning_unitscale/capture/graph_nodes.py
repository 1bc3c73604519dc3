"""Read and change nodes of captured graphs: their names, tensors and arguments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.capture.breaks import written_name
from lightning_unitscale.capture.copy_graphs import MODULE as MODULE
from lightning_unitscale.capture.copy_graphs import NAME as NAME
from lightning_unitscale.capture.dynamo_capture import CapturedGraph

# Set on nodes that a pass inserted and that are not a tensor of the user's step.
INTERNAL = "internal"
# Set on placeholders of the captured graph: the ``GraphInput`` that describes each.
INPUT = "graph_input"
# Set on nodes inside a ``vmap`` or ``grad`` transform, where tensors are wrapped.
TRANSFORMED = "transformed"
# Set on nodes of a cut graph's part that receives or recomputes another part's tensor.
ELSEWHERE = "elsewhere"

# Names of the parts of one tensor that an attention reads.
ATTENTION = "scaled_dot_product_attention"
ATTENTION_ROLES = ("query", "key", "value")

Path = tuple[int | str, ...]  # position of an argument: ``(0,)``, ``("weight",)``, ``(0, 1)``

_ROOT = re.compile(r"^(L\[['\"]\w+['\"]\]|G\[['\"]\w+['\"]\]|self)\.?")
_LINE = re.compile(r'File "([^"]+)", line (\d+)(?:, in (\S+))?')
_FRAME = re.compile(r"@\d+")  # within a name if the operation is part of an expanded one
# Operations of an expanded attention stand below its name, which has a number of its own.
_NUMBER = re.compile(rf"_\d+$|(?<=\b{ATTENTION})_\d+(?=\.)")
_INDEX = re.compile(r"\[['\"]?([\w.\- ]+?)['\"]?\]")
# Parts of Dynamo's paths that name no module. It reads ``__dict__`` if a class has ``__getattr__``.
_NO_NAMES = frozenset({"", "_modules", "__self__", "__dict__"})


def module_path(node: fx.Node, roots: Mapping[str, str] | None = None) -> str:
    """Return the path of the module whose ``forward`` made the node, empty for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return (roots or {}).get("L['self']", "")
    path = str(next(reversed(stack.values()))[0])
    prefix = next((fqn for variable, fqn in (roots or {}).items() if path.startswith(variable)), "")
    path = f"{prefix}." + _INDEX.sub(r".\1", _ROOT.sub("", path))
    return ".".join(part for part in path.split(".") if part not in _NO_NAMES)


def line_of(node: fx.Node) -> tuple[str, str] | None:
    """Return the file and line of the code that made a node, if Dynamo has noted it."""
    file, line, _ = _made_at(node)
    return (file, line) if file else None


def function_of(node: fx.Node) -> str:
    """Return the name of the function whose code made a node, if Dynamo has noted it."""
    return written_name(_made_at(node)[2])


def _made_at(node: fx.Node) -> tuple[str, str, str]:
    found: list[tuple[str, str, str]] = _LINE.findall(node.meta.get("stack_trace") or "")
    return found[-1] if found else ("", "", "")


def is_seeded(node: fx.Node) -> bool:
    """Check whether a node of an aten graph draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def drop_unread_draws(graph: fx.Graph, names: Container[str]) -> None:
    """Remove the random operators with these names that nothing reads."""
    # FX keeps dead random operators, which it considers impure.
    for node in reversed(graph.nodes):
        if node.name in names and not node.users and is_seeded(node):
            graph.erase_node(node)


# Operators by which Dynamo (2.14) reads attributes of a tensor.
_ATTRIBUTES = {"numpy_T": "T", "matrix_H": "H"}
# Names of Dynamo's operations for ``.data = ...``: up to torch 2.13, and from 2.14 on.
DATA_WRITES = frozenset({"set", "shallow_copy_data"})


def op_name(node: fx.Node) -> str:
    """Return the operation's short name, the same for a function, a method and an operator."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "get_attr":
        name = "constant"
    else:
        name = getattr(node.target, "__name__", str(node.target))
    # Dynamo's own forms of methods of distributed tensors (torch 2.11).
    name = name.removeprefix("prim_").removeprefix("prim ")
    name = _ATTRIBUTES.get(name, name)
    return name.split(".")[0].strip("_") or name


def example_tensor(value: object) -> Tensor | None:
    """Return the example tensor of a node, or ``None`` if ``value`` is not such a node."""
    if not isinstance(value, fx.Node):
        return None
    example = value.meta.get("example_value")
    return example if isinstance(example, Tensor) else None


def is_float_tensor(value: object) -> bool:
    """Check whether ``value`` is a node that makes a real floating-point tensor."""
    tensor = example_tensor(value)
    return tensor is not None and tensor.is_floating_point()


def requires_grad(value: object) -> bool:
    """Check whether ``value`` is a node whose tensor takes part in the backward pass."""
    tensor = example_tensor(value)
    return tensor is not None and tensor.requires_grad


def tensor_name(node: fx.Node) -> str:
    """Return the name shown to users, stable across runs, recompilations and passes."""
    return str(node.meta.get(NAME, node.name))


def without_frame(name: str) -> str:
    """Return the name of a tensor without the number of its frame."""
    return _FRAME.sub("", name)


def without_number(name: str) -> str:
    """Return the name of a tensor without its number among those of its module and operation."""
    return _NUMBER.sub("", without_frame(name))


class Names:
    """Names of nodes, unique within a step and the same in every recompilation."""

    # A step may hold several graphs. Names are `module path.op`, then an ordinal within the graph.
    # If another frame has taken a name already, the frame's ordinal is added.

    def __init__(self) -> None:
        self._frames: dict[tuple[int, tuple[str, ...]], int] = {}
        self._contents: dict[tuple[Any, ...], int] = {}
        self._owner: dict[str, int] = {}
        # The paths of the module's parts, and by the keys that they have in Dynamo's stacks.
        self._paths: set[str] = set()
        self._modules: dict[str, str] = {}

    def assign(
        self,
        captured: CapturedGraph,
        graph_module: fx.GraphModule,
        module: nn.Module | None = None,
    ) -> None:
        """Write names into ``node.meta`` of ``graph_module``, a copy of a graph of ``module``."""
        places = [] if module is None else [*module.named_modules(remove_duplicate=False)]
        self._paths = {path for path, _ in places}
        self._modules = {str(id(child)): path for path, child in reversed(places)}
        roots = captured.roots()
        key = (captured.frame_id, tuple(roots.values()))
        # Dynamo restarts its frame numbers after a reset, for example by an export. So a frame is
        # also identified by its content.
        content = (
            tuple(roots.values()),
            tuple(graph_input.fqn for graph_input in captured.inputs if graph_input.fqn),
            tuple(op_name(node) for node in graph_module.graph.nodes if node.op != "get_attr"),
        )
        if key not in self._frames:
            self._frames[key] = self._contents.get(content, len(set(self._frames.values())))
        frame = self._frames[key]
        self._contents.setdefault(content, frame)
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        # An exported graph does not describe its inputs.
        for node, graph_input in zip(placeholders, captured.inputs, strict=False):
            node.meta[INPUT] = graph_input
        self._assign(graph_module, frame, roots, Counter())

    def _assign(
        self, graph_module: fx.GraphModule, frame: int, roots: Mapping[str, str], seen: Counter[str]
    ) -> None:
        depth = 0
        for node in graph_module.graph.nodes:
            if node.op == "output":
                continue
            kind = op_name(node)
            depth += ("increment_nesting" in kind) - ("decrement_nesting" in kind)
            if depth:
                node.meta[TRANSFORMED] = True
            if node.op == "placeholder":
                fqn = node.meta[INPUT].fqn if INPUT in node.meta else None
                # A parameter is one tensor however many graphs read it, so it has no ordinal.
                node.meta[NAME] = fqn or self._own(f"input.{_input_name(node)}", frame, seen)
                node.meta[MODULE] = fqn.rpartition(".")[0] if fqn else ""
                continue
            path = self._path(node, roots)
            node.meta[MODULE] = path
            base = f"{path}.{kind}" if path else kind
            node.meta[NAME] = self._own(base, frame, seen)
            if kind == "getitem" and (role := _attention_role(node)):
                node.meta[NAME] = self._own(f"{path}.{role}" if path else role, frame, seen)
            nested = (
                getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
            )
            if isinstance(nested, fx.GraphModule):
                self._assign(nested, frame, roots, seen)

    def _path(self, node: fx.Node, roots: Mapping[str, str]) -> str:
        """Return the path of the module whose ``forward`` made the node, empty for the root."""
        path = module_path(node, roots)
        stack = node.meta.get("nn_module_stack")
        if not stack or path in self._paths:
            return path
        # After a step has read ``self.trainer``, Dynamo knows the module as an attribute of
        # Lightning's strategy.
        return self._modules.get(str(next(reversed(stack))).partition("@")[0], path)

    def _own(self, base: str, frame: int, seen: Counter[str]) -> str:
        name = unique_name(base, seen)
        if self._owner.setdefault(name, frame) != frame:
            name = f"{name}@{frame}"
        return name


def _attention_role(node: fx.Node) -> str | None:
    """Return the node's role in an attention that reads it or a view, as part of one tensor."""
    for user in node.users:
        if op_name(user) == ATTENTION:
            arguments = [*zip(ATTENTION_ROLES, user.args, strict=False), *user.kwargs.items()]
            return next((role for role, value in arguments if value is node), None)
        if is_whole_view(user) and (role := _attention_role(user)):
            return role
    return None


def replace_other_uses(node: fx.Node, new: fx.Node) -> None:
    """Let every reader of ``node`` read ``new`` instead, except ``new`` itself."""
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def argument_paths(node: fx.Node) -> Iterator[Path]:
    """Yield the positions of a node's arguments that are nodes."""
    pending: list[tuple[Path, Any]] = [((i,), item) for i, item in enumerate(node.args)]
    pending += [((name,), item) for name, item in node.kwargs.items()]
    for path, value in pending:
        if isinstance(value, fx.Node):
            yield path
        elif isinstance(value, (list, tuple)):
            pending += [((*path, i), item) for i, item in enumerate(value)]


def argument_at(node: fx.Node, path: Path) -> Any:
    """Return the argument of a node at a path, as :func:`argument_paths` gives them."""
    return value_at(node.args, node.kwargs, path)


def value_at(args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> Any:
    """Return the argument of a call at a path."""
    value: Any = args if isinstance(path[0], int) else kwargs
    for part in path:
        value = value[part]
    return value


def float_arguments(node: fx.Node) -> Iterator[tuple[Path, fx.Node]]:
    """Yield the float tensors among a node's arguments, with their paths."""
    for path in argument_paths(node):
        value = argument_at(node, path)
        if is_float_tensor(value):
            yield path, value


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors in a nested value."""
    if isinstance(values, Tensor):
        return [values]
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def returned_loss(result: Any) -> Any:
    """Return the loss of a training step's result, which is a tensor or a dictionary."""
    return result.get("loss") if isinstance(result, dict) else result


def call(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function or a method by its name, and return the result."""
    if callable(target):
        return target(*args, **kwargs)
    return getattr(args[0], target)(*args[1:], **kwargs)


def changed_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], path: Path, new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another one at a path."""
    changed_args, changed_kwargs = list(args), dict(kwargs)
    holder: Any = changed_args if isinstance(path[0], int) else changed_kwargs
    holder[path[0]] = _replaced(holder[path[0]], path[1:], new)
    return tuple(changed_args), changed_kwargs


def _replaced(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    items: Any = list(value)
    items[path[0]] = _replaced(items[path[0]], path[1:], new)
    return type(value)(items) if isinstance(value, (list, tuple)) else items


def _input_name(node: fx.Node) -> str:
    name = re.sub(r"^[lLgG]_+|_+$", "", str(node.target))
    return re.sub(r"_+", "_", name) or "tensor"


def unique_name(base: str, seen: Counter[str]) -> str:
    """Return a name with an ordinal if another one in ``seen`` is equal, and count it there."""
    name = base
    while name in seen:
        # An input's name may equal the second ordinal of another name.
        name = f"{base}_{seen[base]}"
        seen[base] += 1
    seen[name] += 1
    return name


def first_operation(graph: fx.Graph) -> fx.Node:
    """Return the first node that is not an input."""
    return next(node for node in graph.nodes if node.op != "placeholder")


# Operations whose result has exactly the elements of their argument.
WHOLE_VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "unsqueeze",
     "squeeze", "t", "mT", "T", "view_as", "reshape_as", "clone", "detach", "swapaxes", "swapdims",
     "movedim", "moveaxis", "ravel", "adjoint", "alias"}
)  # fmt: skip


def is_whole_view(node: fx.Node) -> bool:
    """Check whether the node only rearranges one tensor, and so has its statistics."""
    return node.op in {"call_function", "call_method"} and op_name(node) in WHOLE_VIEWS


def is_same_graph(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Check whether two graphs of one step have the same operations on the same tensors, by name.

    Dynamo recaptures code when one of its guards fails. Some fail at every call: a class that a
    step defines while it runs is another class each time.
    """
    if len(first.graph.nodes) != len(second.graph.nodes):
        return False
    pairs = dict(zip(second.graph.nodes, first.graph.nodes, strict=True))
    return all(
        _described(node) == _described(other)
        and fx.map_arg((other.args, other.kwargs), pairs.__getitem__) == (node.args, node.kwargs)
        and (node.op != "get_attr" or _has_same_value(first, second, str(node.target), other))
        for other, node in pairs.items()
    )


def _described(node: fx.Node) -> tuple[Any, ...]:
    """Return everything about a node, besides its arguments, that a decision may depend on."""
    origin, tensor = node.meta.get(INPUT), example_tensor(node)
    return (
        node.op,
        None if node.op in {"placeholder", "get_attr"} else node.target,
        None if node.op == "output" else tensor_name(node),
        None if origin is None else (origin.kind, origin.fqn),
        # Shapes are compared as text, since comparing symbolic sizes would add guards.
        tensor if tensor is None else (str(tensor.shape), tensor.dtype, tensor.requires_grad),
    )


def _has_same_value(
    first: fx.GraphModule, second: fx.GraphModule, target: str, other: fx.Node
) -> bool:
    values = (attrgetter(target)(first), attrgetter(str(other.target))(second))
    if all(isinstance(value, fx.GraphModule) for value in values):
        return is_same_graph(*values)
    if all(isinstance(value, Tensor) for value in values):
        return torch.equal(*values)
    return bool(values[0] is values[1])
