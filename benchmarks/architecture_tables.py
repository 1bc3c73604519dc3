"""The results of ``architectures.py``, and their tables."""

from __future__ import annotations

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
    """One architecture; ``error`` is set when it did not run."""

    architecture: str
    plain: Shares | None = None
    ours: Shares | None = None
    repeatable: bool = True
    tracking_equal: bool | None = None
    loss_equal: bool = False
    num_gradients: int = 0
    differing: list[str] = field(default_factory=list)
    largest_difference: float = 0.0
    warnings: list[str] = field(default_factory=list)
    far: list[tuple[str, str, float]] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


def table(results: list[Result]) -> str:
    """One row per architecture, in full."""
    rows = []
    for one in results:
        if one.error or one.plain is None or one.ours is None:
            rows.append([one.architecture, "FAILED", one.error[:40]])
            continue
        rows.append(
            [
                one.architecture,
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
                {None: "-", True: "equal", False: "DIFFERS"}[one.tracking_equal],
            ]
        )
    headers = [
        "architecture", "loss", "equal gradients", "difference", "operands", "plain",
        "ours", "stored", "gradients", "plain", "ours", "tracked",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, disable_numparse=True)


def markdown(results: list[Result]) -> str:
    """One row per architecture, as the docs have it."""
    rows = []
    for one in results:
        if one.error or one.plain is None or one.ours is None:
            rows.append([one.architecture, "does not run"])
            continue
        rows.append(
            [
                one.architecture,
                _bits(one),
                one.ours.num_forward,
                f"{one.plain.forward:.0%}",
                f"{one.ours.forward:.0%}",
                one.ours.num_gradients,
                f"{one.plain.gradients:.0%}",
                f"{one.ours.gradients:.0%}",
                {None: "-", True: "same", False: "differs"}[one.tracking_equal],
            ]
        )
    headers = [
        "architecture", "bits", "operands", "plain", "ours", "gradients", "plain", "ours",
        "tracked",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def summary(results: list[Result]) -> str:
    """Return how many ran and kept their bits, as a line."""
    ran = [one for one in results if not one.error]
    near = [
        one
        for one in ran
        if one.ours and min(one.ours.forward, one.ours.stored, one.ours.gradients) >= 0.99
    ]
    return (
        f"{len(ran)} of {len(results)} ran, loss equal on "
        f"{sum(one.loss_equal for one in ran)}, every gradient equal on "
        f"{sum(not one.differing for one in ran)}, at least 99 % of operands and of gradients "
        f"near 1 on {len(near)}; plain model repeatable on {sum(o.repeatable for o in ran)}"
    )


def _equal_gradients(one: Result) -> str:
    return f"{one.num_gradients - len(one.differing)}/{one.num_gradients}"


def _bits(one: Result) -> str:
    if one.loss_equal and not one.differing:
        return f"same, {_equal_gradients(one)}"
    loss = "same loss" if one.loss_equal else "other loss"
    return f"{loss}, {_equal_gradients(one)} (by {one.largest_difference:.0e})"
