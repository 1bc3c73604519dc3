"""Helpers for tests of ``track_scales``."""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_unitscale.capture.module_steps import captured_forward
from lightning_unitscale.monitor.probes import ScaleProbes
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.transforms import Metrics


class Call(nn.Module):
    """A function of modules and inputs as a module."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.parts, *args)


def probed_copy(module: nn.Module) -> tuple[nn.Module, ScaleProbes]:
    """A copy of a module whose captured graphs carry a monitor's probes."""
    probes = ScaleProbes(RowLayout(histogram=False))
    new, step = captured_forward(module, "test", probes)
    step.owner.observe("test", True)
    return new, probes


def metrics(module: Any) -> dict[str, Metrics | None]:
    """Metrics by people's name for the tensor; the graph must be a sound one."""
    graph = module.scales_graph()
    graph.lint()
    return {
        node.meta["tensor_name"]: node.meta["metrics"]
        for node in graph.nodes
        if node.op != "output"
    }


def directions(module: Any) -> dict[str, str]:
    return {
        name: "" if one is None else "fwd" if one.bwd is None else "both"
        for name, one in metrics(module).items()
    }
