"""Predict the memory and operations of a training step before it runs."""

from lightning_unitscale.capture.absent_ranks import fake_process_group
from lightning_unitscale.memory.costs import (
    CostModel,
    OperatorCosts,
    aten_node_costs,
    default_cost_model,
)
from lightning_unitscale.memory.gpus import GPU, GPUS, DeviceType
from lightning_unitscale.memory.graph_profile import GraphProfile
from lightning_unitscale.memory.profile_step import MetaInfoProp, profile_graph
from lightning_unitscale.memory.reserved import AllocatorPeak
from lightning_unitscale.memory.step_record import (
    Costs,
    MemoryTimeline,
    ModuleCosts,
    NodeCosts,
    Peak,
)

__all__ = [
    "GPU",
    "GPUS",
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
