"""Memory and operations of a training step, known before it runs."""

from lightning_unitscale.profiler.graph_profile import GraphProfile, Peak
from lightning_unitscale.profiler.liveness import Timeline
from lightning_unitscale.profiler.meta_info_prop import MetaInfoProp
from lightning_unitscale.profiler.node_costs import ModuleCosts, NodeCosts
from lightning_unitscale.profiler.operator_costs import OperatorCosts, aten_node_costs
from lightning_unitscale.profiler.profiling import DeviceType, profile_graph

__all__ = [
    "DeviceType",
    "GraphProfile",
    "MetaInfoProp",
    "ModuleCosts",
    "NodeCosts",
    "OperatorCosts",
    "Peak",
    "Timeline",
    "aten_node_costs",
    "profile_graph",
]
