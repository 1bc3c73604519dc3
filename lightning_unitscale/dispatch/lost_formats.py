"""Notice matmuls that run outside of the format that was asked for, and report each loss once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from lightning_unitscale.dispatch.coverage import (
    ENOUGH,
    NO_PRODUCT,
    Coverage,
    CoverageCounter,
    ProductCount,
    percent,
)
from lightning_unitscale.dispatch.formats import NO_UNIT
from lightning_unitscale.graph.name_patterns import NOT_INCLUDED
from lightning_unitscale.precision.fp8 import EXCLUDED_BY_DEFAULT, NO_LINEAR

# Reasons that the documentation gives for every model: these need no warning, unless the module had
# the format before. What is excluded by default needs one only if it is a large part of the model.
_EXPECTED = frozenset({NO_LINEAR, NOT_INCLUDED})
_EXPECTED_IF_SMALL = frozenset({EXCLUDED_BY_DEFAULT})
_NAMED = 5


class LostFormats:
    """Compares the coverage of a step with that of the steps before it."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        # By the name of a step: its last coverage, modules that had the format, and what ran
        # outside, module and reason.
        self._last: dict[str, Coverage] = {}
        self._had_format: defaultdict[str, set[str]] = defaultdict(set)
        self._known: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)

    def are_known(self, name: str, counter: CoverageCounter) -> bool:
        """Return whether all that ran outside of the format in a step did so before."""
        return counter.outside() <= self._known[name]

    def new_in(self, name: str, coverage: Coverage, when: str) -> str:
        """Return what to warn of after a step; empty if nothing was lost since the last one."""
        if not coverage.format:
            return ""
        last, self._last[name] = self._last.get(name), coverage
        lost = self._lost(name, coverage)
        had_format, known = self._had_format[name], self._known[name]
        known.update((count.module, count.outside) for count in coverage.counts if count.outside)
        had_format.update(count.module for count in coverage.counts if count.kind == "format")
        if last is None:
            if not coverage.num_in_format:
                reasons = _named([count for count in coverage.counts if count.outside])
                return f"{self._wanted}: {coverage.without_format()}{reasons or NO_PRODUCT}"
            return f"{self._wanted}: {_text(lost, coverage)}" if lost else ""
        if not lost:
            return ""
        before, now = (percent(one.fraction_of_flops("format")) for one in (last, coverage))
        return (
            f"{self._wanted}: coverage by {coverage.format} went from {before} to {now} of the "
            f"FLOPs at {when}: {_text(lost, coverage)}"
        )

    def _lost(self, name: str, coverage: Coverage) -> list[ProductCount]:
        had_format, known = self._had_format[name], self._known[name]
        expected = _EXPECTED
        if _share_of_layers(coverage) >= ENOUGH:
            expected |= _EXPECTED_IF_SMALL
        return [
            count
            for count in coverage.counts
            # What has no unit yet is named in the line, and does not last.
            if count.outside not in ("", NO_UNIT)
            and (count.module, count.outside) not in known
            and (count.module in had_format or count.outside not in expected)
        ]


def _share_of_layers(coverage: Coverage) -> float:
    """Share of the format among the matmuls that can have it."""
    flops = Counter[bool]()
    for count in coverage.counts:
        if count.outside not in _EXPECTED:
            flops[count.kind == "format"] += count.flops
    return flops[True] / (flops.total() or 1)


def _text(lost: Sequence[ProductCount], coverage: Coverage) -> str:
    count = sum(one.num_products for one in lost)
    share = percent(sum(one.flops for one in lost) / (coverage.flops or 1))
    return (
        f"{count} of {coverage.num_products} matmuls ({share} of the FLOPs) run outside "
        f"{coverage.format}: {_named(lost)}"
    )


def _named(counts: Sequence[ProductCount]) -> str:
    """Modules with the reason of each, those with the most operations first."""
    flops = Counter[tuple[str, str]]()
    for count in counts:
        flops[count.module or "the step itself", count.outside] += count.flops
    named = [f"{module} ({reason})" for (module, reason), _ in flops.most_common()]
    more = len(named) - _NAMED
    return "; ".join(named[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
