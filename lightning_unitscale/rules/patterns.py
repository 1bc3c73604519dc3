"""Find patterns of operations: scaling, softmax, hand-written activations, averages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import (
    DATA_WRITES,
    example_tensor,
    float_arguments,
    is_float_tensor,
    op_name,
)
from lightning_unitscale.functional.rules import elementwise_factors
from lightning_unitscale.rules.flow import (
    ADDS,
    DIVIDED,
    SUBTRACTS,
    TIMES,
    Flow,
    handed_on,
    is_attention,
    is_operation,
    is_softmax,
    may_be_float,
    writes,
)

# Maximum steps to a softmax: scaling, a bias, a mask, a soft cap, casts and views.
_MAX_STEPS = 24
_MASKING = ADDS | {"masked_fill", "where", "sub", "isub", "clamp", "max", "tanh"}
# From the exponentials to their sum, and from there to the division.
_TO_SUM = frozenset({"masked_fill", "where", "sum", "add", "radd", "clamp", "clamp_min", "maximum"})
# Elementwise operations, as a function, a method or an operator.
_ELEMENTWISE = frozenset(
    {"add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
     "div", "itruediv", "multiply", "subtract", "divide", "pow", "rpow", "ipow", "neg", "abs",
     "absolute", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log1p",
     "tanh", "sigmoid", "logsigmoid", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu",
     "silu", "mish", "hardswish", "hardsigmoid", "hardtanh", "softplus", "softsign", "tanhshrink",
     "erf", "erfc", "sin", "cos", "tan", "atan", "arctan", "sinh", "cosh", "asinh", "sign", "clamp",
     "clip", "clamp_min", "clamp_max", "sinc", "positive"}
)  # fmt: skip
_MAX_OPERATIONS = 64  # more arithmetic than this between two matmuls is not an activation


def times_number(flow: Flow, node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the tensor that a node multiplies by an unlearned number, and the number's size."""
    if not is_operation(node) or op_name(node) not in DIVIDED | TIMES:
        return None
    values = _operands(node)
    if len(values) != 2 or len(node.args) + len(node.kwargs) != 2:
        return None
    sizes = [_number(flow, value) for value in values]
    tensors = [value for value, size in zip(values, sizes, strict=True) if size is None]
    if len(tensors) != 1 or not is_float_tensor(tensors[0]):
        return None
    number = next(size for size in sizes if size is not None)
    if op_name(node) in DIVIDED:
        if values[0] is not tensors[0]:
            return None
        number = 1 / number if number else float("inf")
    return tensors[0], number


def is_logits(flow: Flow, node: fx.Node) -> bool:
    """Check whether the node is a matmul of two non-weights whose result goes to a softmax."""
    matmul = matmul_of(node)
    if matmul is None or is_attention(node):
        return False
    if any(flow.parameter_of(operand.node) is not None for operand in matmul.operands):
        return False
    return logit_factor(flow, node) is not None


def logit_factor(flow: Flow, node: fx.Node) -> float | None:
    """Return the factor on a tensor between it and a softmax, or ``None`` without a softmax."""
    # A learned temperature counts as 1, since it stays as its author wrote it. So does a mask of
    # zeros and ones.
    factor = 1.0
    current = node
    for _ in range(_MAX_STEPS):
        readers = [reader for reader in flow.readers(current) if may_be_float(reader)]
        if any(map(is_softmax, readers)) or _is_written_softmax(flow, current, readers):
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
    """Return a reader's factor on the path to a softmax, or ``None`` if the path ends there."""
    source = handed_on(reader)
    if source is not None:
        return 1.0 if flow.resolve(source) is flow.resolve(node) else None
    factored = times_number(flow, reader)
    if factored is not None:
        return factored[1]
    if op_name(reader) in TIMES | DIVIDED:
        return _tensor_factor(flow, node, reader)
    if op_name(reader) in _MASKING and matmul_of(reader) is None:
        return 1.0
    return None


def _tensor_factor(flow: Flow, node: fx.Node, reader: fx.Node) -> float | None:
    """Return the factor of a product or a quotient of the node with another tensor."""
    values = _operands(reader)
    nodes = [value for value in values if isinstance(value, fx.Node)]
    others = [other for other in nodes if flow.resolve(other) is not node]
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
    is_temperature = tensor is not None and all(int(size) == 1 for size in tensor.shape[-2:])
    return 1.0 if is_temperature and flow.is_learned(others[0]) else None


