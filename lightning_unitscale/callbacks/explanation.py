"""What users are told: explanations, as HTML in a notebook, and what became of products."""

from __future__ import annotations

import html
from dataclasses import dataclass

from tabulate import tabulate

from lightning_unitscale.callbacks.packages import rank_zero_info, rank_zero_warn
from lightning_unitscale.dispatch.coverage import Coverage
from lightning_unitscale.lossless.gauge import Gauge, GaugePair
from lightning_unitscale.tensorboard.table import STEP_ITSELF


@dataclass(frozen=True)
class Table:
    """Rows under headers; ``str`` of it is text.

    Attributes:
        headers: One for each column.
        rows: Of texts.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return tabulate(self.rows, headers=self.headers, disable_numparse=True)

    def html(self) -> str:
        """The table for a page, with its texts escaped."""
        return tabulate(self.rows, headers=self.headers, tablefmt="html", disable_numparse=True)


class Explanation(str):
    """Text of several parts, which a notebook shows as HTML.

    Args:
        *parts: Texts and tables, from top to bottom; empty ones are left out.
    """

    parts: tuple[str | Table, ...]

    def __new__(cls, *parts: str | Table) -> Explanation:
        """The text of the parts, with a line between them."""
        shown = tuple(part for part in parts if str(part))
        text = super().__new__(cls, "\n\n".join(map(str, shown)))
        text.parts = shown
        return text

    def _repr_html_(self) -> str:
        return "\n".join(
            part.html() if isinstance(part, Table) else f"<pre>{html.escape(part)}</pre>"
            for part in self.parts
        )


class CountedSteps:
    """What became of the products of each step that was counted, by the step's name."""

    def __init__(self) -> None:
        self._coverages: dict[str, Coverage] = {}
        self._training_step = ""

    def __contains__(self, name: str) -> bool:
        return name in self._coverages

    @property
    def main(self) -> Coverage:
        """That of a training step, or of an evaluation on its own."""
        last = next(iter(self._coverages.values()), Coverage())
        return self._coverages.get(self._training_step, last)

    def add(self, name: str, coverage: Coverage, *, is_training: bool, is_rounding: bool) -> None:
        """Keep a count; of a step's first, tell one line, and warn if much of it ran plain.

        Args:
            name: Of the step.
            coverage: What was counted.
            is_training: Whether it is the step of training.
            is_rounding: Whether its products were rounded.
        """
        is_first = name not in self._coverages
        if is_training:
            self._training_step = name
        self._coverages[name] = coverage
        if not is_first:
            return
        if len(self._coverages) == 1 or is_training:
            rank_zero_info(f"UnitScaleCallback: {name}: {coverage.line()}.")
        # An evaluation that rounds nothing has the same numbers in units and without.
        matters = is_training or is_rounding
        if matters and (shortfall := coverage.shortfall()):
            rank_zero_warn(f"UnitScaleCallback: {name}: {shortfall}")

    def explain(self) -> list[str]:
        """A line for each step, and a table of the main one; empty before the first."""
        lines = [f"{name}: {coverage.line()}" for name, coverage in self._coverages.items()]
        return ["\n".join(lines), self.main.table()] if lines else []


def units_table(gauge: Gauge) -> Table | None:
    """The units of a gauge, a row for each tensor, by the module that makes it.

    A product has units for its operands and for the gradient that arrives at its result; results
    themselves have units where everything has (``depth="all"``).

    Returns:
        ``None`` before units are taken.
    """
    rows: dict[str, _Units] = {}
    for name, pair in (*gauge.pairs.items(), *gauge.parameters.items()):
        # As in "head.linear:unscaled:weight": what it is of, how it is made, its operand.
        result, *others = name.split(":")
        role = next((other for other in others if other != "unscaled"), "")
        rows.setdefault(result, _Units({})).pairs[role] = pair
    if not rows:
        return None
    # In the order in which modules first have a row.
    modules = dict.fromkeys(result.rpartition(".")[0] for result in rows)
    shown = [
        (module or STEP_ITSELF, result.rpartition(".")[2], *units.columns())
        for module in modules
        for result, units in rows.items()
        if result.rpartition(".")[0] == module
    ]
    headers = ("module", "tensor", "operands in units of", "value", "gradient")
    if not any(row[3] for row in shown):
        return Table((*headers[:3], headers[4]), tuple((*row[:3], row[4]) for row in shown))
    return Table(headers, tuple(shown))


@dataclass
class _Units:
    pairs: dict[str, GaugePair]

    def columns(self) -> tuple[str, str, str]:
        """Of the operands, of the value and of the gradient."""
        own = self.pairs.get("")
        operands = ", ".join(
            f"{role} 2^{pair.log2_sigma}" for role, pair in self.pairs.items() if role
        )
        if own is None:
            return operands, "", ""
        value = f"2^{own.log2_sigma}" if own.log2_sigma else ""
        return operands, value, f"2^{own.log2_gamma}"
