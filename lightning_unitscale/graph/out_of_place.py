"""Turn in-place operations into out-of-place ones where nobody can tell the difference.

A probe or a gauge gives a tensor a new identity. An in-place operation on the old one would then be
lost or refused by autograd, so it is rewritten first: only for a tensor that the graph itself made,
that owns its memory, and that no view looks into.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.graph.capture import fake_mode_of
from lightning_unitscale.graph.nodes import example_tensor, tensor_name

_OWN_PACKAGE = __name__.partition(".")[0]

# Key of ``node.meta`` of an operation that was made out of place: its op and target before.
WRITTEN_AS = "written_as"

_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
    operator.ilshift: operator.lshift,
    operator.irshift: operator.rshift,
}

# Functions with an ``inplace`` flag, and the position of that flag.
_INPLACE_FLAG = {
    F.relu: 1,
    F.relu6: 1,
    F.elu: 2,
    F.selu: 1,
    F.celu: 2,
    F.leaky_relu: 2,
    F.silu: 1,
    F.mish: 1,
    F.hardswish: 1,
    F.hardsigmoid: 1,
    F.hardtanh: 3,
    F.threshold: 3,
    F.rrelu: 4,
    F.dropout: 3,
    F.alpha_dropout: 3,
    F.feature_alpha_dropout: 3,
    F.dropout1d: 3,
    F.dropout2d: 3,
    F.dropout3d: 3,
}

_EMBEDDINGS = {F.embedding, F.embedding_bag}

_VIEWS = {
    "view", "reshape", "transpose", "permute", "expand", "expand_as", "squeeze", "unsqueeze",
    "narrow", "select", "split", "chunk", "unbind", "flatten", "unflatten", "view_as", "t", "mT",
    "T", "movedim", "swapaxes", "diagonal", "unfold", "getitem", "getattr", "contiguous", "to",
    "detach", "real", "imag", "as_strided", "tensor_split", "hsplit", "vsplit", "type", "float",
    "half", "bfloat16", "double", "alias", "swapdims", "reshape_as", "broadcast_to", "H", "conj",
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "feature_dropout", "positive", "view_as_real", "view_as_complex", "resolve_conj", "ravel",
    "atleast_1d", "atleast_2d", "atleast_3d", "unsafe_chunk", "unsafe_split", "adjoint", "mH",
    "requires_grad_", "moveaxis", "split_with_sizes", "cpu", "cuda", "type_as", "dsplit",
}  # fmt: skip

_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "feature_dropout",
}  # fmt: skip

# Whose form out of place is something else: ``Tensor.bernoulli`` reads its probabilities from the
# very values that ``bernoulli_`` overwrites, and in place the gradients of ELU and its kin are
# computed from the result, which has other last bits than from the input.
_NO_COUNTERPART = {"bernoulli", "elu", "celu", "selu"}


def mutated_argument(node: fx.Node) -> fx.Node | None:
    """The tensor that the node writes into, or ``None`` for an operation without that effect."""
    returned = _returned_argument(node)
    return _renormalized_weight(node) if returned is None else returned


def _renormalized_weight(node: fx.Node) -> fx.Node | None:
    """The weight of an embedding with ``max_norm``, which shortens the rows that it looks up."""
    if node.op != "call_function" or node.target not in _EMBEDDINGS:
        return None
    max_norm = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return weight if max_norm is not None and isinstance(weight, fx.Node) else None


def _returned_argument(node: fx.Node) -> fx.Node | None:
    """The tensor that the node writes into and makes its result."""
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    first = _first_argument(node)
    if first is None:
        return None
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            return first
        return None
    if node.op != "call_function":
        return None
    if node.target in _OPERATORS or node.target is operator.setitem:
        return first
    if _has_inplace_flag(node):
        return first
    name = getattr(node.target, "__name__", "")
    is_torch = getattr(node.target, "__module__", None) in {"torch", "torch._C._nn", None}
    return first if is_torch and name.endswith("_") and not name.endswith("__") else None


def shares_memory(node: fx.Node) -> bool:
    """Whether the node's result may be a view of its first argument."""
    if node.op == "call_method":
        return str(node.target) in _VIEWS
    if node.op != "call_function":
        return False
    return getattr(node.target, "__name__", "") in _VIEWS


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the node that made the memory of its result: itself, if it is no view."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _returned_argument(node)
        if source is None and shares_memory(node):
            source = _first_argument(node)
        roots[node] = roots[source] if source is not None else node
    return roots


