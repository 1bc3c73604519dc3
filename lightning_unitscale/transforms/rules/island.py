"""Hand-written activations: a group of elementwise arithmetic that is a function of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from lightning_unitscale.functional.quadrature import elementwise_factors
from lightning_unitscale.graph.nodes import op_name
from lightning_unitscale.transforms.rules.flow import Flow, float_arguments, is_operation

# What acts on each element by itself, as a function, a method or an operator.
_ELEMENTWISE = frozenset(
    {"add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv",
     "div", "itruediv", "multiply", "subtract", "divide", "pow", "rpow", "ipow", "neg", "abs",
     "absolute", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log1p",
     "tanh", "sigmoid", "logsigmoid", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu",
     "silu", "mish", "hardswish", "hardsigmoid", "hardtanh", "softplus", "softsign", "tanhshrink",
     "erf", "erfc", "sin", "cos", "tan", "atan", "arctan", "sinh", "cosh", "asinh", "sign", "clamp",
     "clip", "clamp_min", "clamp_max", "sinc", "positive"}
)  # fmt: skip
# More arithmetic than this between two matrix products is no activation.
_MAX_OPERATIONS = 64


@dataclass(frozen=True)
class Island:
    """A function of one tensor, element by element; equal islands are derived once.

    Attributes:
        steps: Operations in order: ``(op, target, args, kwargs)``. ``Place`` in the arguments says
            which earlier result is meant, 0 for the tensor itself.
    """

    steps: tuple[tuple[str, Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]

    def __call__(self, input: Tensor) -> Tensor:
        """Run it on a tensor of any shape."""
        results = [input]
        for op, target, args, kwargs in self.steps:
            given = [results[one.index] if isinstance(one, Place) else one for one in args]
            options = {
                name: results[one.index] if isinstance(one, Place) else one for name, one in kwargs
            }
            if op == "call_method":
                results.append(getattr(given[0], target)(*given[1:], **options))
            else:
                results.append(target(*given, **options))
        return results[-1]


@dataclass(frozen=True)
class Place:
    """An earlier result of an island."""

    index: int


def derived_rms(
    flow: Flow, node: fx.Node, known: Callable[[fx.Node], float | None]
) -> float | None:
    """RMS of the result of a hand-written activation, by quadrature; ``None`` if it is none.

    Args:
        flow: The step.
        node: What the activation ends in.
        known: RMS of the tensors that are known.
    """
    found = _collect(flow, node)
    if found is None:
        return None
    root, nodes = found
    rms = known(root)
    if not rms:
        return None
    island = _as_function(flow, root, nodes)
    try:
        return 1 / elementwise_factors(island, rms).output
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError):
        return None  # no finite second moment (a reciprocal), or of no use as a function


def _collect(flow: Flow, node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The one tensor that ``node`` is an elementwise function of, and what lies between."""
    roots: set[fx.Node] = set()
    nodes: set[fx.Node] = set()
    pending = [flow.resolve(node)]
    while pending:
        one = pending.pop()
        if one in nodes:
            continue
        sources = [flow.resolve(source) for _, source in float_arguments(one)]
        is_inside = is_operation(one) and op_name(one) in _ELEMENTWISE and sources
        if not is_inside or len(one.all_input_nodes) != len(set(sources)):
            roots.add(one)
            continue
        nodes.add(one)
        pending += sources
        if len(nodes) > _MAX_OPERATIONS or len(roots) > 1:
            return None
    if len(roots) != 1 or not nodes:
        return None
    return roots.pop(), sorted(nodes, key=flow.order)


def _as_function(flow: Flow, root: fx.Node, nodes: list[fx.Node]) -> Island:
    places = {root: Place(0)}

    def place_of(one: fx.Node) -> Any:
        return places[flow.resolve(one)]

    steps = []
    for node in nodes:
        args = fx.map_arg(node.args, place_of)
        kwargs = fx.map_arg(node.kwargs, place_of)
        steps.append((node.op, node.target, tuple(args), tuple(dict(kwargs).items())))
        places[node] = Place(len(places))
    return Island(tuple(steps))
