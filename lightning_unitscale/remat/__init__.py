"""Rematerialization: plan a step's forward and backward graph to a budget in bytes."""

from lightning_unitscale.remat.budget import Budget, format_bytes
from lightning_unitscale.remat.costs import CostModel, default_cost_model
from lightning_unitscale.remat.draw import draw_graph, draw_joint_graph
from lightning_unitscale.remat.partitioner import (
    RematPartitioner,
    aot_backend,
    default_partition,
    min_cut_rematerialization_partition,
)
from lightning_unitscale.remat.planner import Planner, RematPlan
from lightning_unitscale.remat.planning import pareto_front, plan_remat
from lightning_unitscale.remat.report import RematReport, plot_front, plot_timeline
from lightning_unitscale.remat.transform import remat

__all__ = [
    "Budget",
    "CostModel",
    "Planner",
    "RematPartitioner",
    "RematPlan",
    "RematReport",
    "aot_backend",
    "default_cost_model",
    "default_partition",
    "draw_graph",
    "draw_joint_graph",
    "format_bytes",
    "min_cut_rematerialization_partition",
    "pareto_front",
    "plan_remat",
    "plot_front",
    "plot_timeline",
    "remat",
]
