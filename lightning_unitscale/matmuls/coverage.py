"""Count how the matmuls of a step run: scaled, in a format, or unscaled and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import Tensor

from lightning_unitscale.capture.name_patterns import NOT_INCLUDED
from lightning_unitscale.matmuls.computations import EXEMPT
from lightning_unitscale.matmuls.matmul_formats import EXCLUDED_BY_DEFAULT, NO_LINEAR
from lightning_unitscale.scales.violations import percent

Kind = Literal["units", "format", "plain", "left out"]
# How the table shows a kind.
_RUN = {"units": "scaled", "format": "in format", "plain": "unscaled", "left out": "unrounded"}
# The reasons of a site's unscaled matmuls by slot, and the slot of this one.
PlainMatmul = tuple[Mapping[str, str], str]
# The share of a step's FLOPs below which we warn.
ENOUGH = 0.9
_NUM_NAMED = 5
NO_MATMUL = "no matmul ran"
NO_UNIT = "no unit yet"  # why a matmul runs outside of a format
# Documented reasons, which need no warning unless the module had the format before. Layers that
# are excluded by default need one only if they are a large part of the model.
_EXPECTED = frozenset({NO_LINEAR, NOT_INCLUDED, EXEMPT})
_EXPECTED_IF_SMALL = frozenset({EXCLUDED_BY_DEFAULT})


@dataclass(frozen=True)
class MatmulCount:
    """The matmuls of one module that ran the same way."""

    module: str  # path of the module; empty for the root
    # ``"units"`` (scaled), ``"format"`` (rounded to fewer bits, and scaled if there are units),
    # ``"plain"`` (unscaled), or ``"left out"`` (not in the format, and there are no units).
    kind: Kind
    reason: str  # why they ran unscaled or outside the format; empty otherwise
    num_matmuls: int  # in a step
    flops: int
    outside: str = ""  # why they ran outside the step's format; empty if they did not


@dataclass(frozen=True)
class Coverage:
    """The matmuls of one step, forward and backward."""

    # By module, kind and reason, in the order in which they ran.
    counts: tuple[MatmulCount, ...] = ()
    has_units: bool = True  # whether matmuls are scaled; if not, they are only rounded
    lacking: tuple[str, ...] = ()  # operands and gradients without a unit after the step
    format: str = ""  # the requested format of the step, such as ``"FP8"``; empty without one

    @property
    def num_matmuls(self) -> int:
        """Return the number of matmuls of the step."""
        return sum(count.num_matmuls for count in self.counts)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the step."""
        return sum(count.flops for count in self.counts)

    @property
    def num_in_units(self) -> int:
        """Return the number of matmuls that ran on scaled operands, rounded or not."""
        return sum(count.num_matmuls for count in self.counts if count.kind in ("units", "format"))

    @property
    def num_in_format(self) -> int:
        """Return the number of matmuls that ran in the format."""
        return sum(count.num_matmuls for count in self.counts if count.kind == "format")

    @property
    def reasons(self) -> Mapping[str, float]:
        """Return why matmuls ran unscaled, with their share of the step's FLOPs."""
        return self._shares(lambda one: one.reason if one.kind == "plain" else "")

    @property
    def reasons_outside(self) -> Mapping[str, float]:
        """Return why matmuls ran outside the format, with their share of the step's FLOPs."""
        return self._shares(lambda one: one.outside)

    def _shares(self, reason_of: Callable[[MatmulCount], str]) -> Mapping[str, float]:
        flops, total = _flops_by(self.counts, reason_of), self.flops or 1
        return {reason: count / total for reason, count in flops.most_common() if reason}

    def fraction_of_flops(self, *kinds: Kind) -> float:
        """Return the share of the step's FLOPs in matmuls of these kinds; 1 for a step of none."""
        if self.flops == 0:
            return 1.0
        return sum(count.flops for count in self.counts if count.kind in kinds) / self.flops

    def uncovered_modules(self) -> tuple[str, ...]:
        """Return the modules with unscaled matmuls, those with the most FLOPs first."""
        plain = [count for count in self.counts if count.kind == "plain"]
        return tuple(name for name, _ in _flops_by(plain, _module_name).most_common())

    def line(self) -> str:
        """Return a summary in one line, for the log."""
        if not self.counts:
            return f"{self.without_format()}{NO_MATMUL}"
        rounded = self.num_in_format
        format = self.format or "a format"
        how = "scaled" if self.has_units else f"in {format}"
        text = (
            f"{self.num_in_units} of {self.num_matmuls} matmuls {how} "
            f"({percent(self.fraction_of_flops('units', 'format'))} of their FLOPs)"
        )
        if rounded and self.has_units:
            share = percent(self.fraction_of_flops("format"))
            text += f", {rounded} of them in {format} ({share})"
        reasons = [f"{percent(share)} unscaled: {why}" for why, share in self.reasons.items()]
        reasons += [
            f"{percent(share)} outside {self.format}: {why}"
            for why, share in self.reasons_outside.items()
            if why not in self.reasons
        ]
        lacking = lacking_line(self.lacking)
        return "; ".join(filter(None, [self.without_format() + text, *reasons, lacking]))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers of matmuls, and the shares of FLOPs, scaled and in the format."""
        return {
            "matmuls": self.num_matmuls,
            "in_units": self.num_in_units,
            "in_format": self.num_in_format,
            "flops_in_units": self.fraction_of_flops("units", "format"),
            "flops_in_format": self.fraction_of_flops("format"),
            "format": self.format,
            "reasons": {**self.reasons, **self.reasons_outside},
        }

    def without_format(self) -> str:
        """Report that no matmul ran in the requested format; empty otherwise."""
        if not self.format or self.num_in_format:
            return ""
        return f"no matmul runs in {self.format}: "

    def shortfall(self) -> str:
        """Return a warning if much of a step ran unscaled; empty otherwise."""
        modules = self.uncovered_modules()
        if not modules or 1.0 - self.fraction_of_flops("plain") >= ENOUGH:
            return ""
        wanted = "scaled" if self.has_units else "rounded"
        return (
            f"{self.line()}. Unscaled matmuls are in {listed(modules)}. Expected at least "
            f"{ENOUGH:.0%} of the FLOPs {wanted}. explain() lists all matmuls."
        )

    def table(self) -> str:
        """Return a table with a row for each module, kind and reason."""
        total = self.flops or 1
        rows = [
            (
                count.module or "(the step itself)",
                count.num_matmuls,
                percent(count.flops / total),
                _RUN[count.kind],
                count.reason or count.outside,
            )
            for count in self.counts
        ]
        return tabulate(rows, headers=("module", "matmuls", "FLOPs", "run", "why"))


def _flops_by(counts: Iterable[MatmulCount], key: Callable[[MatmulCount], Any]) -> Counter[Any]:
    flops = Counter[Any]()
    for count in counts:
        flops[key(count)] += count.flops
    return flops


def _module_name(count: MatmulCount) -> str:
    return count.module or "the step itself"


class CoverageCounter:
    """A counter of the matmuls of a running step."""

    def __init__(self) -> None:
        self._counted: list[tuple[str, Kind, str, int, PlainMatmul | None, str]] = []

    def add(
        self,
        module: str,
        kind: Kind,
        reason: str,
        flops: int,
        plain: PlainMatmul | None = None,
        outside: str = "",
    ) -> None:
        """Count one matmul."""
        self._counted.append((module, kind, reason, flops, plain, outside))

    def add_with_gradients(
        self, module: str, kind: Kind, reason: str, flops: int, operands: Sequence[Tensor]
    ) -> None:
        """Count a matmul and its backward matmuls, which cannot be attributed later."""
        num_gradients = sum(operand.requires_grad for operand in operands)
        for _ in range(1 + num_gradients if torch.is_grad_enabled() else 1):
            self.add(module, kind, reason, flops)

    def outside(self) -> set[tuple[str, str]]:
        """Return the modules that ran outside the step's format, each with a reason."""
        return {
            (module, outside or reason)
            for module, kind, reason, _, _, outside in self._counted
            if outside or kind == "plain"
        }

    def result(
        self, *, has_units: bool = True, lacking: Iterable[str] = (), format: str = ""
    ) -> Coverage:
        """Return the counts, with the latest decisions on unscaled matmuls applied."""
        joint: dict[tuple[str, Kind, str, str], list[int]] = {}
        for module, kind, reason, flops, plain, outside in self._counted:
            if kind == "units" and plain is not None and (reason := plain[0].get(plain[1], "")):
                kind = "plain"
            if kind == "plain" and format:
                outside = outside or reason
            entry = joint.setdefault((module, kind, reason, outside if format else ""), [0, 0])
            entry[0] += 1
            entry[1] += flops
        counts = tuple(
            MatmulCount(module, kind, reason, count, flops, outside)
            for (module, kind, reason, outside), (count, flops) in joint.items()
        )
        return Coverage(counts, has_units, tuple(lacking), format)


