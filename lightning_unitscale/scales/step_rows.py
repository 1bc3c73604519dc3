"""Measure the rows of one step one by one, and read all at once."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_unitscale.scales.host_rows import HostRows
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.reduce import merge_rows
from lightning_unitscale.scales.torch_rows import functional_row
from lightning_unitscale.scales.transfer import HostCopy


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; it makes the kernels for CUDA."""
    return importlib.util.find_spec("triton") is not None


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
