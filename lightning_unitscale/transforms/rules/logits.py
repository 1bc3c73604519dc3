"""The way from a product to the softmax that reads it, through scaling and masking."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from lightning_unitscale.graph.nodes import example_tensor, is_float_tensor, op_name
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.transforms.rules.flow import (
    DIVIDED,
    TIMES,
    Flow,
    handed_on,
    is_attention,
    is_operation,
    is_softmax,
)

# Steps that are followed: scaling, a bias, a mask, a soft cap, casts and views.
_MAX_STEPS = 24
_MASKING = frozenset(
    {"masked_fill", "where", "add", "radd", "iadd", "sub", "isub", "clamp", "max", "tanh"}
)
_EXPONENTIALS = frozenset({"exp"})
# From the exponentials to their sum, and from there to what they are divided by.
_TO_SUM = frozenset({"masked_fill", "where", "sum", "add", "radd", "clamp", "clamp_min", "maximum"})


def times_number(flow: Flow, node: fx.Node) -> fx.Node | None:
    """The tensor that the node multiplies by, or divides by, a number.

    A number is one of Python or a tensor of one element that is not learned.
    """
    found = _factored(flow, node)
    return None if found is None else found[0]


def number_of(flow: Flow, node: fx.Node) -> float:
    """The factor of a node for which :func:`times_number` found a tensor."""
    found = _factored(flow, node)
    assert found is not None
    return found[1]


def is_logits(flow: Flow, node: fx.Node) -> bool:
    """Whether the node is a product of two tensors, neither of them a weight, on to a softmax."""
    product = product_of(node)
    if product is None or is_attention(node):
        return False
    if any(flow.parameter_of(one.node) is not None for one in product.operands):
        return False
    return logit_factor(flow, node) is not None


def logit_factor(flow: Flow, node: fx.Node) -> float | None:
    """What a tensor is multiplied by on its way to a softmax; ``None`` if it is on no such way.

    A temperature that is learned counts as 1: it stays what its author made of it. So does a mask
    of zeros and ones.
    """
    factor = 1.0
    current = node
    for _ in range(_MAX_STEPS):
        readers = [one for one in flow.readers(current) if _makes_floats(one)]
        if any(is_softmax(one) for one in readers) or _is_written_softmax(flow, current, readers):
            return factor
        for reader in readers:
            step = _step_factor(flow, current, reader)
            if step is not None:
                factor, current = factor * step, reader
                break
        else:
            return None
    return None


def _step_factor(flow: Flow, node: fx.Node, reader: fx.Node) -> float | None:
    """What a reader on the way to a softmax multiplies by; ``None`` if the way ends there."""
    source = handed_on(reader)
    if source is not None:
        return 1.0 if flow.resolve(source) is flow.resolve(node) else None
    found = _factored(flow, reader)
    if found is not None:
        return found[1]
    if op_name(reader) in TIMES | DIVIDED:
        return _tensor_factor(flow, node, reader)
    if op_name(reader) in _MASKING and product_of(reader) is None:
        return 1.0
    return None


def _tensor_factor(flow: Flow, node: fx.Node, reader: fx.Node) -> float | None:
    """What a product or a quotient of the node with another tensor multiplies it by."""
    values = _operands(reader)
    others = [one for one in values if isinstance(one, fx.Node) and flow.resolve(one) is not node]
    if len(values) != 2 or len(others) != 1:
        return None
    is_divided = op_name(reader) in DIVIDED
    if is_divided and others[0] is values[0]:
        return None
    size = flow.size(others[0])
    if size is not None:
        return 1 / size if is_divided and size else size or None
    # A number for each head, or one for all.
    tensor = example_tensor(others[0])
    is_temperature = tensor is not None and all(int(one) == 1 for one in tensor.shape[-2:])
    return 1.0 if is_temperature and flow.is_learned(others[0]) else None


def _is_written_softmax(flow: Flow, node: fx.Node, readers: Iterable[fx.Node]) -> bool:
    """Whether the exponentials of a tensor are divided by their sum."""
    exponentials = [one for one in readers if op_name(one) in _EXPONENTIALS]
    if not exponentials:
        return False
    if op_name(node) == "sub" and any(op_name(one) == "logsumexp" for one in flow.sources(node)):
        return True
    terms: set[fx.Node] = set(exponentials)
    sums: set[fx.Node] = set()
    pending = list(exponentials)
    while pending and len(terms) + len(sums) < _MAX_STEPS:
        one = pending.pop()
        for reader in flow.readers(one):
            is_sum = one in sums or op_name(reader) == "sum"
            # Values may be weighted by the exponentials before these are divided.
            is_weighted = product_of(reader) is not None and not is_sum
            is_passed_on = op_name(reader) in _TO_SUM | TIMES or handed_on(reader) is not None
            if (is_weighted or is_passed_on) and reader not in terms | sums:
                (sums if is_sum else terms).add(reader)
                pending.append(reader)
    quotients = (
        reader for one in terms for reader in flow.readers(one) if op_name(reader) in DIVIDED
    )
    return any(_is_share(flow, one, terms, sums) for one in quotients)


def _is_share(flow: Flow, node: fx.Node, terms: set[fx.Node], sums: set[fx.Node]) -> bool:
    values = [flow.resolve(one) for one in _operands(node) if isinstance(one, fx.Node)]
    return len(values) == 2 and values[0] in terms and values[1] in sums


def _factored(flow: Flow, node: fx.Node) -> tuple[fx.Node, float] | None:
    """The tensor that a product or a quotient with a number has, and the number's size."""
    if not is_operation(node) or op_name(node) not in DIVIDED | TIMES:
        return None
    values = _operands(node)
    if len(values) != 2 or len(node.args) + len(node.kwargs) != 2:
        return None
    sizes = [_number(flow, one) for one in values]
    tensors = [one for one, size in zip(values, sizes, strict=True) if size is None]
    if len(tensors) != 1 or not is_float_tensor(tensors[0]):
        return None
    number = next(size for size in sizes if size is not None)
    if op_name(node) in DIVIDED:
        if values[0] is not tensors[0]:
            return None
        number = 1 / number if number else float("inf")
    return tensors[0], number


def _number(flow: Flow, value: Any) -> float | None:
    """Size of a Python number, or of a tensor that is as good as one."""
    if isinstance(value, (int, float)):
        return abs(float(value))
    tensor = example_tensor(value)
    if tensor is None or tensor.dim() > 0:
        return None
    return flow.size(value)


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """Both sides of a product or a quotient, by position or by name."""
    return (*node.args, *(node.kwargs[one] for one in ("input", "other") if one in node.kwargs))


def _makes_floats(node: fx.Node) -> bool:
    return is_float_tensor(node) or example_tensor(node) is None
