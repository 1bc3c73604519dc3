"""Summarize a run: violations, trends, worst tensors, coverage, and the first NaN.

``lightning-unitscale diagnose RUN_DIR`` reads it from event files. ``ScaleMonitor`` writes it to
other loggers at the end of a training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.scales.layout import DIRECTIONS, finite
from lightning_unitscale.scales.snapshot_rows import lost_kinds
from lightning_unitscale.scales.violations import percent
from lightning_unitscale.tensorboard.table import Scales

_FIELDS: Final = ("kind", "step", "tensor", "module", "direction", "format", "value", "text")
_NONFINITE: Final = ("nonfinite", "loss")


@dataclass(frozen=True)
class Diagnosis:
    """The summary of a run.

    Attributes:
        violations: The alerts except trends, in the order of the steps.
        trends: Forecasts that a tensor will leave a format.
        worst: At the last sampled step the matmul operand whose stored RMS is farthest from 1
            (``"log2_rms"``), and the one that loses most to each format (``"E4M3FN.flushed"``), or
            whose blocks differ most (``"NVFP4.spread"``). Each has a tensor, a direction and a
            value.
        coverage: The share of matmuls and FLOPs scaled and in the format; ``None`` without a
            ``UnitScaleCallback``.
        first_nonfinite: The alert of the first NaN or infinity, if there was one.
    """

    violations: tuple[dict[str, Any], ...]
    trends: tuple[dict[str, Any], ...]
    worst: dict[str, dict[str, Any]]
    coverage: Mapping[str, Any] | None
    first_nonfinite: dict[str, Any] | None

    def __str__(self) -> str:
        lines = [
            *(f"violation: {alert['text']}" for alert in self.violations),
            *(f"trend: {alert['text']}" for alert in self.trends),
        ]
        for what, one in self.worst.items():
            gradient = "gradient of " if one["direction"] == "backward" else ""
            lines.append(f"worst {what}: {gradient}{one['tensor']} ({_shown(what, one['value'])})")
        if (found := self.coverage) is not None:
            text = f"{found['in_units']} of {found['matmuls']} matmuls scaled"
            if found["format"]:
                text += f", {found['in_format']} in {found['format']}"
                text += f" ({percent(found['flops_in_format'])} of the FLOPs)"
            lines += [f"coverage: {text}"]
            lines += [
                f"not covered: {percent(share)}: {why}" for why, share in found["reasons"].items()
            ]
        if self.first_nonfinite is not None:
            lines.append(f"first NaN or infinity: {self.first_nonfinite['text']}")
        return "\n".join(lines) or "No tensor was measured."

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``diagnose --json`` prints."""
        return asdict(self)


def diagnose(
    scales: Scales, alerts: Sequence[ScaleAlert], coverage: Mapping[str, Any] | None = None
) -> Diagnosis:
    """Summarize a run from the scales of its last step and its alerts."""
    found = [_alert(alert) for alert in alerts]
    nonfinite = [one for one in found if one["kind"] in _NONFINITE]
    # A loss is where it was seen, a tensor where it comes from.
    nonfinite.sort(key=lambda one: _NONFINITE.index(one["kind"]))
    return Diagnosis(
        tuple(one for one in found if one["kind"] != "trend"),
        tuple(one for one in found if one["kind"] == "trend"),
        _worst(scales),
        coverage,
        next(iter(nonfinite), None),
    )


def _alert(alert: ScaleAlert) -> dict[str, Any]:
    fields = {field: getattr(alert, field) for field in _FIELDS} | {"text": str(alert)}
    return fields | {"value": finite(alert.value)}


def _shown(what: str, value: float) -> str:
    if what == "log2_rms":
        return f"RMS 2^{value:.1f}"
    # Of the largest magnitudes of blocks, as a standard deviation.
    return f"a factor of 2^{value:.1f}" if what.endswith(".spread") else percent(value)


def _worst(scales: Scales) -> dict[str, dict[str, Any]]:
    worst: dict[str, dict[str, Any]] = {}

    def see(what: str, index: int, direction: str, value: float, size: float) -> None:
        if size > worst.get(what, {}).get("size", 0.0):
            worst[what] = {
                "tensor": scales.names[index], "module": scales.modules[index],
                "direction": direction, "value": value, "size": size,
            }  # fmt: skip

    for direction in DIRECTIONS:
        read = scales.read_by_matmuls(direction)
        rms = scales.log2_rms(direction, stored=True)
        lost = [*np.moveaxis(scales.fractions(direction), 1, 0)]
        lost += [*np.moveaxis(scales.block_shares(direction), 1, 0)]
        for index in np.flatnonzero((read if read.any() else ~read) & np.isfinite(rms)).tolist():
            see("log2_rms", index, direction, float(rms[index]), abs(float(rms[index])))
            for (name, kinds), shares in zip(lost_kinds(scales.layout), lost, strict=True):
                for kind, share in zip(kinds, np.nan_to_num(shares[index]).tolist(), strict=True):
                    see(f"{name}.{kind}", index, direction, share, share)
    return {what: {k: v for k, v in one.items() if k != "size"} for what, one in worst.items()}
