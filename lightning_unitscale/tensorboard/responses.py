"""Encode the answers of the Scales dashboard's server, which a report embeds too.

Arrays are sent in frames, since JSON has no NaN and no compact numbers. A frame is the length of
its header (uint32), the header, and the float32 arrays that the header's ``arrays`` lists. The
header is JSON, padded with spaces to a multiple of four bytes. All of it is little-endian.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_unitscale.formats import BF16, E4M3FN, E5M2, FP16
from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.scales.layout import MIN_EXPONENT, NUM_EXPONENTS, Direction
from lightning_unitscale.tensorboard.divergence import find_divergence
from lightning_unitscale.tensorboard.history import FractionHistory, RunScales, ScaleHistory
from lightning_unitscale.tensorboard.schema import ExponentCounts

SHOWN_FORMATS = (FP16, BF16, E4M3FN, E5M2)  # the formats whose ranges the dashboard shows
_FORMAT_FIELDS = ("name", "smallest_normal", "flush_threshold", "subnormal_threshold",
                  "overflow_threshold")  # fmt: skip


def frame(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return a frame of a header and arrays."""
    shapes = [{"name": name, "shape": array.shape} for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": shapes}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    parts = [len(text).to_bytes(4, "little"), text]
    parts += [array.astype("<f4", copy=False).tobytes() for array in arrays.values()]
    return b"".join(parts)


@dataclass(frozen=True)
class ListedRun:
    """A run that has scales."""

    name: str
    started: float  # in seconds since 1970. The page opens with the newest run.
    last_steps: Mapping[Direction, int]
    # This changes with each step, and with late data of the last step, such as alerts.
    version: int = 0


def runs_json(runs: Sequence[ListedRun]) -> bytes:
    """Return the runs and the number formats to show."""
    content = {
        "runs": [dataclasses.asdict(run) for run in runs],
        "formats": [
            {field: getattr(item, field) for field in _FORMAT_FIELDS} for item in SHOWN_FORMATS
        ],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def alerts_json(alerts: Sequence[ScaleAlert]) -> bytes:
    """Return the alerts, each with a kind, a step, a tensor, a direction and a text."""
    fields = ("kind", "step", "tensor", "direction")
    shown = [
        {field: getattr(alert, field) for field in fields} | {"text": str(alert)}
        for alert in alerts
    ]
    return json.dumps(shown, separators=(",", ":")).encode()


def precision_json(run: RunScales) -> bytes:
    """Return the last precision report of a run, or null."""
    return json.dumps(run.precision(), separators=(",", ":")).encode()


def divergence_json(run: RunScales, compared: RunScales) -> bytes:
    """Return where two runs diverge, with the report as ``text``, or only an error's text."""
    try:
        found = find_divergence(run, compared)
    except ValueError as error:
        return json.dumps({"diverged": False, "text": str(error)}).encode()
    return json.dumps(found.to_json() | {"text": found.text}, allow_nan=False).encode()


def scales_frame(history: ScaleHistory) -> bytes:
    """Return the steps, tensors and log2 RMS of a run."""
    # Units change rarely, so array `log2_unit` has a row only for each step with new units. The
    # header's `unit_rows` maps every step to its row. Array `nonfinite` has a row for each of the
    # steps that `nonfinite_rows` lists by position.
    units = history.log2_unit
    changed = np.ones(len(units), dtype=bool)
    if len(units):
        same = (units[1:] == units[:-1]) | np.isnan(units[1:]) & np.isnan(units[:-1])
        changed[1:] = ~same.all(axis=1)
    bad = np.flatnonzero(history.nonfinite.any(axis=1))
    header = {
        "names": history.names,
        "modules": history.modules,
        "sources": history.sources,
        "operands": history.operands,
        "steps": history.steps.tolist(),
        "unit_rows": (np.cumsum(changed) - 1).tolist(),
        "nonfinite_rows": bad.tolist(),
    }
    arrays = {
        "log2_rms": history.log2_rms,
        "log2_unit": units[changed],
        "nonfinite": history.nonfinite[bad],
    }
    return frame(header, arrays)


def exponents_frame(counts: Mapping[int, ExponentCounts]) -> bytes:
    """Return the exponent counts of one tensor over the steps, without unused exponents."""
    rows = np.zeros((len(counts), NUM_EXPONENTS), np.float32)
    for row, point in zip(rows, counts.values(), strict=True):
        row[:] = point.counts
    present = np.flatnonzero(rows.any(axis=0))
    first, stop = (present[0], present[-1] + 1) if present.size else (0, 0)
    header = {
        "steps": list(counts),
        "first_exponent": MIN_EXPONENT + int(first),
        "num_sampled": [point.num_sampled for point in counts.values()],
        "log2_unit": [point.log2_unit for point in counts.values()],
    }
    return frame(header, {"counts": rows[:, first:stop]})


def fractions_frame(history: FractionHistory, tensor: int) -> bytes:
    """Return the out-of-range fractions of one stored tensor, array ``(T, F, 3)``."""
    # Array `blocks` has its losses to block formats, `(T, B, 4)`. The header's `share_read` is the
    # share of elements that the fractions come from, for every step.
    header = {
        "steps": history.steps.tolist(),
        "formats": [item.name for item in history.formats],
        "block_formats": [item.name for item in history.block_formats],
        "share_read": np.nan_to_num(history.share_read[:, tensor], nan=1.0).tolist(),
    }
    fractions, blocks = history.fractions[:, tensor], history.blocks[:, tensor]
    return frame(header, {"fractions": fractions, "blocks": blocks})
