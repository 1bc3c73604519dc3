"""Profiles as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tabulate import tabulate

from lightning_unitscale.profiler.node_costs import ModuleCosts, NodeCosts, field_names

if TYPE_CHECKING:
    from lightning_unitscale.profiler.graph_profile import GraphProfile

_PREFIXES = ("", "K", "M", "G", "T", "P", "E")


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary prefix: ``"1.50 MiB"``."""
    return _scaled(num_bytes, 1024, "i", "B")


def format_flops(flops: float) -> str:
    """Operations with a decimal prefix: ``"1.50 G"``."""
    return _scaled(flops, 1000, "", "").strip()


def _scaled(value: float, base: int, infix: str, unit: str) -> str:
    exponent = 0
    while abs(value) >= base and exponent < len(_PREFIXES) - 1:
        value /= base
        exponent += 1
    if exponent == 0:
        return f"{int(value)} {unit}"
    return f"{value:.2f} {_PREFIXES[exponent]}{infix}{unit}"


def node_table(nodes: Sequence[NodeCosts], sort_by: str, limit: int | None) -> str:
    """The nodes, the largest first, or in their order if ``sort_by`` is ``"order"``."""
    fields = field_names(NodeCosts)
    if sort_by not in (*fields, "order"):
        raise ValueError(
            f"`sort_by={sort_by!r}`: nodes have no such number; expected 'order' or one of "
            f"{', '.join(fields)}."
        )
    ordered = list(nodes)
    if sort_by != "order":
        ordered.sort(key=lambda one: -getattr(one, sort_by))
    shown = ordered if limit is None else ordered[:limit]
    rows = [
        {
            "node": one.name,
            "shape": "x".join(map(str, one.shape)),
            "saved": format_bytes(one.saved_bytes),
            "fwd in": format_bytes(one.fwd_mem_in),
            "fwd tmp": format_bytes(one.fwd_mem_tmp),
            "fwd out": format_bytes(one.fwd_mem_out),
            "bwd tmp": format_bytes(one.bwd_mem_tmp),
            "bwd out": format_bytes(one.bwd_mem_out),
            "fwd flop": format_flops(one.fwd_flops),
            "bwd flop": format_flops(one.bwd_flops),
            "saved inputs": ", ".join(one.save_fwd_in),
        }
        for one in shown
    ]
    text = tabulate(rows, headers="keys", disable_numparse=True)
    left_out = len(ordered) - len(shown)
    return f"{text}\n({left_out} more nodes)" if left_out else text


def module_table(modules: Sequence[ModuleCosts], depth: int | None) -> str:
    """The modules, each with those in it, down to a depth."""
    rows = [
        {
            "module": one.path or "(root)",
            "class": one.kind,
            "nodes": str(one.num_nodes),
            "parameters": format_bytes(one.parameter_bytes),
            "saved": format_bytes(one.saved_bytes),
            "fwd flop": format_flops(one.fwd_flops),
            "bwd flop": format_flops(one.bwd_flops),
            "fwd moved": format_bytes(one.fwd_bytes_moved),
            "bwd moved": format_bytes(one.bwd_bytes_moved),
        }
        for one in modules
        if depth is None or _depth(one.path) <= depth
    ]
    return tabulate(rows, headers="keys", disable_numparse=True)


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def totals(profile: GraphProfile) -> str:
    """Bytes by what they are for, over the step and at its peak, and operations."""
    peak = profile.peak
    over_step = {
        "parameter": profile.parameter_bytes,
        "buffer": profile.buffer_bytes,
        "optimizer": profile.optimizer_bytes,
        "input": profile.input_bytes,
        "gradient": profile.gradient_bytes,
        "activation": profile.saved_bytes,
    }
    rows = [
        (kind, format_bytes(over_step[kind]) if kind in over_step else "", format_bytes(at_peak))
        for kind, at_peak in peak.by_kind.items()
    ]
    where = f" of {peak.node}" if peak.node else ""
    operator = f" ({peak.operator})" if peak.operator else ""
    return "\n".join(
        [
            f"Peak {format_bytes(peak.num_bytes)} on {profile.device} in the {peak.phase} pass"
            f"{where}{operator}, batch size {profile.batch_size}",
            f"Products: {format_flops(profile.fwd_flops)}FLOP forward, "
            f"{format_flops(profile.bwd_flops)}FLOP backward; {len(profile.nodes)} nodes",
            "",
            tabulate(rows, headers=("bytes", "in the step", "at the peak"), disable_numparse=True),
        ]
    )
