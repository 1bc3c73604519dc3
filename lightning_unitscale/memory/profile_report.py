"""Show profiles as text, as a plot and as JSON."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from tabulate import tabulate

from lightning_unitscale.arguments import check_choice
from lightning_unitscale.memory.step_record import (
    KINDS,
    Costs,
    MemoryTimeline,
    ModuleCosts,
    NodeCosts,
    Peak,
    Phase,
    field_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_PREFIXES = "KMGTPE"


def format_bytes(num_bytes: float) -> str:
    """Return bytes with a binary prefix: ``"1.50 MiB"``."""
    return _scaled(num_bytes, 1024, "i", "B")


def format_flops(flops: float) -> str:
    """Return operations with a decimal prefix: ``"1.50 G"``."""
    return _scaled(flops, 1000, "", "").strip()


def _scaled(value: float, base: int, infix: str, unit: str) -> str:
    if abs(value) < base:
        return f"{int(value)} {unit}"
    exponent = 0
    while abs(value) >= base and exponent < len(_PREFIXES):
        value, exponent = value / base, exponent + 1
    return f"{value:.2f} {_PREFIXES[exponent - 1]}{infix}{unit}"


_NODE_COLUMNS = {
    "saved": "saved_bytes", "fwd in": "fwd_mem_in", "fwd tmp": "fwd_mem_tmp",
    "fwd out": "fwd_mem_out", "bwd tmp": "bwd_mem_tmp", "bwd out": "bwd_mem_out",
    "fwd flop": "fwd_flops", "bwd flop": "bwd_flops",
}  # fmt: skip
_MODULE_COLUMNS = {
    "parameters": "parameter_bytes", "saved": "saved_bytes", "fwd flop": "fwd_flops",
    "bwd flop": "bwd_flops", "fwd moved": "fwd_bytes_moved", "bwd moved": "bwd_bytes_moved",
}  # fmt: skip


def _cells(costs: Costs, columns: Mapping[str, str]) -> dict[str, str]:
    """Return fields of costs as text, by the titles of their columns."""
    return {
        title: (format_flops if name.endswith("flops") else format_bytes)(getattr(costs, name))
        for title, name in columns.items()
    }


def check_sort_by(sort_by: object) -> None:
    """Raise if nodes cannot be sorted by this field."""
    choices = (*field_names(NodeCosts), "order")
    advice = "leave it out for 'saved_bytes'"
    check_choice("sort_by", sort_by, choices, "nodes have no such number", advice)


def node_table(nodes: Sequence[NodeCosts], sort_by: str, limit: int | None) -> str:
    """Return a table with a row for each node."""
    check_sort_by(sort_by)
    ordered = list(nodes)
    if sort_by != "order":
        ordered.sort(key=lambda node: -getattr(node, sort_by))
    shown = ordered[:limit]
    rows = [
        {
            "node": node.name,
            "shape": "x".join(map(str, node.shape)),
            **_cells(node, _NODE_COLUMNS),
            "saved inputs": ", ".join(node.save_fwd_in),
        }
        for node in shown
    ]
    text = tabulate(rows, headers="keys", disable_numparse=True)
    left_out = len(ordered) - len(shown)
    return f"{text}\n({left_out} more nodes)" if left_out else text


def module_table(modules: Sequence[ModuleCosts], depth: int | None) -> str:
    """Return a table of the modules, each with its submodules, down to a depth."""
    rows = [
        {
            "module": module.path or "(root)",
            "class": module.kind,
            "nodes": str(module.num_nodes),
            **_cells(module, _MODULE_COLUMNS),
        }
        for module in modules
        if depth is None or module.path.count(".") + bool(module.path) <= depth
    ]
    return tabulate(rows, headers="keys", disable_numparse=True)


_MIB = 2**20
_COLORS = {"parameter": "#08306b", "buffer": "#6baed6", "optimizer": "#2166ac", "input": "#b9bcc2",
           "gradient": "#d95f0e", "unsharded": "#807dba", "library": "#dd3497",
           "activation": "#41ab5d", "temporary": "#fdae61"}  # fmt: skip


def new_figure(width: float = 7.0, height: float = 4.5) -> tuple[Figure, Axes]:
    """Return a figure without a window, and its axes."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "matplotlib is not installed, so nothing can be drawn. Run: pip install "
            "'lightning-unitscale[report]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def draw(timeline: MemoryTimeline, peak: Peak, phases: Sequence[Phase]) -> Figure:
    """Draw live bytes by kind as areas over the step's operators, with the peak marked."""
    moments = range(len(timeline.live_bytes))
    figure, axes = new_figure(11.0, 5.0)
    rows = [[value / _MIB for value in timeline.live_by_kind[kind]] for kind in KINDS]
    axes.stackplot(moments, rows, labels=KINDS, colors=[_COLORS[kind] for kind in KINDS])
    axes.plot(moments, [value / _MIB for value in timeline.live_bytes], color="black", lw=0.6)
    top, text = (max(peak.moment, 0), peak.num_bytes / _MIB), format_bytes(peak.num_bytes)
    axes.plot(*([value] for value in top), "v", color="#c40a8f")
    text = f"{text}\n{peak.node}"
    axes.annotate(text, top, xytext=(6, 6), textcoords="offset points", fontsize=8)
    start = 0
    for phase, group in groupby(phases):
        axes.axvline(start, color="black", lw=0.6, ls=":")
        axes.text(start, 0.96, f" {phase}", transform=axes.get_xaxis_transform(), fontsize=8)
        start += len(list(group))
    axes.set_xlabel("operator of the step")
    axes.set_ylabel("live MiB")
    axes.set_xlim(0, max(len(timeline.live_bytes) - 1, 1))
    axes.set_ylim(0, 1.15 * max(peak.num_bytes, 1) / _MIB)
    axes.legend(loc="upper right", fontsize=8)
    return figure


T = TypeVar("T")
VERSION = 5  # version of profiles as JSON


def load(text: str, kind: type[T]) -> T:
    """Return a dataclass from JSON."""
    try:
        content = json.loads(text)
        if content.pop("version", None) != VERSION:
            raise ValueError(f"expected version {VERSION}")
        return typing.cast(T, _typed(content, kind))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"`text`: not a profile ({error}). Pass what GraphProfile.to_json() returned in "
            "this version."
        ) from error


def _typed(value: Any, kind: Any) -> Any:
    """Convert a value from JSON to the type of a field's annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(value, arguments[0])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(  # type: ignore[operator]
            **{name: _typed(item, hints[name]) for name, item in value.items()}
        )
    if origin is dict:
        return {key: _typed(item, arguments[1]) for key, item in value.items()}
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_typed(item, arguments[0]) for item in value)
        return tuple(_typed(*pair) for pair in zip(value, arguments, strict=True))
    return value
