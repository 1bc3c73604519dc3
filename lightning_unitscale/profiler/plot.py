"""Live bytes over a step as a picture."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from lightning_unitscale.profiler.step_record import KINDS
from lightning_unitscale.profiler.table import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lightning_unitscale.profiler.graph_profile import GraphProfile

_MIB = 2**20
_COLORS = {
    "parameter": "#08306b",
    "buffer": "#6baed6",
    "optimizer": "#2166ac",
    "input": "#b9bcc2",
    "gradient": "#d95f0e",
    "activation": "#41ab5d",
    "temporary": "#fdae61",
}


def draw(profile: GraphProfile) -> Figure:
    """Areas of live bytes by kind over the operators of the step, the peak marked.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib not found; the plot of a profile needs the extra `report`; run: pip "
            "install 'lightning-unitscale[report]'"
        ) from error
    timeline = profile.timeline
    moments = range(len(timeline.live_bytes))
    figure = Figure(figsize=(11.0, 5.0), layout="constrained")
    axes = figure.add_subplot()
    rows = [[value / _MIB for value in timeline.live_by_kind[kind]] for kind in KINDS]
    axes.stackplot(moments, rows, labels=KINDS, colors=[_COLORS[kind] for kind in KINDS])
    axes.plot(moments, [value / _MIB for value in timeline.live_bytes], color="black", lw=0.6)
    peak = timeline.peak
    place = max(peak.operator, 0)
    axes.plot([place], [peak.live_bytes / _MIB], "v", color="#c40a8f")
    axes.annotate(
        f"{format_bytes(peak.live_bytes)}\n{profile.peak.node}",
        (place, peak.live_bytes / _MIB),
        textcoords="offset points",
        xytext=(6, 6),
        fontsize=8,
    )
    start = 0
    for phase, group in groupby(profile.phases):
        axes.axvline(start, color="black", lw=0.6, ls=":")
        axes.text(start, 0.96, f" {phase}", transform=axes.get_xaxis_transform(), fontsize=8)
        start += len(list(group))
    axes.set_xlabel("operator of the step")
    axes.set_ylabel("live MiB")
    axes.set_xlim(0, max(len(timeline.live_bytes) - 1, 1))
    axes.set_ylim(0, 1.15 * max(peak.live_bytes, 1) / _MIB)
    axes.legend(loc="upper right", fontsize=8)
    return figure
