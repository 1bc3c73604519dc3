"""Transforms of modules without a Trainer, and the passes that callbacks share with them."""

from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.memory.remat_module import remat
from lightning_unitscale.monitor.scales_graph import (
    Metrics,
    ScalesGraph,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
)
from lightning_unitscale.monitor.track_scales import track_scales
from lightning_unitscale.rules.transform import deploy, unit_scale
from lightning_unitscale.transforms.matmul_transforms import (
    compile,
    fp8_linears,
    lossless_unit_scale,
    simulate_format,
    simulate_fp8,
)

__all__ = [
    "Gauge",
    "GaugePair",
    "Metrics",
    "ScalesGraph",
    "compile",
    "deploy",
    "fp8_linears",
    "lossless_unit_scale",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "remat",
    "simulate_format",
    "simulate_fp8",
    "track_scales",
    "unit_scale",
]
