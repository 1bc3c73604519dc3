"""Predict the memory and operations of a training step before it runs."""

from lightning_unitscale.profiler.api import DeviceType, MetaInfoProp, profile_graph
from lightning_unitscale.profiler.costs import (
    CostModel,
    OperatorCosts,
    aten_node_costs,
    default_cost_model,
)
from lightning_unitscale.profiler.graph_profile import GraphProfile
from lightning_unitscale.profiler.record import Costs, MemoryTimeline, ModuleCosts, NodeCosts, Peak
from lightning_unitscale.profiler.reserved import AllocatorPeak
from lightning_unitscale.profiler.sharded import fake_process_group

__all__ = [
    "AllocatorPeak",
    "CostModel",
    "Costs",
    "DeviceType",
    "GraphProfile",
    "MemoryTimeline",
    "MetaInfoProp",
    "ModuleCosts",
    "NodeCosts",
    "OperatorCosts",
    "Peak",
    "aten_node_costs",
    "default_cost_model",
    "fake_process_group",
    "profile_graph",
]
