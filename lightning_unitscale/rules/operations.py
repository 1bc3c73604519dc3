"""One operation of a captured graph: its kind, its float arguments, its scale rule."""

from __future__ import annotations

import torch
from torch import fx

from lightning_unitscale.functional.rules import (
    ScaleRule,
    numel_of,
    rule_of_function,
    rule_of_method,
)
from lightning_unitscale.graph.nodes import (
    INPUT,
    WHOLE_VIEWS,
    Path,
    example_tensor,
    float_arguments,
    is_float_tensor,
    op_name,
    tensor_name,
)

# What a captured graph calls by another name than people do.
_ALIASES = {"attention_product": torch.matmul, "safe_softmax": torch.softmax}


def rule_of(node: fx.Node) -> ScaleRule | None:
    """The scale rule of an operation, in whichever form it is called."""
    if node.op == "call_method":
        return rule_of_method(str(node.target))
    if node.op != "call_function":
        return None
    alias = _ALIASES.get(op_name(node))
    return rule_of_function(node.target if alias is None else alias)


_FILLED = {"zeros": 0.0, "new_zeros": 0.0, "zeros_like": 0.0, "zero": 0.0}
_FILLED |= {"ones": 1.0, "new_ones": 1.0, "ones_like": 1.0}
# Standard normal numbers, and numbers between 0 and 1.
_NOISE = {"randn": 1.0, "randn_like": 1.0, "rand": 3**-0.5, "rand_like": 3**-0.5}
_LARGEST_CONSTANT = 1e3
_FULL = frozenset({"full", "new_full", "full_like"})


def writes(node: fx.Node) -> bool:
    """Whether an operation may write into one of its arguments, which then is no constant."""
    target = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    name = str(target)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in {"setitem", "__setitem__"} or node.kwargs.get("out") is not None


def takes_form_only(node: fx.Node) -> bool:
    """Whether nothing of a tensor that the operation reads is in its result but type and shape."""
    name = op_name(node)
    return name.startswith("new_") or name.endswith("_like")


def made_rms(node: fx.Node) -> float | None:
    """RMS of a tensor that no other tensor's values are in; ``None`` for any other."""
    name = op_name(node)
    if name in _FULL:
        value = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
        # What is larger is a mask, no scale.
        is_scale = isinstance(value, (int, float)) and abs(value) < _LARGEST_CONSTANT
        return abs(float(value)) if is_scale else None  # type: ignore[arg-type]
    return {**_FILLED, **_NOISE}.get(name)


# Operations that hand on the elements of one tensor, or some of them, or several times over. None
# changes what a factor on the tensor means.
_HANDED_ON = (WHOLE_VIEWS - {"detach"}) | frozenset(
    {"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "getitem",
     "chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split", "split_with_sizes", "unbind",
     "narrow", "select", "index_select", "to", "type_as", "type", "float", "half", "bfloat16",
     "double", "roll", "flip", "unfold", "cuda", "cpu", "identity", "dropout", "dropout1d",
     "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
     "native_dropout", "positive", "rot90", "hsplit", "vsplit", "gather", "take_along_dim",
     "pixel_shuffle", "pixel_unshuffle", "diagonal"}
)  # fmt: skip

EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
TIMES = frozenset({"mul", "rmul", "imul", "multiply"})
DIVIDED = frozenset({"truediv", "div", "itruediv", "divide", "true_divide"})
ADDS = frozenset({"add", "radd", "iadd"})
SUBTRACTS = frozenset({"sub", "isub", "subtract"})


def is_operation(node: fx.Node) -> bool:
    """Whether the node computes something."""
    return node.op in {"call_function", "call_method"}


def handed_on(node: fx.Node) -> fx.Node | None:
    """The tensor that the node only rearranges, selects from, drops from or casts."""
    if not is_operation(node):
        return None
    name = str(node.args[1]) if op_name(node) == "getattr" else op_name(node)
    if name in ADDS and len(node.args) == 2 and not node.kwargs and 0 in node.args:
        # Python's sum starts from 0.
        return next((value for value in node.args if is_float_tensor(value)), None)  # type: ignore[return-value]
    if name not in _HANDED_ON:
        return None
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def is_softmax(node: fx.Node) -> bool:
    """Whether the node is a softmax in any form."""
    return is_operation(node) and op_name(node) in {"softmax", "safe_softmax"}


def is_attention(node: fx.Node) -> bool:
    """Whether the node is a fused attention."""
    return is_operation(node) and node.target is torch.nn.functional.scaled_dot_product_attention


def added_tensors(node: fx.Node) -> tuple[tuple[Path, fx.Node], tuple[Path, fx.Node]] | None:
    """The two float tensors that a node adds up as they are, with their paths."""
    if not is_operation(node) or op_name(node) not in ADDS:
        return None
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2 or not is_float_tensor(node):
        return None
    count = len(node.args) + len({"input", "other"} & node.kwargs.keys())
    operands = [
        (path, node) for path, node in float_arguments(node) if path[0] in {0, 1, "input", "other"}
    ]
    return (operands[0], operands[1]) if len(operands) == count == 2 else None


def reads_of(node: fx.Node) -> tuple[str, ...]:
    """Names of the tensors behind the float arguments of a node, in its own graph.

    They tell apart operations that have the same name in two branches of a step. Inputs of the
    graph have none: steps call them differently.
    """
    return tuple(_source_name(source) for _, source in float_arguments(node))


def _source_name(node: fx.Node) -> str:
    while (source := handed_on(node)) is not None:
        node = source
    if node.op != "placeholder":
        return tensor_name(node)
    return parameter_path(node) or ""


def parameter_path(node: fx.Node) -> str | None:
    """Path in the module of the parameter that a placeholder is, if it is one."""
    graph_input = node.meta.get(INPUT)
    is_parameter = graph_input is not None and graph_input.kind == "parameter"
    return graph_input.fqn if is_parameter else None  # type: ignore[union-attr]


def may_be_float(node: fx.Node) -> bool:
    """Whether a node makes a float tensor, or something that may hold one (a tuple)."""
    return is_float_tensor(node) or example_tensor(node) is None


def numel(node: fx.Node) -> int:
    """Number of elements of a node's example, 0 for what is no tensor."""
    tensor = example_tensor(node)
    return 0 if tensor is None else int(numel_of(tensor))


def output_factor(node: fx.Node, *, mult: float = 1.0) -> float | None:
    """The rule's factor on the result of an operation; ``None`` for one that has no rule.

    Args:
        node: The operation, whose arguments are at RMS 1.
        mult: RMS of the first argument, where it is another.

    Raises:
        TypeError: As other errors in ``RULE_ERRORS``, where the rule does not know the arguments'
            form.
    """
    rule = rule_of(node)
    if rule is None:
        return None
    args, kwargs = fx.map_arg(
        (node.args, dict(node.kwargs)), lambda arg: arg.meta.get("example_value")
    )
    arguments = rule.bind(tuple(args), kwargs)
    if mult != 1.0:
        arguments["mult"] = mult
    return rule.factors(arguments).output


# What a rule raises on arguments of a form that it does not know.
RULE_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError)