def aliased_by_mutation(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that share memory with a tensor that the graph still writes into.

    Giving such a tensor a new identity would cut the tie, so a pass leaves them alone.
    """
    roots = memory_roots(graph)
    targets = (mutated_argument(node) for node in graph.nodes)
    mutated = {roots[target] for target in targets if target is not None}
    return {node for node, root in roots.items() if root in mutated}


def same_tensor(node: fx.Node) -> fx.Node | None:
    """The argument that the operation hands back as it is, not even as a view: ``x.float()``.

    A probe between the two would have autograd add up the gradient of that one tensor in another
    order, and so with other bits.
    """
    first = _first_argument(node)
    example = example_tensor(node)
    if first is None or example is None or node.op not in {"call_function", "call_method"}:
        return None
    if getattr(node.target, "__name__", "") in _DROPOUTS:
        # Fake tensors do not tell: under them a dropout that drops nothing makes a new tensor.
        rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        by_default = not getattr(node.target, "__name__", "").endswith("alpha_dropout")
        given = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", by_default)
        return first if rate == 0 or given is False else None
    if WRITTEN_AS in node.meta or mutated_argument(node) is not None:
        return None
    if (getattr(node.target, "__module__", None) or "").startswith(_OWN_PACKAGE):
        # A pass gives the scales that it inserts the example of what they scale.
        return None
    return first if example is example_tensor(first) else None


def returned_alone(graph: fx.Graph) -> set[fx.Node]:
    """Returned nodes into whose memory, which the graph made, no other returned node looks.

    After a graph break the step may write into such a tensor, and nobody else can tell.
    """
    roots = memory_roots(graph)
    returned = graph.output_node().all_input_nodes
    looking = Counter(roots[node] for node in returned)
    alone: set[fx.Node] = set()
    for node in returned:
        if looking[roots[node]] > 1 or roots[node].op in {"placeholder", "get_attr"}:
            continue
        one: fx.Node | None = node
        while one is not None:
            alone.add(one)
            one = same_tensor(one)
    return alone


def make_out_of_place(graph: fx.Graph) -> tuple[str, ...]:
    """Rewrite in place every in-place operation that can be; returns what was changed and left."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    changed, kept = 0, []
    for node in list(graph.nodes):
        target = mutated_argument(node)
        if target is None:
            continue
        replacement = _functional(node) if _owns_memory(target, node) else None
        if replacement is None or not _same_result(graph, node, target, replacement):
            kept.append(tensor_name(node))
            continue
        function, args, kwargs = replacement
        node.meta[WRITTEN_AS] = (node.op, node.target)
        node.op = "call_function" if callable(function) else "call_method"
        node.target = function
        node.args, node.kwargs = args, kwargs
        # The old tensor and the result were one object: later readers must see the new value.
        for user in list(target.users):
            if user is not node and order.get(user, len(order)) > order[node]:
                user.replace_input_with(target, node)
        changed += 1
    lines = [f"{changed} in-place operations made out of place"] if changed else []
    if kept:
        lines.append(f"{len(kept)} in-place operations kept: {', '.join(kept[:4])}")
    return tuple(lines)


def _owns_memory(node: fx.Node, writer: fx.Node) -> bool:
    """Whether the graph made this tensor, fresh, and only ``writer`` looks into its memory."""
    if node.op not in {"call_function", "call_method"} or shares_memory(node):
        return False
    if _returned_argument(node) is not None:
        return False
    return not any(
        shares_memory(user) and _first_argument(user) is node
        for user in node.users
        if user is not writer
    )


def _first_argument(node: fx.Node) -> fx.Node | None:
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def _functional(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    if node.op == "call_function" and node.target in _OPERATORS:
        return _OPERATORS[node.target], node.args, dict(node.kwargs)
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if name.rstrip("_") in _NO_COUNTERPART:
        return None
    if _has_inplace_flag(node):
        position = _INPLACE_FLAG[node.target]  # type: ignore[index]
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
    """Whether the out-of-place form makes a tensor of the same type, shape and layout.

    An in-place operation keeps the type of its target where the other one promotes.
    """
    before, after = example_tensor(target), example_tensor(node)
    if before is None or after is None:
        return False
    function, args, kwargs = replacement
    values = fx.map_arg(args, lambda arg: arg.meta.get("example_value"))
    options = fx.map_arg(kwargs, lambda arg: arg.meta.get("example_value"))
    try:
        with fake_mode_of(graph), torch.no_grad():
            result = (
                function(*values, **options)
                if callable(function)
                else getattr(values[0], function)(*values[1:], **options)
            )
    except Exception:
        return False
    return (
        isinstance(result, Tensor)
        and result.dtype == before.dtype
        and result.shape == before.shape
        and result.stride() == before.stride()
    )


def _has_inplace_flag(node: fx.Node) -> bool:
    position = _INPLACE_FLAG.get(node.target)  # type: ignore[arg-type]
    if node.op != "call_function" or position is None:
        return False
    by_position = len(node.args) > position and node.args[position] is True
    return by_position or node.kwargs.get("inplace") is True
