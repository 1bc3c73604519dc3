"""The precision report of a step: what each computation of each matmul costs in a format."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from lightning_unitscale.matmuls.computations import EXEMPT, Computation, Exemption, Exemptions
from lightning_unitscale.matmuls.measurement import FORWARD, Site
from lightning_unitscale.scales.layout import finite

_HEADERS = ("matmul", "computation", "format", "damage", "FLOPs", "adds", "inherits",
            "why outside")  # fmt: skip
_KINDS = ((True, "Damage: change of the loss"), (False, "Damage: error of the gradient"))


@dataclass(frozen=True)
class LedgerRow:
    """One computation of one matmul in a format: a row of a precision report.

    Attributes:
        name: Name of the matmul.
        module: Path of its module.
        computation: ``"forward"``, ``"input_gradient"`` or ``"weight_gradient"``.
        format: Name of the format.
        added: Relative error of the result if only this computation is rounded.
        inherited: Relative error that comes from its operands if all computations are rounded.
        loss_change: The damage of rounding only this computation: the predicted change of the
            step's loss, or for a gradient the error of the whole gradient relative to its norm.
            ``None`` for a matmul that no format can reach, and for a forward matmul before all
            trained parameters, since no gradient arrives there.
        lasting: The part of the damage that stays on average over many steps: the second order of
            the loss and, on a moving grid, the mean of its first order over several positions.
        flops: Its FLOPs.
        reason: Why it does not run in the module's own format. ``None`` if it does, or without one.
    """

    name: str
    module: str
    computation: Computation
    format: str
    added: float | None = None
    inherited: float | None = None
    loss_change: float | None = None
    lasting: float = 0.0
    flops: int = 0
    reason: str | None = None

    @property
    def runs_in_format(self) -> bool:
        """Check whether it runs in the module's own format, or can be rounded without one."""
        return self.reason is None

    @property
    def is_forward(self) -> bool:
        """Check whether it is a forward computation."""
        return self.computation == FORWARD

    def is_left_out(self, exemptions: Exemptions) -> bool:
        """Check whether some exemptions leave it out."""
        return exemptions.covers(Site(self.name, self.module, ()), self.computation)


@dataclass(frozen=True)
class Together:
    """The damage of rounding several computations at once.

    Attributes:
        loss_change: Change of the step's loss if the forward computations are rounded.
        gradient_error: Error of the whole gradient relative to its norm, if the backward
            computations are rounded and the forward ones are not.
        lasting: Mean change of the loss over positions of a moving grid, if the report had at least
            four pairs.
    """

    loss_change: float
    gradient_error: float
    lasting: float | None = None


