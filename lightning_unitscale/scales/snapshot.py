"""Hold the statistics of all tensors of one step and of their gradients, on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import torch

from lightning_unitscale.scales.layout import (
    BLOCK_COLUMNS,
    BLOCK_KINDS,
    DIRECTIONS,
    FORMAT_KINDS,
    MEASURED,
    MOMENT_COLUMNS,
    Direction,
    FloatArray,
    RowLayout,
    TensorStatistics,
)
from lightning_unitscale.scales.reduce import merge_rows


@dataclass(frozen=True, eq=False)
class ScaleSnapshot:
    """The statistics of all tensors of one step, in graph order.

    A tensor may have a unit. Its stored value is then the true value divided by ``2**log2_sigma``,
    and a stored gradient is the true one divided by ``2**log2_gamma``. Rows describe the true
    value. Only their format counts describe the stored value (``statistics_row`` with a factor).

    Attributes:
        step: The optimizer step at which it was taken.
        names: Names of the tensors.
        forward: Rows of the values, shape ``(len(names), layout.num_columns)``, float64.
        backward: Rows of their gradients, of the same shape. A row is NaN if there is no gradient.
        layout: The columns of the rows.
        modules: Path of the module that computes each tensor; by default the name up to its last
            dot.
        log2_sigma: Units of the stored values, shape ``(len(names),)``, integers; 0 by default.
        log2_gamma: Units of the stored gradients.
        inputs: For each tensor, the names of the tensors that it was computed from; none by
            default.
        operands: For each tensor, whether a matmul reads it; none by default.
        matmuls: For each tensor, whether a matmul computes it. Backward matmuls then read its
            gradient. None by default.
        lacking_units: For each tensor, whether its unit, and that of its gradient, is not measured
            yet. The snapshot then has the unit 1. None by default.
        log2_loss_scale: Exponent of the loss scale, by which stored gradients are multiplied.
        spacing: Spacing of the numbers near 1 in the coarsest type or format of the step, forward
            and backward; NaN if it is not known.
    """

    step: int
    names: tuple[str, ...]
    forward: FloatArray
    backward: FloatArray
    layout: RowLayout
    modules: tuple[str, ...] = ()
    log2_sigma: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    log2_gamma: npt.NDArray[Any] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    inputs: tuple[tuple[str, ...], ...] = ()
    operands: tuple[bool, ...] = ()
    matmuls: tuple[bool, ...] = ()
    lacking_units: tuple[tuple[bool, bool], ...] = ()
    log2_loss_scale: int = 0
    spacing: tuple[float, float] = (math.nan, math.nan)

    def __post_init__(self) -> None:
        number = len(self.names)
        if len(set(self.names)) != number:
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(
                f"names: {twice!r} is given twice. Expected distinct names. Add an ordinal."
            )
        defaults = {
            "modules": tuple(name.rpartition(".")[0] for name in self.names),
            "inputs": ((),) * number,
            "operands": (False,) * number,
            "matmuls": (False,) * number,
            "lacking_units": ((False, False),) * number,
            "log2_sigma": np.zeros(number, dtype=np.int64),
            "log2_gamma": np.zeros(number, dtype=np.int64),
        }
        for attribute, default in defaults.items():
            if not len(getattr(self, attribute)):
                object.__setattr__(self, attribute, default)
        for attribute in ("forward", "backward", *defaults):
            value = getattr(self, attribute)
            if len(value) != number:
                raise ValueError(
                    f"{attribute} of length {len(value)}: does not fit {number} names. Expected "
                    "one entry per tensor. Use the same tensors throughout."
                )

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, direction: Direction) -> FloatArray:
        """Return the rows of one direction, shape ``(len(self), layout.num_columns)``."""
        if direction not in ("forward", "backward"):
            raise ValueError(
                f"direction={direction!r}: not a direction. Pass 'forward' or 'backward'."
            )
        return self.forward if direction == "forward" else self.backward

    def statistics(
        self, tensor: int | str, direction: Direction = "forward", *, stored: bool = False
    ) -> TensorStatistics | None:
        """Return the statistics of one tensor."""
        position = _position(self, tensor)
        row = self.rows(direction)[position]
        if np.isnan(row[0]):
            return None
        unit = int(self.log2_divisors(direction)[position])
        return TensorStatistics(
            row, self.layout, log2_factor=-unit if stored else 0, log2_factor_of_counts=-unit
        )

    def log2_divisors(self, direction: Direction) -> npt.NDArray[np.int64]:
        """Return log2 of the true values over the stored ones, shape ``(len(self),)``.

        This is the unit. For gradients the loss scale is divided out, since only stored gradients
        have it.
        """
        if direction == "forward":
            return self.log2_sigma
        return self.log2_gamma - self.log2_loss_scale

    def nonfinite(self, direction: Direction) -> FloatArray:
        """Return the number of NaN and infinite elements of each tensor, shape ``(len(self),)``."""
        return self.column("nans", direction) + self.column("infs", direction)

    def read_by_matmuls(self, direction: Direction) -> npt.NDArray[np.bool_]:
        """Mark the tensors, or gradients, that matmuls read, shape ``(len(self),)``."""
        flags = self.operands if direction == "forward" else self.matmuls
        return np.array(flags, dtype=bool)

    def column(self, column: str, direction: Direction = "forward") -> FloatArray:
        """Return one column for all tensors, as measured, shape ``(len(self),)``."""
        return self.rows(direction)[:, self.layout.index(column)]

    def log2_rms(self, direction: Direction = "forward", *, stored: bool = False) -> FloatArray:
        """Return ``log2`` of the RMS of all tensors, shape ``(len(self),)``.

        ``-inf`` for a tensor of zeros, NaN where there was nothing to measure.
        """
        finite = self.column("numel", direction) - self.column("nans", direction)
        finite = finite - self.column("infs", direction)
        squares = self.column("square_sum", direction)
        mean = np.full(len(self), np.nan)
        np.divide(squares, finite, out=mean, where=finite > 0)
        with np.errstate(divide="ignore"):
            result: FloatArray = 0.5 * np.log2(mean)
        return result - self.log2_divisors(direction) if stored else result

    def log2_amax(self, direction: Direction) -> FloatArray:
        """Return ``log2`` of the largest finite stored magnitudes, shape ``(len(self),)``.

        ``-inf`` for a tensor of zeros, NaN where there was nothing to measure.
        """
        with np.errstate(divide="ignore"):
            amax: FloatArray = np.log2(self.column("abs_max", direction))
        return amax - self.log2_divisors(direction)

    def fractions(self, direction: Direction = "forward") -> FloatArray:
        """Return the shares of stored elements outside the range of the layout's formats."""
        shape = (len(self), len(self.layout.formats), len(FORMAT_KINDS))
        counts = self.rows(direction)[:, len(MOMENT_COLUMNS) : self.layout.num_head].reshape(shape)
        numel = self.column("numel", direction)[:, None, None]
        fractions = np.full(shape, np.nan)
        np.divide(counts, numel, out=fractions, where=numel > 0)
        return fractions

    def block_shares(self, direction: Direction = "forward") -> FloatArray:
        """Return the ``BLOCK_KINDS`` of all tensors, ``(len(self), block formats, 4)``.

        NaN where no blocks were measured.
        """
        number = len(self.layout.block_formats)
        rows = self.rows(direction)[:, self.layout.num_columns - number * len(BLOCK_COLUMNS) :]
        table = np.moveaxis(rows.reshape(len(self), number, len(BLOCK_COLUMNS)), -1, 0)
        elements, flushed, blocks, saturated, underflow, log2_sum, square_sum = table
        shares = np.full((len(self), number, len(BLOCK_KINDS)), np.nan)
        # A tensor of zeros loses nothing and has no spread.
        num_blocks = np.where(elements > 0, np.maximum(blocks, 1), np.nan)
        shares[..., 0] = flushed / np.where(elements > 0, elements, np.nan)
        shares[..., 1], shares[..., 2] = saturated / num_blocks, underflow / num_blocks
        variance = square_sum / num_blocks - (log2_sum / num_blocks) ** 2
        shares[..., 3] = np.where(blocks > 0, np.sqrt(np.maximum(variance, 0.0)), np.nan)
        return shares

    def share_read(self, direction: Direction = "forward") -> FloatArray:
        """Return the share of elements in the sample for formats and exponents, ``(len(self),)``.

        NaN where there was nothing to measure.
        """
        numel = self.column("numel", direction)
        if not self.layout.is_sampled:
            return np.where(np.isnan(numel), np.nan, 1.0)
        if self.layout.histogram:
            read = self.column("sampled", direction)
        else:
            read = np.minimum(numel, float(self.layout.sample_size or 0))
        return np.divide(read, numel, out=np.ones_like(numel), where=numel != 0)

    def exponent_counts(self, direction: Direction = "forward") -> FloatArray | None:
        """Return exponent counts of all tensors, as measured, ``(len(self), 279)``, or ``None``."""
        if not self.layout.histogram:
            return None
        return self.rows(direction)[:, self.layout.exponents]

    def to_networkx(self) -> nx.DiGraph:
        """Return the tensors as a graph, with edges from the inputs of each tensor.

        Returns:
            A graph of networkx. A node has ``module``, ``operand`` and ``matmul`` (whether a matmul
            reads or computes it), and the numbers of :class:`TensorStatistics`, such as
            ``forward_rms`` and ``backward_rms``, that are known and finite. An edge has the
            ``numel`` of the tensor that is read.
        """
        graph = nx.DiGraph(step=self.step)
        for index, name in enumerate(self.names):
            flags = {"operand": bool(self.operands[index]), "matmul": bool(self.matmuls[index])}
            graph.add_node(name, module=self.modules[index], **flags)
            for direction in DIRECTIONS:
                statistics = self.statistics(index, direction)
                for number in () if statistics is None else MEASURED:
                    if math.isfinite(value := getattr(statistics, number)):
                        graph.nodes[name][f"{direction}_{number}"] = value
        numels = dict(graph.nodes(data="forward_numel", default=0))
        for name, inputs in zip(self.names, self.inputs, strict=True):
            # A selection may lack some of them.
            for read in filter(numels.__contains__, inputs):
                graph.add_edge(read, name, numel=numels[read])
        return graph

    def select(self, names: Sequence[str]) -> ScaleSnapshot:
        """Return only the tensors with these names, in this order."""
        chosen = [_position(self, name) for name in names]
        arrays = ("forward", "backward", "log2_sigma", "log2_gamma")
        tuples = ("names", "modules", "inputs", "operands", "matmuls", "lacking_units")
        kept = {field: getattr(self, field)[chosen] for field in arrays}
        kept |= {field: tuple(getattr(self, field)[k] for k in chosen) for field in tuples}
        return replace(self, **kept)


def _position(snapshot: ScaleSnapshot, tensor: int | str) -> int:
    if isinstance(tensor, int):
        return tensor
    try:
        return snapshot.names.index(tensor)
    except ValueError:
        raise KeyError(
            f"tensor={tensor!r}: not in this snapshot. Expected one of its {len(snapshot)} names. "
            "See names."
        ) from None


def merged_by_name(snapshots: Sequence[ScaleSnapshot]) -> ScaleSnapshot:
    """Merge the statistics of several ranks, for tensors that all ranks have in the same units.

    Tensors are in the order of the first snapshot, since other ranks may have another order.
    """
    tensors = [
        list(zip(one.names, one.log2_sigma.tolist(), one.log2_gamma.tolist(), strict=True))
        for one in snapshots
    ]
    shared = set.intersection(*map(set, tensors))
    names = [tensor[0] for tensor in tensors[0] if tensor in shared]
    chosen = [one.select(names) for one in snapshots]
    merge = functools.partial(merge_rows, layout=chosen[0].layout)
    forward, backward = (
        functools.reduce(merge, (torch.from_numpy(one.rows(direction)) for one in chosen)).numpy()
        for direction in DIRECTIONS
    )
    return replace(chosen[0], forward=forward, backward=backward)
