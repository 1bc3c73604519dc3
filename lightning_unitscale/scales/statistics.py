"""Compute the statistics of a tensor on its device, as one row of fixed columns.

There are two kinds of rows. The exact row uses all elements for every column. Measurements of units
and ``track_scales`` use it, and run rarely. The light row is for the monitor: extremes and sums use
all elements, and the other columns a strided sample. Each is one operator, so that a compiler sees
one node: ``host_rows.py`` computes it on a CPU and ``triton_statistics.py`` on CUDA, and
``torch_rows.py`` on other devices, and exact counts. A compiled graph has one node for several
light rows (:func:`join_rows`). :class:`StepRows` measures tensors of an eager step one by one, and
all rows are read at once.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx

from lightning_unitscale.compiling import define_operator
from lightning_unitscale.scales.host_rows import HostRows, host_row
from lightning_unitscale.scales.launches import stream_of
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.reduce import completed_rows, merge_rows
from lightning_unitscale.scales.torch_rows import block_row, check_floating, functional_row
from lightning_unitscale.scales.transfer import HostCopy


@functools.cache
def has_triton() -> bool:
    """Check whether Triton is installed, which compiles the kernels for CUDA."""
    return importlib.util.find_spec("triton") is not None


class SeparateRows:
    """A collector of rows from torch operations: exact counts, blocks, devices without a kernel."""

    def __init__(self, row_of: Callable[..., Tensor]) -> None:
        self._row_of = row_of
        self._rows: list[Tensor] = []

    def add(self, tensor: Tensor, *options: Any) -> int:
        """Measure a real floating-point tensor, and return the place of its row."""
        self._rows.append(self._row_of(tensor, *options))
        return len(self._rows) - 1

    def finish(self) -> Tensor:
        """Return the rows, shape ``(num_tensors, num_columns)``, in the order of adding."""
        return torch.stack(self._rows)


@dataclass(eq=False, slots=True)
class TakenRow:
    """The place of a tensor's row among the rows of its device and stream."""

    rows: Any
    index: int


# Returns the merged row of each list of rows, and zeros for an empty list.
ReadRows: TypeAlias = Callable[[Sequence[Sequence[TakenRow]]], Tensor]


