"""Sizes that change from call to call, as nodes of the graph that has them as symbols.

A file of its own for the names it takes from torch's symbolic shapes (checked on torch 2.13 and
2.11): ``SymInt.node.expr``, ``sympy_interp``, ``PythonReferenceAnalysis``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


class UnknownSize(Exception):
    """A size that the inputs of the graph do not tell."""


class SizeNodes:
    """Writes symbolic sizes into a graph as arithmetic on its inputs.

    Args:
        graph: A graph whose symbols are placeholders, as Dynamo makes it.
    """

    def __init__(self, graph: fx.Graph) -> None:
        tracer = GraphAppendingTracer(graph)
        self._inputs: dict[Any, fx.Proxy] = {}
        for node in graph.find_nodes(op="placeholder"):
            example = node.meta.get("example_value")
            if isinstance(example, torch.SymInt):
                self._inputs[example.node.expr] = fx.Proxy(node, tracer)

    def node_of(self, size: torch.SymInt) -> fx.Node | int:
        """The node of a size, made where the graph inserts; a number where it is always the same.

        Raises:
            UnknownSize: If it depends on more than the inputs.
        """
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if not expression.free_symbols <= self._inputs.keys():
            raise UnknownSize(str(expression))
        found = sympy_interp(PythonReferenceAnalysis, self._inputs, expression)
        node: fx.Node = found.node
        if "example_value" not in node.meta:
            node.meta["example_value"] = size
        return node
