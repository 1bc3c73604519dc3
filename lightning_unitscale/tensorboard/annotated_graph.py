"""The graph of a step for TensorBoard's Graphs dashboard, with the scale of every tensor.

Module paths become the nesting of nodes. A click on a node shows its RMS, true and as stored, among
its attributes; "Color by: Device" colours by scale, since a node's device is a free text: here the
power of two, in steps of four, that its RMS is near.
"""

from __future__ import annotations

import math

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.versions_pb2 import VersionDef

from lightning_unitscale.scales.alerts import op_of
from lightning_unitscale.scales.layout import DIRECTIONS
from lightning_unitscale.scales.snapshot import ScaleSnapshot

# TensorBoard colours a few devices well, and every power of two would be one.
_POWERS_PER_COLOUR = 4


def annotated_graph(snapshot: ScaleSnapshot) -> GraphDef:
    """The tensors of a snapshot as nodes, with their inputs and scales."""
    paths: dict[str, str] = {}
    for name, module in _pairs(snapshot):
        path, taken = node_path(name, module), set(paths.values())
        paths[name] = path if path not in taken else f"{path}_of_{len(paths)}"
    scales = {
        direction: list(
            zip(
                snapshot.log2_rms(direction).tolist(),
                snapshot.log2_rms(direction, stored=True).tolist(),
                strict=True,
            )
        )
        for direction in DIRECTIONS
    }
    nodes = []
    for index, (name, module) in enumerate(_pairs(snapshot)):
        attributes = {"step": AttrValue(i=snapshot.step)}
        for direction, pairs in scales.items():
            text = _scale_text(*pairs[index])
            attributes[direction] = AttrValue(s=text.encode())
        _, stored = scales["forward"][index]
        nodes.append(
            NodeDef(
                name=paths[name],
                op=op_of(name, module),
                input=[paths[source] for source in snapshot.inputs[index] if source in paths],
                device=_band(stored),
                attr=attributes,
            )
        )
    return GraphDef(node=nodes, versions=VersionDef(producer=22))


def node_path(name: str, module: str) -> str:
    """A tensor's name with slashes between modules, as the dashboard nests nodes."""
    own = name.removeprefix(f"{module}.") if module else name
    path = f"{module.replace('.', '/')}/{own}" if module else own
    # No node of a graph may begin with anything else, nor contain an @ or a colon.
    cleaned = "".join(char if char.isalnum() or char in "_./-" else "_" for char in path)
    return cleaned if cleaned[:1].isalnum() else f"n{cleaned}"


def _pairs(snapshot: ScaleSnapshot) -> list[tuple[str, str]]:
    return list(zip(snapshot.names, snapshot.modules, strict=True))


def _scale_text(true: float, stored: float) -> str:
    """The panel of a node is narrow: short keys, and one line for both scales."""
    if math.isnan(stored):
        return "not measured"
    if math.isinf(stored):
        return "all zero"
    text = f"RMS 2^{_rounded(true)}"
    return text if true == stored else f"{text}, stored 2^{_rounded(stored)}"


def _rounded(value: float) -> str:
    # Adding zero takes the sign off a zero.
    return f"{round(value, 2) + 0.0:.2f}"


def _band(value: float) -> str:
    if not math.isfinite(value):
        return ""
    power = _POWERS_PER_COLOUR * round(value / _POWERS_PER_COLOUR)
    return f"RMS near 2^{power}"
