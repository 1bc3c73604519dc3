"""Measure the rows of one step one by one, or jointly in a compiled graph, and read all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from lightning_unitscale.scales.host_rows import HostRows
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.reduce import merge_rows
from lightning_unitscale.scales.statistics import (
    JOINT_ROWS_OPERATOR,
    ROW_OPERATOR,
    functional_row,
    has_triton,
)
from lightning_unitscale.scales.transfer import HostCopy

# A tensor lives until its row is made: no more than these wait for each other.
_MOST_BYTES: Final = 2**24
_MOST_TENSORS: Final = 64


class SeparateRows:
    """Collects rows of torch operations: exact counts, and devices without a kernel."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._rows: list[Tensor] = []

    def add(self, tensor: Tensor, factor: Tensor | None = None) -> int:
        """Measure a real floating-point tensor; returns the place of its row."""
        self._rows.append(functional_row(tensor, self._layout, factor=factor))
        return len(self._rows) - 1

    def finish(self) -> Tensor:
        """Return the rows, shape ``(num_tensors, layout.num_columns)``, in the order of adding."""
        return torch.stack(self._rows)


@dataclass(frozen=True, eq=False, slots=True)
class TakenRow:
    """Where the row of a tensor is: its place among the rows of its device and stream."""

    rows: Any
    index: int


# Returns for each of several lists of rows the merged row; zeros for an empty list.
ReadRows: TypeAlias = Callable[[Sequence[Sequence[TakenRow]]], Tensor]


class StepRows:
    """Collects the rows of a step's tensors, on any devices."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        # A stream's rows are added up in its own order.
        self._collected: dict[Any, Any] = {}

    def add(self, tensor: Tensor, factor: Tensor | None = None) -> TakenRow:
        """Measure a real floating-point tensor as it is now, without waiting for its device."""
        device = tensor.device
        key: Any = device
        if device.type == "cuda":
            key = torch.cuda.current_stream(device)
        rows = self._collected.get(key)
        if rows is None:
            rows = self._collected[key] = new_rows(self._layout, device)
        index = rows.add(tensor) if factor is None else rows.add(tensor, factor)
        return TakenRow(rows, index)

    def send(self) -> ReadRows:
        """Send for the rows, with one transfer from each device; what is returned waits for it."""
        sent = {rows: HostCopy(rows.finish()) for rows in self._collected.values()}
        self._collected = {}
        return functools.partial(_read, sent, self._layout)


def new_rows(layout: RowLayout, device: torch.device) -> Any:
    """Return what collects rows of tensors of a device."""
    if layout.is_sampled and device.type == "cpu":
        return HostRows(layout)
    if layout.is_sampled and device.type == "cuda" and has_triton():
        from lightning_unitscale.scales.triton_statistics import TritonRows

        return TritonRows(layout, device)
    return SeparateRows(layout)


def _read(
    sent: dict[Any, HostCopy], layout: RowLayout, lists: Sequence[Sequence[TakenRow]]
) -> Tensor:
    first: dict[Any, int] = {}
    parts: list[Tensor] = []
    # Behind each other, and last the row of what is not there.
    for rows, copy in sent.items():
        first[rows] = sum(len(part) for part in parts)
        parts.append(copy.numbers().double())
    parts.append(torch.zeros(1, layout.num_columns, dtype=torch.float64, device="cpu"))
    table = torch.cat(parts)
    places = [[first[row.rows] + row.index for row in rows] or [-1] for rows in lists]
    found = table[[one[0] for one in places]]
    for index, others in enumerate(places):
        for other in others[1:]:
            found[index] = merge_rows(found[index], table[other], layout)
    return found


def join_rows(graph_module: fx.GraphModule) -> None:
    """Replace calls for one light row each by calls for several tensors made near each other.

    Each call of an operator of ours costs a compiled graph tens of microseconds, and code that runs
    once between others runs slowly.
    """
    graph = graph_module.graph
    if not graph.find_nodes(op="call_function", target=ROW_OPERATOR):
        return
    waiting: list[fx.Node] = []
    num_bytes = 0
    for node in list(graph.nodes):
        is_read = any(source in waiting for source in node.all_input_nodes)
        size = _bytes(node) if _makes_light_row(node) else None
        is_full = len(waiting) == _MOST_TENSORS or num_bytes + (size or 0) > _MOST_BYTES
        if waiting and (is_read or is_full or _may_write(node) or node.op == "output"):
            _join(graph, waiting)
            waiting, num_bytes = [], 0
        if size is not None:
            if waiting and _value(waiting[0]).device != _value(node).device:
                _join(graph, waiting)
                waiting, num_bytes = [], 0
            waiting.append(node)
            num_bytes += size
    # Inductor looks for what it has compiled before by the code.
    graph_module.recompile()


def _makes_light_row(node: fx.Node) -> bool:
    if node.target is not ROW_OPERATOR:
        return False
    _, factor, key = node.args
    return factor is None and RowLayout.from_key(str(key)).is_sampled


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _bytes(node: fx.Node) -> int | None:
    """Size of the tensor of a row; ``None`` if it differs from call to call."""
    tensor = _value(node.all_input_nodes[0])
    numel = tensor.numel()
    return numel * tensor.element_size() if isinstance(numel, int) else None


def _may_write(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target.__module__ != "_operator" if schema is None else schema.is_mutable


def _join(graph: fx.Graph, rows: Sequence[fx.Node]) -> None:
    if len(rows) == 1:
        return
    key = rows[0].args[2]
    with graph.inserting_before(rows[-1]):
        tensors = [row.args[0] for row in rows]
        joint = graph.call_function(JOINT_ROWS_OPERATOR, (tensors, key))
        one = _value(rows[0])
        joint.meta["val"] = one.new_empty((len(rows), *one.shape))
        for index, row in enumerate(rows):
            part = graph.call_function(torch.ops.aten.select.int, (joint, 0, index))
            part.meta.update(row.meta)
            row.replace_all_uses_with(part)
            graph.erase_node(row)