def _is_written_softmax(flow: Flow, node: fx.Node, readers: Iterable[fx.Node]) -> bool:
    """Check whether the exponentials of a tensor are divided by their sum."""
    exponentials = [reader for reader in readers if op_name(reader) == "exp"]
    if not exponentials:
        return False
    if op_name(node) == "sub" and "logsumexp" in map(op_name, flow.sources(node)):
        return True
    terms: set[fx.Node] = set(exponentials)
    sums: set[fx.Node] = set()
    pending = list(exponentials)
    while pending and len(terms) + len(sums) < _MAX_STEPS:
        term = pending.pop()
        for reader in flow.readers(term):
            is_sum = term in sums or op_name(reader) == "sum"
            # Values may be weighted by the exponentials before the division.
            is_weighted = matmul_of(reader) is not None and not is_sum
            is_passed_on = op_name(reader) in _TO_SUM | TIMES or handed_on(reader) is not None
            if (is_weighted or is_passed_on) and reader not in terms | sums:
                (sums if is_sum else terms).add(reader)
                pending.append(reader)
    quotients = (
        reader for term in terms for reader in flow.readers(term) if op_name(reader) in DIVIDED
    )
    return any(_is_share(flow, quotient, terms, sums) for quotient in quotients)


def _is_share(flow: Flow, node: fx.Node, terms: set[fx.Node], sums: set[fx.Node]) -> bool:
    values = [flow.resolve(value) for value in _operands(node) if isinstance(value, fx.Node)]
    return len(values) == 2 and values[0] in terms and values[1] in sums


def _number(flow: Flow, value: Any) -> float | None:
    """Return the size of a Python number, or of a 0-d tensor that is not learned."""
    if isinstance(value, (int, float)):
        return abs(float(value))
    tensor = example_tensor(value)
    if tensor is None or tensor.dim() > 0:
        return None
    return flow.size(value)


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """Return both sides of a product or a quotient, given by position or by name."""
    return (*node.args, *(node.kwargs[name] for name in ("input", "other") if name in node.kwargs))


@dataclass(frozen=True)
class Result:
    """Earlier result of an :class:`Elementwise`, as an argument of a later step."""

    index: int


@dataclass(frozen=True)
class Elementwise:
    """Elementwise function of one tensor. The RMS of equal ones is derived once."""

    # (op, target, args, kwargs), with a Result for each earlier one, 0 being the tensor itself.
    steps: tuple[tuple[str, Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]

    def __call__(self, input: Tensor) -> Tensor:
        """Apply the function to a tensor of any shape."""
        results = [input]

        def value(arg: Any) -> Any:
            return results[arg.index] if isinstance(arg, Result) else arg

        for op, target, args, kwargs in self.steps:
            values = [value(arg) for arg in args]
            options = {name: value(arg) for name, arg in kwargs}
            if op == "call_method":
                results.append(getattr(values[0], target)(*values[1:], **options))
            else:
                results.append(target(*values, **options))
        return results[-1]


def derived_rms(
    flow: Flow, node: fx.Node, rms_of: Callable[[fx.Node], float | None]
) -> float | None:
    """Return the RMS of a hand-written activation by quadrature, or ``None`` if it is none."""
    collected = _collect(flow, node)
    if collected is None:
        return None
    root, nodes = collected
    rms = rms_of(root)
    if not rms:
        return None
    function = _as_function(flow, root, nodes)
    try:
        return 1 / elementwise_factors(function, rms).output
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError):
        return None  # no finite second moment (a reciprocal), or not computable


