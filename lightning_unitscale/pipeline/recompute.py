"""Values that a later stage makes for itself rather than receive: masks, positions, rotary tables.

Such a value depends on nothing but the call's arguments and constant buffers, by operations that
cost next to nothing and give the same bits again.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from lightning_unitscale.graph.aliasing import memory_roots, written_arguments
from lightning_unitscale.graph.capture import autocast_dtypes
from lightning_unitscale.graph.nodes import TRANSFORMED, op_name
from lightning_unitscale.pipeline.modes import Modes

# Chains of more operations are relayed: their kernels' launches would cost more than the transfer.
_LONGEST_CHAIN = 48

_CHEAP = frozenset(
    {"abs", "add", "and", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bool",
     "broadcast_to", "cat", "ceil", "chunk", "clamp", "clone", "contiguous", "cos", "cumsum",
     "detach", "div", "einsum", "eq", "exp", "expand", "expand_as", "eye", "flatten", "float",
     "floor", "floordiv", "full", "full_like", "ge", "getattr", "getitem", "gt", "int", "invert",
     "le", "log", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "long",
     "lt", "masked_fill", "matmul", "max", "maximum", "min", "minimum", "mod", "mul", "narrow",
     "ne", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "or", "outer",
     "permute", "pow", "reciprocal", "remainder", "repeat", "reshape", "rsqrt", "rsub", "select",
     "sign", "sin", "size", "split", "sqrt", "squeeze", "stack", "sub", "sum", "t", "to",
     "transpose", "tril", "triu", "truediv", "type", "type_as", "unbind", "unsqueeze", "view",
     "where", "xor", "zeros", "zeros_like"}
)  # fmt: skip


class Recomputable:
    """Says of which nodes a later stage makes its own copy.

    Args:
        graph_module: The whole graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        graph = graph_module.graph
        self._buffers = {name for name, _ in graph_module.named_buffers(remove_duplicate=False)}
        self._autocast = autocast_dtypes(graph)
        roots = memory_roots(graph)
        dirty = {roots[one] for node in graph.nodes for one in written_arguments(node)}
        self._written = {node for node, root in roots.items() if root in dirty}
        modes = Modes()
        self._in_region: set[fx.Node] = set()
        for node in graph.nodes:
            modes = modes.after(node)
            if modes.autocasts:
                self._in_region.add(node)
        self._chains: dict[fx.Node, frozenset[fx.Node] | None] = {}

    def __call__(self, node: fx.Node) -> bool:
        """Whether the node, with all that it needs, can be run again."""
        chain = self._chain(node)
        return chain is not None and len(chain) <= _LONGEST_CHAIN

    def _chain(self, node: fx.Node) -> frozenset[fx.Node] | None:
        """The operations that make it, or ``None`` if one of them must not run again."""
        if node not in self._chains:
            self._chains[node] = self._find(node)
        return self._chains[node]

    def _find(self, node: fx.Node) -> frozenset[fx.Node] | None:
        if node.op == "placeholder":
            return frozenset()
        if node in self._written:
            return None
        if node.op == "get_attr":
            return frozenset() if str(node.target) in self._buffers else None
        example = node.meta.get("example_value")
        # At the start of a stage the caller's autocast is on, and none of the graph's regions.
        if (
            node in self._autocast
            or node in self._in_region
            or node.meta.get(TRANSFORMED)
            or not _is_plain(node)
        ):
            return None
        if isinstance(example, Tensor) and example.requires_grad:
            return None
        chains = [self._chain(one) for one in node.all_input_nodes]
        found: set[fx.Node] = {node}
        for one in chains:
            if one is None or len(one) > _LONGEST_CHAIN:
                return None
            found |= one
        return frozenset(found)


def _is_plain(node: fx.Node) -> bool:
    if node.op not in {"call_function", "call_method"}:
        return False
    return node.target is operator.getitem or op_name(node) in _CHEAP