@dataclass(frozen=True)
class PrecisionReport:
    """What low precision costs in a step: a row for each computation of each matmul.

    Attributes:
        loss: Loss of the unrounded step.
        rows: The rows of all formats.
        together: For each format, the damage measured with all computations rounded at once.
        exempt: Computations that were not rounded in these measurements.
        cost_steps: Time of the report, in steps of the same batch.
    """

    loss: float
    rows: tuple[LedgerRow, ...]
    together: dict[str, Together]
    exempt: tuple[Exemption, ...]
    cost_steps: float

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the names of its formats."""
        return tuple(self.together)

    def rows_of(self, format: str | None = None) -> tuple[LedgerRow, ...]:
        """Return the rows of a format, by default of the first."""
        wanted = self.formats[0] if format is None else format
        return tuple(row for row in self.rows if row.format == wanted)

    def predicted(
        self, format: str | None = None, exempt: Sequence[Exemption] | None = None
    ) -> Together:
        """Predict the damage of rounding all computations of a format but the exempt ones."""
        rows = self._rounded(format, self.exempt if exempt is None else exempt)
        return Together(
            sum(row.loss_change or 0.0 for row in rows if row.is_forward),
            math.hypot(*(row.loss_change or 0.0 for row in rows if not row.is_forward)),
        )

    def _rounded(self, format: str | None, exempt: Sequence[Exemption]) -> list[LedgerRow]:
        """Return the rows of a format that are rounded together, with some exempt."""
        exemptions = Exemptions(exempt)
        return [
            row
            for row in self.rows_of(format)
            if row.runs_in_format and not row.is_left_out(exemptions)
        ]

    def predicted_gain(self, exempt: Sequence[Exemption], format: str | None = None) -> Together:
        """Predict how far loss and gradient error fall, on average over steps, by more exemptions.

        The damage measured with everything rounded differs from the sum of the rows, since rounded
        results are rounded again. It is divided in proportion to the rows: to their lasting damage
        for the loss, and to their squared errors for the gradient. Without a measured mean change
        of the loss, the loss falls by the lasting damage of the rows.
        """
        word = self.formats[0] if format is None else format
        before, exemptions = Exemptions(self.exempt), Exemptions(exempt)
        rows = [
            row
            for row in self.rows_of(word)
            if row.loss_change is not None and row.runs_in_format and not row.is_left_out(before)
        ]
        gone = [row for row in rows if row.is_left_out(exemptions)]
        squares = {row: row.lasting**2 for row in rows if not row.is_forward}
        left = sum(square for row, square in squares.items() if row not in set(gone))
        share = left / max(sum(squares.values()), 1e-300)
        measured, parts = self.together[word].lasting, sum(r.lasting for r in rows if r.is_forward)
        falls = sum(row.lasting for row in gone if row.is_forward)
        if measured is not None and measured > 0.0 and parts > 0.0:
            falls *= measured / parts
        return Together(
            falls, self.together[word].gradient_error * (1.0 - math.sqrt(share)) if squares else 0.0
        )

    def remainder(self, format: str | None = None) -> Together:
        """Return the measured damage of rounding all computations at once, minus the predicted."""
        measured = self.together[self.formats[0] if format is None else format]
        predicted = self.predicted(format)
        return Together(
            measured.loss_change - predicted.loss_change,
            measured.gradient_error - predicted.gradient_error,
        )

    def smallest_exemption(
        self, share: float = 0.5, format: str | None = None
    ) -> tuple[Exemption, ...]:
        """Return computations to leave out, with few FLOPs, so that a share of the damage remains.

        The share holds for the lasting change of the loss, and for the squared error of the
        gradient. Computations are left out in the order of their damage per FLOP. Those that are in
        ``exempt`` already do not count.

        Args:
            share: Largest share of the damage that may remain, 0 to 1.
            format: Name of one of the report's formats, by default the first.

        Raises:
            ValueError: If the share is out of its range.
        """
        check_share("share", share)
        before = Exemptions(self.exempt)
        candidates = [
            row
            for row in self.rows_of(format)
            if row.reason in (None, EXEMPT) and not row.is_left_out(before)
        ]
        return tuple(
            exemption
            for is_forward in (True, False)
            for exemption in _cheapest(
                [row for row in candidates if row.is_forward == is_forward], share
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as a dictionary of plain values."""
        names = (
            *("name", "module", "computation", "format", "added", "inherited", "loss_change"),
            *("runs_in_format", "reason"),
        )
        rest = [self.remainder(each).loss_change for each in self.formats]
        return {
            "matmuls": [{name: finite(getattr(row, name)) for name in names} for row in self.rows],
            "remainder": finite(max(rest, key=abs)),
            "exempt": [list(each) for each in (*self.exempt, *self.smallest_exemption())],
        }

    def table(self, limit: int | None = None) -> str:
        """Return a table for each kind of damage, with the most damage first."""
        parts = []
        for is_forward, title in _KINDS:
            cells = [self._cells(row) for row in self._by_damage(is_forward)[:limit]]
            parts.append(f"{title}\n{tabulate(cells, _HEADERS, disable_numparse=True)}")
        return "\n\n".join(parts)

    def as_page(self) -> dict[str, Any]:
        """Return the data of the dashboard: the lines of the summary, and the tables as texts."""
        return {
            "summary": self.summary().splitlines(),
            "columns": list(_HEADERS),
            "tables": [
                {
                    "title": title,
                    "direction": "forward" if is_forward else "backward",
                    "rows": [list(self._cells(row)) for row in self._by_damage(is_forward)],
                }
                for is_forward, title in _KINDS
            ],
        }

    def _by_damage(self, is_forward: bool) -> list[LedgerRow]:
        rows = [row for row in self.rows if row.is_forward == is_forward]
        return sorted(rows, key=lambda row: -abs(row.loss_change or 0.0))

    def _cells(self, row: LedgerRow) -> tuple[str, ...]:
        return (
            row.name,
            row.computation,
            row.format,
            "" if row.loss_change is None else f"{row.loss_change:.3g}",
            _percent(row.flops / max(self._flops[row.format], 1)),
            _percent(row.added),
            _percent(row.inherited),
            row.reason or "",
        )

    @functools.cached_property
    def _flops(self) -> Counter[str]:
        """Return the FLOPs of all rows, by format."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.format] += row.flops
        return counts

    def summary(self) -> str:
        """Return a line for each format: measured together, predicted, and the remainder."""
        lines = [f"Loss {self.loss:.6g}; the report cost {self.cost_steps:.1f} steps."]
        for format, measured in self.together.items():
            predicted, rows = self.predicted(format), self.rows_of(format)
            number = len(self._rounded(format, self.exempt))
            what = "all" if number == len(rows) else f"{number} of {len(rows)} computations"
            lines.append(
                f"{format}, {what} rounded: loss {measured.loss_change:+.3g} "
                f"(predicted {predicted.loss_change:+.3g}), gradient error "
                f"{measured.gradient_error:.3g} (predicted {predicted.gradient_error:.3g})"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.summary()}"


def check_share(name: str, share: object) -> None:
    """Refuse a share of the damage that is no number from 0 to 1."""
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0.0 <= share <= 1.0:  # type: ignore[operator]
        raise ValueError(
            f"{name}={share!r}: not a share of the damage. Expected a number from 0 to 1. Pass "
            "0.5 to leave out what causes half of it."
        )


def _cheapest(rows: Sequence[LedgerRow], share: float) -> list[Exemption]:
    # Errors of the gradient add up as squares.
    damages = {
        row: max(row.lasting, 0.0) if row.is_forward else row.lasting**2
        for row in rows
        if math.isfinite(row.lasting)
    }
    left, wanted = sum(damages.values()), share * sum(damages.values())
    chosen = []
    for row in sorted(damages, key=lambda row: -damages[row] / max(row.flops, 1)):
        if left <= wanted or damages[row] == 0.0:
            break
        left -= damages[row]
        chosen.append((row.name, row.computation))
    return chosen


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.0f} %" if value > 0.1 else f"{100 * value:.2g} %"
