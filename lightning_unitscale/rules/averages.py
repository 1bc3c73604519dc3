"""Updates of weights from weights within a step: momentum encoders and averages of a model.

``teacher.lerp_(student, 0.01)`` is the same update at whichever scale the two have together, so it
keeps no weight from being set to unit scale, and has no factors. Only sums of multiples of
parameters that a parameter is overwritten with are meant: a clamp is another one at another scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_unitscale.graph.nodes import example_tensor, is_float_tensor, op_name
from lightning_unitscale.rules.flow import (
    ADDS,
    DIVIDED,
    SUBTRACTS,
    TIMES,
    Flow,
    handed_on,
    is_operation,
    writes,
)

# What Dynamo makes of ``.data = ...`` beside ``set_``.
_LOWERED = "lower_version_count_by_1"
_SAME = frozenset({"detach", "get_data_attr", _LOWERED, "neg", "negative", "copy", "set"})
_SUMS = ADDS | SUBTRACTS | {"rsub"}
# In place, on a list of tensors.
_FOREACH = "foreach_"


@dataclass(frozen=True)
class Averages:
    """The updates of parameters from parameters in a step.

    Attributes:
        nodes: Their operations, the results of which nothing else reads.
        groups: Paths of parameters that are added up, and so need one scale.
    """

    nodes: frozenset[fx.Node]
    groups: tuple[frozenset[str], ...]


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
    # Readers come later, so that they are judged first.
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
