"""Rematerialization: plan a step's forward and backward graph to a budget in bytes."""

from lightning_unitscale.remat.api import pareto_front, plan_remat, remat
from lightning_unitscale.remat.partitioner import RematPartitioner, aot_backend
from lightning_unitscale.remat.planner import Budget, Planner, RematPlan
from lightning_unitscale.remat.report import (
    RematReport,
    draw_graph,
    draw_joint_graph,
    plot_front,
    plot_timeline,
)

__all__ = [
    "Budget",
    "Planner",
    "RematPartitioner",
    "RematPlan",
    "RematReport",
    "aot_backend",
    "draw_graph",
    "draw_joint_graph",
    "pareto_front",
    "plan_remat",
    "plot_front",
    "plot_timeline",
    "remat",
]
