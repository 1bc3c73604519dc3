"""Find operations that depend on the position of a sample in the batch.

In a microbatch, a sample has another position. So ``labels[:4] = -100`` would write into the first
four samples of each microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from lightning_unitscale.capture.graph_nodes import example_tensor
from lightning_unitscale.pipeline.batch_rules import (
    Coupled,
    Operation,
    Rows,
    Same,
    argument_of,
    entry_of,
)

_NUMBERS = "depends on the position of each sample in the batch"
_SUBSCRIPTS = frozenset({"setitem", "index_put"})
_ALONG = frozenset(
    {"index_fill", "index_copy", "index_add", "index_reduce", "scatter", "scatter_add"}
)
# They only find the samples that they read.
_INDEXING = frozenset({"getitem", "index_select", "gather", "take_along_dim"})


class Positions:
    """The tensors in a graph that number the samples of a batch, such as ``arange(len(x))``."""

    def __init__(self) -> None:
        self._numbers: set[fx.Node] = set()

    def reason(self, operation: Operation, fact: Any) -> str | None:
        """Return why a result depends on the positions of samples, or ``None``."""
        node, result = operation.node, example_tensor(operation.node)
        if _writes_at_positions(operation):
            return _NUMBERS
        if result is None or isinstance(fact, Coupled):
            return None
        numbers = self._numbers & operation.facts.keys()
        source = node.args[0] if node.args else None
        if operation.name in _INDEXING and isinstance(operation.facts.get(source), Rows):  # type: ignore[arg-type]
            numbers &= {source}
        is_first = operation.name == "arange" and isinstance(fact, Rows)
        if not is_first and (not numbers or fact == Same()):
            return None
        if result.is_floating_point() or result.dtype == torch.bool:
            return _NUMBERS
        self._numbers.add(node)  # it may be an index, as in ``logits[arange(len(logits)), last]``
        return None


def _writes_at_positions(operation: Operation) -> bool:
    """Check whether a write chooses samples by constants."""
    target = operation.node.args[0] if operation.node.args else None
    fact = operation.facts.get(target) if isinstance(target, fx.Node) else None
    if not isinstance(fact, Rows):
        return False
    # The first three of all samples may be all of a microbatch.
    chosen = [_chosen(operation.name, node, fact.dim) for node in (operation.node, operation.whole)]
    if any(isinstance(one, slice) for one in chosen):
        return True
    found = [operation.facts.get(one, Same()) for one in tree_leaves(chosen[0]) if _is_node(one)]
    return chosen[0] is not None and all(isinstance(one, Same) for one in found)


def _chosen(name: str, node: fx.Node, dim: int) -> Any:
    """Return the samples that a write chooses in a dimension, or ``None`` for equal shares."""
    target: Any = node.args[0]
    example = example_tensor(target)
    assert example is not None
    chosen: Any = None
    if name in _SUBSCRIPTS:
        chosen = entry_of(node.args[1], dim, example.ndim)
    elif name in _ALONG and argument_of(node, "dim", 1) % example.ndim == dim:
        chosen = argument_of(node, "index", 2)
    elif name == "select_scatter" and argument_of(node, "dim", 2) % example.ndim == dim:
        chosen = argument_of(node, "index", 3)
    if isinstance(chosen, slice):
        rows = range(*chosen.indices(example.shape[dim]))
        if 0 <= rows.start < rows.step and len(rows) * rows.step == example.shape[dim]:
            return None
    return chosen


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)
