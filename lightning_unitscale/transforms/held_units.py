"""Parameters that come into a graph in units of their own, as those of 16 bits are held."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from lightning_unitscale.graph.aliasing import aliased_by_mutation
from lightning_unitscale.graph.nodes import INPUT, TRANSFORMED, is_float_tensor, requires_grad
from lightning_unitscale.transforms.gauge import ONE, Factor, gamma, sigma
from lightning_unitscale.transforms.units import Units


def held_name(fqn: str) -> str:
    """Name in the gauge of the units in which a parameter is held."""
    return f"{fqn}:held"


def held_parameters(graph: fx.Graph) -> dict[fx.Node, str]:
    """The inputs of a captured graph that are trained parameters, with their names in the gauge."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        described = node.meta.get(INPUT)
        is_parameter = described is not None and described.kind == "parameter"
        if is_parameter and is_float_tensor(node) and requires_grad(node):
            found[node] = held_name(described.fqn)
    return found


def refuse_unreachable(names: Mapping[fx.Node, str | None], excluded: Collection[fx.Node]) -> None:
    """Refuse a graph with a parameter whose units nothing can convert where it is used.

    Raises:
        RuntimeError: If a parameter is written into, or read inside a ``vmap``.
    """
    for node, name in names.items():
        if node in excluded and name is not None:
            raise RuntimeError(
                f"{name.partition(':')[0]}: the step writes into this parameter or reads it inside "
                "a vmap, so it cannot be held in units of its own; expected parameters that are "
                "only read; pass hold_parameters=False."
            )


class HeldUnits(Units):
    """Units of the tensors of a graph in which nothing but parameters has any.

    Args:
        graph: The nodes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._names = held_parameters(graph)
        excluded = aliased_by_mutation(graph)
        for node in graph.nodes:
            if TRANSFORMED in node.meta:
                excluded.update(node.all_input_nodes)
        refuse_unreachable(self._names, excluded)

    def sigma(self, node: fx.Node) -> Factor:
        """Forward unit of the node's tensor."""
        name = self._names.get(node)
        return ONE if name is None else sigma(name)

    def gamma(self, node: fx.Node) -> Factor:
        """Gradient unit of the node's tensor."""
        name = self._names.get(node)
        return ONE if name is None else gamma(name)
