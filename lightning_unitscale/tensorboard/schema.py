"""Define the tags and contents of the **Scales** plugin's tensors in an event file.

A run has ten series per direction. Nine have one vector per step with an entry per tensor, so
one read gives a whole heat map with aligned columns:

====================================  ======================  =====================================
tag                                   shape, type             content
====================================  ======================  =====================================
``scales/forward/log2_rms/1c0ffee5``  ``(N,)`` float32        log2 RMS of the stored tensors
``scales/forward/log2_unit/...``      ``(N,)`` float32        log2 of their units
``scales/forward/fractions/...``      ``(N, F, 3)`` float16   overflow, subnormal, flushed; stored
``scales/forward/nonfinite/...``      ``(N,)`` float32        number of NaN and infinite elements
``scales/forward/blocks/...``         ``(N, B, 4)`` float32   of block formats: elements flushed,
                                                              scales saturated, underflow; spread
``scales/forward/share_read/...``     ``(N,)`` float32        share of elements behind fractions
``scales/forward/log2_amax/...``      ``(N,)`` float32        log2 of the largest stored magnitudes
``scales/forward/numel/...``          ``(N,)`` float32        number of elements
``scales/forward/spacing/...``        ``(1,)`` float32        spacing near 1 of the coarsest format
``scales/forward/exponents/a.b``      ``(3 + K,)`` float32    exponent counts of the tensor ``a.b``
``scales/alerts``                     ``()`` text             alerts of a step, see ``alerts.py``
``scales/precision``                  ``()`` text             JSON: a precision report
``scales/coverage``                   ``()`` text             JSON: matmuls scaled and formats
====================================  ======================  =====================================

The true value of a tensor is its stored value times its unit. A vector tag ends in the key of its
set of tensors. If the observed tensors change (another graph, a second fit), another set begins
under another key. Names, modules and formats are JSON in the metadata of the set's ``log2_rms``
tags, which is written once. NaN means that a tensor was absent, ``-inf`` that it was all zero.
``nonfinite`` is written only at steps with such elements. ``share_read`` is written with
``fractions`` that come from samples. ``blocks`` is written if a block format is monitored, with NaN
for tensors that no matmul reads. ``spacing`` is written where it is known. ``numel`` and
``spacing`` are written at the first step, and again when they have changed.

This file does not import torch, because TensorBoard's server may not have it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import astuple, dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import BlockFormat, NumberFormat
from lightning_unitscale.scales.layout import DIRECTIONS, MIN_EXPONENT, NUM_EXPONENTS, Direction

PLUGIN_NAME: Final = "scales"
ALERTS_TAG: Final = f"{PLUGIN_NAME}/alerts"
PRECISION_TAG: Final = f"{PLUGIN_NAME}/precision"
COVERAGE_TAG: Final = f"{PLUGIN_NAME}/coverage"
VERSION: Final = 1

Quantity = Literal[
    "log2_rms", "log2_unit", "fractions", "blocks", "nonfinite", "share_read", "log2_amax",
    "numel", "spacing", "exponents",
]  # fmt: skip
QUANTITIES: Final[tuple[Quantity, ...]] = get_args(Quantity)


@dataclass(frozen=True)
class Series:
    """A tag of the plugin."""

    direction: Direction
    quantity: Quantity
    subject: str  # the key of the set of tensors; for exponents the name of the tensor

    @property
    def tag(self) -> str:
        """Return the tag in the event file."""
        return f"{PLUGIN_NAME}/{self.direction}/{self.quantity}/{self.subject}"

    @classmethod
    def parse(cls, tag: str) -> Series | None:
        """Return the series of a tag; ``None`` for a tag that this version does not know."""
        for direction in DIRECTIONS:
            for quantity in QUANTITIES:
                prefix = cls(direction, quantity, "").tag
                if tag.startswith(prefix) and tag != prefix:
                    return cls(direction, quantity, tag.removeprefix(prefix))
        return None


@dataclass(frozen=True)
class TensorSet:
    """The tensors of a set of vectors, in graph order."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    formats: tuple[NumberFormat, ...]
    # Each tensor's inputs, whether a matmul reads it, and whether a matmul computes it and so reads
    # its gradient. Older files have none of these.
    inputs: tuple[tuple[str, ...], ...] = ()
    operands: tuple[bool, ...] = ()
    matmuls: tuple[bool, ...] = ()
    block_formats: tuple[BlockFormat, ...] = ()

    def read_by_matmuls(self, direction: Direction) -> frozenset[str]:
        """Return the names of the tensors that matmuls read, or whose gradients they read."""
        flags = self.operands if direction == "forward" else self.matmuls
        return frozenset(itertools.compress(self.names, flags))

    @functools.cached_property
    def key(self) -> str:
        """Return a hash of eight letters, the same in every process."""
        return hashlib.sha256(self.to_content()).hexdigest()[:8]

    def to_content(self) -> bytes:
        """Return the set as the metadata content of a tag."""
        formats = [astuple(item) for item in self.formats]
        position = {name: index for index, name in enumerate(self.names)}
        inputs = [[position[name] for name in group if name in position] for group in self.inputs]
        blocks = [astuple(item) for item in self.block_formats]
        return content(
            names=self.names,
            modules=self.modules,
            formats=formats,
            inputs=inputs,
            operands=[int(flag) for flag in self.operands],
            matmuls=[int(flag) for flag in self.matmuls],
            **({"block_formats": blocks} if blocks else {}),
        )

    @classmethod
    def from_content(cls, data: bytes) -> TensorSet | None:
        """Return the set in the metadata content of a tag; ``None`` for other content."""
        fields = parse_content(data)
        if fields is None or "names" not in fields:
            return None
        formats = tuple(NumberFormat(*item) for item in fields["formats"])
        names = tuple(fields["names"])
        inputs = tuple(tuple(names[k] for k in group) for group in fields.get("inputs", ()))
        operands, matmuls = (
            tuple(map(bool, fields.get(key, ()))) for key in ("operands", "matmuls")
        )
        blocks = tuple(
            BlockFormat(name, NumberFormat(*element), *others)
            for name, element, *others in fields.get("block_formats", ())
        )
        return cls(names, tuple(fields["modules"]), formats, inputs, operands, matmuls, blocks)