class StepRows:
    """Collects the rows of a step's tensors, on any devices."""

    def __init__(
        self,
        num_columns: int,
        new: Callable[[torch.device], Any],
        merge: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._num_columns, self._new, self._merge = num_columns, new, merge
        # A stream's rows are added up in its own order.
        self._collected: dict[tuple[torch.device, int], Any] = {}

    def add(self, tensor: Tensor, *options: Any) -> TakenRow:
        """Measure a real floating-point tensor now, without waiting for its device."""
        key = _stream_of(tensor)
        rows = self._collected.get(key)
        if rows is None:
            rows = self._collected[key] = self._new(tensor.device)
        return TakenRow(rows, rows.add(tensor, *options))

    def repeat(self, tensor: Tensor) -> TakenRow | None:
        """Measure a tensor if this needs no torch operation, or return ``None``."""
        key = _stream_of(tensor)
        rows = self._collected.get(key)
        repeat = getattr(rows, "repeat", None)
        if repeat is None or (index := repeat(tensor, key[1])) is None:
            return None
        return TakenRow(rows, index)

    def send(self) -> ReadRows:
        """Start one transfer of the rows from each device. The returned object waits for it."""
        sent = {rows: HostCopy(rows.finish()) for rows in self._collected.values()}
        self._collected = {}
        return functools.partial(_read, sent, self._num_columns, self._merge)


def step_rows(layout: RowLayout) -> StepRows:
    """Return the collector of rows. An option of a tensor is the factor of ``functional_row``."""
    merge = functools.partial(merge_rows, layout=layout)
    return StepRows(layout.num_columns, functools.partial(new_rows, layout), merge)


def block_rows(layout: RowLayout) -> StepRows:
    """Return the collector of rows of blocks. Options are their dimension and a tensor's scale."""

    def row_of(tensor: Tensor, axis: int, tensor_scale: float | None) -> Tensor:
        return block_row(tensor, axis, layout, tensor_scale)

    return StepRows(len(layout.block_columns), lambda _: SeparateRows(row_of), operator.add)


def _stream_of(tensor: Tensor) -> tuple[torch.device, int]:
    """Return a tensor's device and the address of its current stream."""
    device = tensor.device
    return device, stream_of(device)


def new_rows(layout: RowLayout, device: torch.device) -> Any:
    """Return the collector of rows for tensors of a device."""
    if layout.is_sampled and device.type == "cpu":
        return HostRows(layout)
    if layout.is_sampled and device.type == "cuda" and has_triton():
        from lightning_unitscale.scales.triton_statistics import TritonRows

        return TritonRows(layout, device)
    return SeparateRows(lambda tensor, factor=None: functional_row(tensor, layout, factor=factor))


def _read(
    sent: dict[Any, HostCopy],
    num_columns: int,
    merge: Callable[[Tensor, Tensor], Tensor],
    lists: Sequence[Sequence[TakenRow]],
) -> Tensor:
    tables = {rows: copy.numbers().numpy() for rows, copy in sent.items()}
    first = [taken[0] if taken else None for taken in lists]
    found = np.zeros((len(lists), num_columns))
    for rows, table in tables.items():
        places = np.array([taken.index if taken and taken.rows is rows else -1 for taken in first])
        here = places >= 0
        found[here] = table[places[here]]
    merged = torch.from_numpy(found)
    for index, taken in enumerate(lists):
        for other in taken[1:]:
            row = torch.from_numpy(tables[other.rows][other.index]).double()
            merged[index] = merge(merged[index], row)
    return merged


# A tensor lives until its row is made, so at most this many wait for each other.
_MOST_BYTES: Final = 2**24
_MOST_TENSORS: Final = 64


def statistics_row(tensor: Tensor, layout: RowLayout, *, factor: Tensor | None = None) -> Tensor:
    """Compute the statistics of one tensor."""
    check_floating(tensor)
    tensor = tensor.detach()
    measured = layout.measured
    if measured is not layout and tensor.numel() <= (layout.sample_size or 0):
        return functional_row(tensor, layout, factor=factor)
    row: Tensor = ROW_OPERATOR(tensor, factor if measured is layout else None, measured.key)
    return row if measured is layout else completed_rows(row[None].cpu(), layout)[0].to(row.device)


def _row(tensor: Tensor, factor: Tensor | None, key: str) -> Tensor:
    layout, device = RowLayout.from_key(key), tensor.device.type
    counts_all = not layout.is_sampled and (layout.histogram or bool(layout.formats))
    if device == "cpu" and not counts_all:
        return host_row(tensor, layout)
    if device == "cuda" and has_triton() and not counts_all:
        from lightning_unitscale.scales.triton_statistics import triton_row

        return triton_row(tensor, layout)
    return functional_row(tensor, layout, factor=factor)


def _joint_rows(tensors: Sequence[Tensor], key: str) -> Tensor:
    rows = new_rows(RowLayout.from_key(key), tensors[0].device)
    for tensor in tensors:
        rows.add(tensor)
    return rows.finish()


def _empty(like: Tensor, key: str, *shape: int) -> Tensor:
    return like.new_empty((*shape, RowLayout.from_key(key).num_columns), dtype=torch.float64)


# Strides do not matter. Without the tag, Inductor writes a tensor that it would have fused twice:
# once for this operator, and once for all other readers.
ROW_OPERATOR = define_operator(
    "statistics_row(Tensor tensor, Tensor? factor, str layout) -> Tensor",
    _row,
    lambda tensor, factor, key: _empty(tensor, key),
    torch.Tag.flexible_layout,
)
JOINT_ROWS_OPERATOR = define_operator(
    "statistics_rows(Tensor[] tensors, str layout) -> Tensor",
    _joint_rows,
    lambda tensors, key: _empty(tensors[0], key, len(tensors)),
    torch.Tag.flexible_layout,
)


def join_rows(graph_module: fx.GraphModule) -> None:
    """Replace calls for single light rows by calls for several neighboring tensors."""
    # Each call of our operator costs a compiled graph tens of microseconds.
    graph = graph_module.graph
    if not graph.find_nodes(op="call_function", target=ROW_OPERATOR):
        return
    waiting: list[fx.Node] = []
    num_bytes = 0
    for node in list(graph.nodes):
        is_read = any(source in waiting for source in node.all_input_nodes)
        size = _light_bytes(node)
        is_full = len(waiting) == _MOST_TENSORS or num_bytes + (size or 0) > _MOST_BYTES
        is_other = size is not None and any(
            _value(row).device != _value(node).device for row in waiting[:1]
        )
        if is_read or is_full or is_other or _may_write(node) or node.op == "output":
            _join(graph, waiting)
            waiting, num_bytes = [], 0
        if size is not None:
            waiting.append(node)
            num_bytes += size
    # Inductor finds earlier compilations by the code.
    graph_module.recompile()


def _value(node: fx.Node) -> Tensor:
    return node.meta["val"]


def _light_bytes(node: fx.Node) -> int | None:
    """Return the size of a light row's tensor. ``None`` for other rows and changing sizes."""
    if node.target is not ROW_OPERATOR:
        return None
    _, factor, key = node.args
    tensor = _value(node.all_input_nodes[0])
    is_light = factor is None and RowLayout.from_key(str(key)).is_sampled
    is_known = is_light and isinstance(tensor.numel(), int)
    return tensor.numel() * tensor.element_size() if is_known else None


def _may_write(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return node.target.__module__ != "_operator" if schema is None else schema.is_mutable


def _join(graph: fx.Graph, rows: Sequence[fx.Node]) -> None:
    if len(rows) < 2:
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
