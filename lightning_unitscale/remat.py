"""Rematerialization: plan a step's forward and backward graph for a budget in bytes."""

from lightning_unitscale.memory.budgets import Budget
from lightning_unitscale.memory.offload import HostLink
from lightning_unitscale.memory.partitioner import RematPartitioner, aot_backend
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.remat_module import pareto_front, plan_remat, remat
from lightning_unitscale.memory.remat_plan import (
    RematPlan,
    RematReport,
    draw_graph,
    draw_joint_graph,
    plot_front,
    plot_timeline,
)

__all__ = [
    "Budget",
    "HostLink",
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