def content(**fields: Any) -> bytes:
    """Return the metadata content of a tag: JSON with the version of this schema."""
    return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode()


def parse_content(data: bytes) -> dict[str, Any] | None:
    """Return the fields of metadata content; ``None`` if a later version wrote it."""
    try:
        fields = json.loads(data)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        return None
    return fields


@dataclass(frozen=True, eq=False)
class ExponentCounts:
    """The number of a tensor's elements per binary exponent of their true values."""

    counts: npt.NDArray[np.floating[Any]]  # finite non-zero, per exponent -150 to 128, (279,)
    num_sampled: int
    log2_unit: int = 0  # stored exponents are lower by this

    @classmethod
    def from_vector(cls, vector: npt.ArrayLike) -> ExponentCounts:
        """Create counts from a vector of :func:`exponent_vectors`."""
        values = np.asarray(vector, dtype=np.float32)
        start = int(values[2]) - MIN_EXPONENT if values.ndim == 1 and values.size >= 3 else -1
        if start < 0 or start + values.size - 3 > NUM_EXPONENTS:
            raise ValueError(
                f"vector of shape {values.shape}: not exponent counts. Expected number sampled, "
                "unit, first exponent and counts. Read a tag whose quantity is 'exponents'."
            )
        counts = np.zeros(NUM_EXPONENTS, dtype=np.float32)
        counts[start : start + values.size - 3] = values[3:]
        return cls(counts, num_sampled=int(values[0]), log2_unit=int(values[1]))


def exponent_vectors(
    counts: npt.NDArray[np.floating[Any]], num_sampled: npt.ArrayLike, log2_units: npt.ArrayLike
) -> list[npt.NDArray[np.floating[Any]]]:
    """Return a vector for each of several tensors, from counts of shape ``(tensors, 279)``."""
    # A vector has the number sampled, the unit, the first exponent, and counts up to the last
    # non-zero one. Most tensors use about thirty exponents, so this is a tenth of all counts.
    present = counts > 0
    is_any = present.any(axis=1)
    starts = np.where(is_any, present.argmax(axis=1), 0)
    stops = np.where(is_any, NUM_EXPONENTS - present[:, ::-1].argmax(axis=1), 0)
    # The three numbers of the head replace zeros right before the first count.
    table = np.empty((len(counts), 3 + NUM_EXPONENTS), dtype=np.float32)
    table[:, 3:] = counts
    heads = (num_sampled, log2_units, MIN_EXPONENT + starts)
    for place, head in enumerate(heads):
        table[np.arange(len(counts)), starts + place] = head
    spans = zip(table, starts.tolist(), stops.tolist(), strict=True)
    return [row[start : stop + 3] for row, start, stop in spans]