def _collect(flow: Flow, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the one tensor that ``node`` is an elementwise function of, and its steps."""
    roots: set[fx.Node] = set()
    nodes: set[fx.Node] = set()
    pending = [flow.resolve(node)]
    while pending:
        inner = pending.pop()
        if inner in nodes:
            continue
        sources = [flow.resolve(source) for _, source in float_arguments(inner)]
        is_inside = is_operation(inner) and op_name(inner) in _ELEMENTWISE and sources
        if not is_inside or len(inner.all_input_nodes) != len(set(sources)):
            roots.add(inner)
            continue
        nodes.add(inner)
        pending += sources
        if len(nodes) > _MAX_OPERATIONS or len(roots) > 1:
            return None
    if len(roots) != 1 or not nodes:
        return None
    return roots.pop(), sorted(nodes, key=flow.order)


def _as_function(flow: Flow, root: fx.Node, nodes: list[fx.Node]) -> Elementwise:
    results = {root: Result(0)}

    def result_of(node: fx.Node) -> Any:
        return results[flow.resolve(node)]

    steps = []
    for node in nodes:
        args = fx.map_arg(node.args, result_of)
        kwargs = fx.map_arg(node.kwargs, result_of)
        steps.append((node.op, node.target, tuple(args), tuple(dict(kwargs).items())))
        results[node] = Result(len(results))
    return Elementwise(tuple(steps))


# Dynamo (2.13) adds this operation to a write through ``.data``.
_LOWERED = "lower_version_count_by_1"
_SAME = DATA_WRITES | {"detach", "get_data_attr", _LOWERED, "neg", "negative", "copy"}
_SUMS = ADDS | SUBTRACTS | {"rsub"}
_FOREACH = "foreach_"  # in place, on a list of tensors


@dataclass(frozen=True)
class Averages:
    """Updates of parameters from parameters in a step: momentum encoders, averages of a model."""

    # `teacher.lerp_(student, 0.01)` is the same update at any common scale of the two. So it does
    # not prevent unit scale of a weight, and has no factors. Only sums of multiples of parameters
    # that overwrite a parameter are included, not clamps.

    nodes: frozenset[fx.Node]  # nothing else reads their results
    groups: tuple[frozenset[str], ...]  # parameters that are added up, and so need one scale


def find_averages(flow: Flow) -> Averages:
    """Find the updates of a step."""
    paths: dict[fx.Node, frozenset[str]] = {
        node: frozenset({fqn}) for fqn, node in flow.parameters.items()
    }
    groups: dict[fx.Node, list[frozenset[str]]] = {}
    for node in filter(is_operation, flow.nodes):
        terms = list(_terms(node))
        if terms and all(_is_linear(flow, node, term, paths.keys()) for term in terms):
            groups[node] = [
                frozenset().union(*(paths[flow.resolve(tensor)] for tensor in _tensors(term)))
                for term in terms
            ]
            paths[node] = frozenset().union(*groups[node])
    kept: set[fx.Node] = set()
    # Readers come later, so that they are checked first.
    for node in reversed(groups):
        is_end = writes(node) or op_name(node) == _LOWERED
        if (node.users or is_end) and all(reader in kept for reader in node.users):
            kept.add(node)
    written = {group for node in kept if writes(node) for group in groups[node]}
    return Averages(frozenset(kept), tuple(sorted(written, key=sorted)))


def _terms(node: fx.Node) -> Iterator[list[Any]]:
    """Yield the arguments of an operation, or those for each tensor of the list that it changes."""
    arguments = [*node.args, *node.kwargs.values()]
    if not op_name(node).startswith(_FOREACH):
        yield arguments
        return
    changed = node.args[0]
    if not writes(node) or not isinstance(changed, (list, tuple)):
        return
    for index in range(len(changed)):
        yield [value[index] if isinstance(value, (list, tuple)) else value for value in arguments]


def _is_linear(flow: Flow, node: fx.Node, term: list[Any], linear: Iterable[fx.Node]) -> bool:
    tensors = _tensors(term)
    if not tensors or not all(flow.resolve(tensor) in linear for tensor in tensors):
        return False
    name = op_name(node).removeprefix(_FOREACH)
    if handed_on(node) is not None or name in _SAME:
        return True
    # Without ``out``.
    operands = [value for value in term[: len(node.args)] if is_float_tensor(value)]
    if name in TIMES:
        return len(operands) == 1
    if name in DIVIDED:
        return len(operands) == 1 and operands[0] is term[0]
    # With a tensor of weights ``lerp`` adds no multiples.
    return len(operands) == 2 and (name in _SUMS or name == "lerp")


def _tensors(term: list[Any]) -> list[fx.Node]:
    return [value for value in term if example_tensor(value) is not None]
