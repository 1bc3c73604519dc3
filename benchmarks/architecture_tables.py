"""What ``architectures.py`` found, and its tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tabulate import tabulate


@dataclass
class Shares:
    """Shares of operands near RMS 1, and how many operands there were."""

    forward: float
    num_forward: int
    stored: float
    gradients: float
    num_gradients: int


@dataclass
class Result:
    """One architecture at one depth; ``error`` is set when it did not run."""

    architecture: str
    depth: str
    plain: Shares | None = None
    ours: Shares | None = None
    repeatable: bool = True
    tracking_equal: bool | None = None
    loss_equal: bool = False
    num_gradients: int = 0
    differing: list[str] = field(default_factory=list)
    largest_difference: float = 0.0
    num_graphs: int = 0
    graph_breaks: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    far: list[tuple[str, str, float]] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


def table(results: list[Result]) -> str:
    """One row per architecture and depth."""
    rows = []
    for one in results:
        if one.error or one.plain is None or one.ours is None:
            rows.append([one.architecture, one.depth, "FAILED", one.error[:40]])
            continue
        rows.append(
            [
                one.architecture,
                one.depth,
                "equal" if one.loss_equal else "DIFFERS",
                _equal_gradients(one),
                f"{one.largest_difference:.0e}" if one.differing else "0",
                one.ours.num_forward,
                f"{one.plain.forward:.0%}",
                f"{one.ours.forward:.1%}",
                f"{one.ours.stored:.1%}",
                one.ours.num_gradients,
                f"{one.plain.gradients:.0%}",
                f"{one.ours.gradients:.1%}",
                one.num_graphs,
                len(one.graph_breaks),
                {None: "-", True: "equal", False: "DIFFERS"}[one.tracking_equal],
            ]
        )
    headers = [
        "architecture", "depth", "loss", "equal gradients", "difference", "operands", "plain",
        "ours", "stored", "gradients", "plain", "ours", "graphs", "breaks", "tracked",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, disable_numparse=True)


def markdown(results: list[Result]) -> str:
    """One row per architecture, both depths in it."""
    rows = []
    for name in dict.fromkeys(one.architecture for one in results):
        found = {one.depth: one for one in results if one.architecture == name}
        ran = [one for one in found.values() if not one.error]
        first = next(iter(ran), None)
        if first is None or first.plain is None or first.ours is None:
            rows.append([name, "does not run"])
            continue
        rows.append(
            [
                name,
                *(_bits(found.get(depth)) for depth in ("products", "all")),
                first.ours.num_forward,
                f"{first.plain.forward:.0%}",
                _shares(ran, "forward"),
                first.ours.num_gradients,
                f"{first.plain.gradients:.0%}",
                _shares(ran, "gradients"),
                {None: "-", True: "same", False: "differs"}[ran[-1].tracking_equal],
            ]
        )
    headers = [
        "architecture", "bits, products", "bits, all", "operands", "plain", "ours", "gradients",
        "plain", "ours", "tracked",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def summary(results: list[Result]) -> str:
    """One line per depth."""
    lines = []
    for depth in dict.fromkeys(one.depth for one in results):
        group = [one for one in results if one.depth == depth]
        ran = [one for one in group if not one.error]
        near = [
            one
            for one in ran
            if one.ours and min(one.ours.forward, one.ours.stored, one.ours.gradients) >= 0.99
        ]
        lines.append(
            f"{depth}: {len(ran)} of {len(group)} ran, loss equal on "
            f"{sum(one.loss_equal for one in ran)}, every gradient equal on "
            f"{sum(not one.differing for one in ran)}, at least 99 % of operands and of gradients "
            f"near 1 on {len(near)}; plain model repeatable on {sum(o.repeatable for o in ran)}"
        )
    return "\n".join(lines)


def _equal_gradients(one: Result) -> str:
    return f"{one.num_gradients - len(one.differing)}/{one.num_gradients}"


def _bits(one: Result | None) -> str:
    if one is None:
        return "-"
    if one.error:
        return "not captured"
    if one.loss_equal and not one.differing:
        return f"same, {_equal_gradients(one)}"
    loss = "same loss" if one.loss_equal else "other loss"
    return f"{loss}, {_equal_gradients(one)} (by {one.largest_difference:.0e})"


def _shares(found: Iterable[Result], name: str) -> str:
    shares = [f"{getattr(one.ours, name):.0%}" for one in found]
    return shares[0] if len(set(shares)) == 1 else " / ".join(shares)