def lacking_line(names: Sequence[str]) -> str:
    """List the operands without a unit; empty if there are none."""
    if not names:
        return ""
    some = "1 operand has" if len(names) == 1 else f"{len(names)} operands have"
    return f"{some} no unit yet (zero or not finite so far): {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Join the first few names."""
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


def join_first(texts: Sequence[str]) -> str:
    """Join the first few texts, and count the rest."""
    more = len(texts) - _NUM_NAMED
    return "; ".join(texts[:_NUM_NAMED]) + (f"; and {more} more" if more > 0 else "")


class LostFormats:
    """The comparison of a step's coverage with that of earlier steps."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        # By the name of a step: its last coverage, the modules that had the format, and the
        # modules and reasons outside it.
        self._last: dict[str, Coverage] = {}
        self._had_format: defaultdict[str, set[str]] = defaultdict(set)
        self._known: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self._num_empty: Counter[str] = Counter()  # steps without a matmul before the first one

    def are_known(self, name: str, counter: CoverageCounter) -> bool:
        """Check whether all modules and reasons outside the format are known."""
        return counter.outside() <= self._known[name]

    def new_in(self, name: str, coverage: Coverage, when: str) -> str:
        """Return a warning after a step; empty if nothing was lost since the last one."""
        if not coverage.format:
            return ""
        last, self._last[name] = self._last.get(name), coverage
        lost = self._lost(name, coverage)
        had_format, known = self._had_format[name], self._known[name]
        known.update((count.module, count.outside) for count in coverage.counts if count.outside)
        had_format.update(count.module for count in coverage.counts if count.kind == "format")
        if last is None or not last.counts:
            if not coverage.num_in_format:
                self._num_empty[name] += not coverage.counts
                # A step may skip its first batch.
                if not coverage.counts and self._num_empty[name] != 2:
                    return ""
                reasons = _named([count for count in coverage.counts if count.outside])
                return f"{self._wanted}: {coverage.without_format()}{reasons or NO_MATMUL}"
            return f"{self._wanted}: {_text(lost, coverage)}" if lost else ""
        if not lost:
            return ""
        before, now = (percent(one.fraction_of_flops("format")) for one in (last, coverage))
        return (
            f"{self._wanted}: coverage by {coverage.format} went from {before} to {now} of the "
            f"FLOPs at {when}: {_text(lost, coverage)}"
        )

    def _lost(self, name: str, coverage: Coverage) -> list[MatmulCount]:
        had_format, known = self._had_format[name], self._known[name]
        expected = _EXPECTED
        layers = [count for count in coverage.counts if count.outside not in _EXPECTED]
        flops = _flops_by(layers, lambda count: count.kind == "format")
        if flops[True] / (flops.total() or 1) >= ENOUGH:
            expected |= _EXPECTED_IF_SMALL
        return [
            count
            for count in coverage.counts
            # A missing unit is temporary, and the coverage line reports it. One computation of a
            # matmul in the format may be exempt.
            if count.outside not in ("", NO_UNIT, EXEMPT)
            and (count.module, count.outside) not in known
            and (count.module in had_format or count.outside not in expected)
        ]


def _text(lost: Sequence[MatmulCount], coverage: Coverage) -> str:
    count = sum(one.num_matmuls for one in lost)
    share = percent(sum(one.flops for one in lost) / (coverage.flops or 1))
    return (
        f"{count} of {coverage.num_matmuls} matmuls ({share} of the FLOPs) run outside "
        f"{coverage.format}: {_named(lost)}"
    )


def _named(counts: Sequence[MatmulCount]) -> str:
    """List modules and reasons, those with the most FLOPs first."""
    flops = _flops_by(counts, lambda count: (_module_name(count), count.outside))
    return join_first([f"{module} ({reason})" for (module, reason), _ in flops.most_common()])
