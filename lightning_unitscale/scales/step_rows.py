"""Measure the rows of one step one by one, and read all at once."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_unitscale.scales.host_rows import HostRows
from lightning_unitscale.scales.launches import stream_of
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


@dataclass(eq=False, slots=True)
class TakenRow:
    """The place of a tensor's row among the rows of its device and stream."""

    rows: Any
    index: int


# Returns for each of several lists of rows the merged row; zeros for an empty list.
ReadRows: TypeAlias = Callable[[Sequence[Sequence[TakenRow]]], Tensor]


class StepRows:
    """Collects the rows of a step's tensors, on any devices."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        # A stream's rows are added up in its own order.
        self._collected: dict[tuple[torch.device, int], Any] = {}

    def add(self, tensor: Tensor, factor: Tensor | None = None) -> TakenRow:
        """Measure a real floating-point tensor as it is now, without waiting for its device."""
        key = _stream_of(tensor)
        rows = self._collected.get(key)
        if rows is None:
            rows = self._collected[key] = new_rows(self._layout, tensor.device)
        index = rows.add(tensor) if factor is None else rows.add(tensor, factor)
        return TakenRow(rows, index)

    def repeat(self, tensor: Tensor) -> TakenRow | None:
        """Measure a tensor, if it takes no operation of torch; ``None`` if it does."""
        key = _stream_of(tensor)
        rows = self._collected.get(key)
        repeat = getattr(rows, "repeat", None)
        if repeat is None or (index := repeat(tensor, key[1])) is None:
            return None
        return TakenRow(rows, index)

    def send(self) -> ReadRows:
        """Send for the rows, with one transfer from each device; what is returned waits for it."""
        sent = {rows: HostCopy(rows.finish()) for rows in self._collected.values()}
        self._collected = {}
        return functools.partial(_read, sent, self._layout)


def _stream_of(tensor: Tensor) -> tuple[torch.device, int]:
    """Return the device of a tensor, and the address of the stream that is current there."""
    device = tensor.device
    return device, stream_of(device)


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
    tables = {rows: copy.numbers().numpy() for rows, copy in sent.items()}
    first = [taken[0] if taken else None for taken in lists]
    found = np.zeros((len(lists), layout.num_columns))
    for rows, table in tables.items():
        places = np.array([taken.index if taken and taken.rows is rows else -1 for taken in first])
        here = places >= 0
        found[here] = table[places[here]]
    merged = torch.from_numpy(found)
    for index, taken in enumerate(lists):
        for other in taken[1:]:
            row = torch.from_numpy(tables[other.rows][other.index]).double()
            merged[index] = merge_rows(merged[index], row, layout)
    return merged
