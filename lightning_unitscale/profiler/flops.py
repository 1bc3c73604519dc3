"""Run one node of a captured graph without numbers, and count its floating-point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lightning_unitscale.dynamo.graphs import fake_mode_of, stand_ins
from lightning_unitscale.graph.nodes import call
from lightning_unitscale.profiler.costs import operator_flops
from lightning_unitscale.profiler.fake_device import DispatchMode


class _Flops(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += operator_flops(func, args, kwargs or {}, result)
        return result


def node_flops(node: fx.Node) -> int:
    """Return the floating-point operations of a node; 0 if it does not run by itself."""
    flops = _Flops()
    return flops.count if runs_without_numbers(node, flops) else 0


def runs_without_numbers(node: fx.Node, watching: DispatchMode) -> bool:
    """Run a node on tensors without data; returns whether it runs by itself."""
    try:
        mode, values = stand_ins(fake_mode_of(node.graph), node.all_input_nodes)
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with mode, torch.no_grad(), watching:
            call(node.target, args, kwargs)
    except Exception:
        return False
    return True
