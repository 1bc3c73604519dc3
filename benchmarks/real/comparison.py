"""Compare two training runs, bit by bit."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

from .apart import Failure
from .bits import same_bits
from .training import Run


@dataclass(frozen=True)
class Compared:
    """One variant beside the plain run.

    Attributes:
        error: What was raised, in one line; everything else is then empty.
        equal: ``"equal"``, or what is not.
        loss: The last loss (or, where the module returns none, the first logged number).
        first_step: Seconds of the first step.
        later_steps: Median seconds of the others.
        peak_bytes: Memory that training took.
        num_matmuls: Matmuls of a step, forward and backward.
        num_in_units: Those that ran in units, rounded or not.
        flops_in_units: Their share of the matmuls' floating-point operations.
        reasons: Why others ran plain, with their share.
        loss_gap: By how much losses (or what is logged, if the module returns none) differ at most,
            relative to plain.
        parts: Calls of captured graphs in a step, where steps are captured.
        uncaptured: Why the step runs as it is, where they ought to be.
        warnings: Its warnings that the plain run did not have.
    """

    error: str = ""
    equal: str = ""
    loss: float | None = None
    first_step: float = 0.0
    later_steps: float = 0.0
    peak_bytes: int = 0
    num_matmuls: int | None = None
    num_in_units: int | None = None
    flops_in_units: float | None = None
    reasons: dict[str, float] = field(default_factory=dict)
    loss_gap: float = 0.0
    parts: int | None = None
    uncaptured: str = ""
    warnings: list[str] = field(default_factory=list)


def compared(plain: Run, ours: Run | Failure) -> Compared:
    if isinstance(ours, Failure):
        return Compared(error=ours.text)
    # The monitor logs numbers of its own.
    values = ours.losses or [
        ours.logs[-1][name] for name in plain.logs[-1] if name in ours.logs[-1]
    ]
    counted: dict[str, Any] = {}
    if (coverage := ours.coverage) is not None:
        counted = {
            "num_matmuls": coverage.num_matmuls,
            "num_in_units": coverage.num_in_units,
            "flops_in_units": coverage.fraction_of_flops("units", "format"),
            "reasons": dict(coverage.reasons),
        }
    return Compared(
        equal=difference(plain, ours) or "equal",
        loss=values[-1].float().mean().item() if values else None,
        first_step=ours.seconds[0],
        later_steps=statistics.median(ours.seconds[1:]),
        peak_bytes=ours.peak_bytes,
        **counted,
        loss_gap=_loss_gap(plain, ours),
        parts=ours.parts,
        uncaptured=ours.uncaptured,
        warnings=sorted(ours.warnings - plain.warnings),
    )


def _loss_gap(plain: Run, ours: Run) -> float:
    pairs = [*zip(plain.losses, ours.losses, strict=False)]
    if not pairs:
        steps = zip(plain.logs, ours.logs, strict=False)
        pairs = [(a[name], b[name]) for a, b in steps for name in a.keys() & b.keys()]
    # A loss of zero has no relative difference.
    sizes = [(a, b, torch.where(a == 0, 1, a.abs())) for a, b in pairs if a.numel()]
    gaps = [((b - a).abs() / size).max().item() for a, b, size in sizes]
    return max(gaps, default=0.0)


def difference(plain: Run, ours: Run) -> str:
    """What of the two runs has other bits; empty if nothing has."""
    parts = []
    if len(plain.losses) != len(ours.losses):
        parts.append(f"{len(ours.losses)} losses, not {len(plain.losses)}")
    for step, (first, second) in enumerate(zip(plain.losses, ours.losses, strict=False)):
        if not same_bits(first, second):
            gap = ((first - second).abs() / first.abs()).max().item()
            parts.append(f"losses from step {step} ({gap:.0e})")
            break
    parts += _different_logs(plain, ours)
    differing = [
        name
        for name, value in plain.state.items()
        if name not in ours.state or not same_bits(value, ours.state[name])
    ]
    if differing:
        parts.append(f"{len(differing)} of {len(plain.state)} weights")
    if extra := ours.state.keys() - plain.state.keys():
        parts.append(f"{len(extra)} more weights")
    return ", ".join(parts)


def _different_logs(plain: Run, ours: Run) -> list[str]:
    """The first step whose logged numbers differ; what only our run logs is its own."""
    for step, (expected, logged) in enumerate(zip(plain.logs, ours.logs, strict=False)):
        for name, value in expected.items():
            if name not in logged or not same_bits(value, logged[name]):
                return [f"logs from step {step} ({name})"]
    return []
