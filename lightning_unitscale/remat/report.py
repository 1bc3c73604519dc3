"""A plan in words, in numbers and as a curve of bytes over the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lightning_unitscale.remat.budget import format_bytes
from lightning_unitscale.remat.planner import RematPlan


@dataclass(frozen=True)
class RematReport:
    """What a plan keeps and runs again.

    Attributes:
        plan_name: Where the plan comes from.
        plan_hash: Equal on all ranks that planned the same.
        peak_bytes: Predicted peak of all bytes alive in a step.
        peak_at: Pass and node of the peak.
        saved_bytes: Bytes kept for the backward pass, each storage once.
        recomputed: How often each kind of operation runs again.
        recomputed_flops: Floating-point operations of these.
        recomputed_seconds: Their estimated time.
        sizes: The numbers that the plan assumes for sizes that change from call to call.
    """

    plan_name: str
    plan_hash: str
    peak_bytes: int
    peak_at: str
    saved_bytes: int
    recomputed: Mapping[str, int] = field(default_factory=dict)
    recomputed_flops: float = 0.0
    recomputed_seconds: float = 0.0
    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: RematPlan) -> RematReport:
        """The report of a plan."""
        nodes = plan.problem.nodes
        counts = Counter(nodes[i].kind for i in plan.again.tolist() if nodes[i].seconds > 0)
        direction, node = plan.timeline.peak_at
        return cls(
            plan.name,
            plan.hash,
            plan.peak_bytes,
            f"{direction} {nodes[node].name} ({nodes[node].kind})",
            plan.saved_bytes,
            dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
            plan.flops,
            plan.seconds,
            plan.problem.sizes,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {**self.__dict__, "recomputed": dict(self.recomputed)}

    def table(self) -> str:
        """The report as text."""
        sizes = ", ".join(map(str, self.sizes))
        rows = [
            ("plan", f"{self.plan_name} {self.plan_hash}"),
            ("predicted peak", f"{format_bytes(self.peak_bytes)} at {self.peak_at}"),
            *([("for sizes", f"{sizes}; others share the plan")] if sizes else []),
            ("saved for backward", format_bytes(self.saved_bytes)),
            (
                "recomputed",
                f"{sum(self.recomputed.values())} operations, {self.recomputed_flops / 1e9:.3f} "
                f"GFLOP, {1e3 * self.recomputed_seconds:.2f} ms by estimate",
            ),
            *((f"  {kind}", count) for kind, count in self.recomputed.items()),
        ]
        return tabulate(rows, tablefmt="plain")


def plot_front(plans: Sequence[RematPlan], path: str | Path) -> None:
    """Write the front as a picture: estimated time added to a step over its peak.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure, axes = new_figure()
    axes.plot([one.peak_bytes / 2**20 for one in plans], [1e3 * one.seconds for one in plans], "o-")
    axes.set_xlabel("peak of a step, MiB")
    axes.set_ylabel("recomputed, ms by estimate")
    figure.savefig(path)


def plot_timeline(plan: RematPlan, path: str | Path) -> None:
    """Write the bytes alive over the step as a picture.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure, axes = new_figure()
    axes.plot(plan.timeline.live_bytes / 2**20)
    axes.axvline(plan.timeline.num_forward, linestyle=":", label="start of the backward pass")
    axes.set_xlabel("operation")
    axes.set_ylabel("bytes alive, MiB")
    axes.legend()
    figure.savefig(path)


def new_figure(width: float = 7.0, height: float = 4.5) -> tuple[Any, Any]:
    """A figure without a window, and its axes.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib: not installed, so nothing can be drawn; expected the extra; run pip "
            "install 'lightning-unitscale[report]', or write a .dot file."
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
