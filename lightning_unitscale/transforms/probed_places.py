"""The places of a step where tensors are made, those inside of activation checkpoints included."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from lightning_unitscale.graph.aliasing import same_tensor
from lightning_unitscale.graph.nodes import (
    INTERNAL,
    example_tensor,
    is_float_tensor,
    op_name,
    tensor_name,
)
from lightning_unitscale.graph.passes import Region, StepGraph
from lightning_unitscale.transforms.drift import probe_gradient


class Place(NamedTuple):
    """A node and the graph, or the body of a checkpoint, that it stands in."""

    region: Region
    node: fx.Node


class Places:
    """All of a graph's places, in the order in which they run.

    Args:
        graph: The graph under rewrite.

    Attributes:
        regions: The graph and, after it, the bodies of its checkpoints at any depth.
        bodies: The bodies, by the node that calls them.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.regions = list(graph.regions())
        self.bodies = {one.call: one for one in self.regions if one.call is not None}

    def in_order(self, region: Region | None = None) -> Iterator[Place]:
        """Every node, those of a checkpoint before the node that calls it."""
        region = region or self.regions[0]
        for node in region.graph.nodes:
            if node in self.bodies:
                yield from self.in_order(self.bodies[node])
            yield Place(region, node)

    def probeable(self) -> list[Place]:
        """Places of plain floating-point tensors of the user's step, each tensor once."""
        nodes = {one for region in self.regions for one in probeable_nodes(region)}
        places = list(self.in_order())
        # By name: a rewrite may have put the same tensor in other units in its place.
        again = {_known_as(one) for _, one in places if is_of_checkpoint(one, self.bodies)}
        return [one for one in places if one.node in nodes and tensor_name(one.node) not in again]

    def origin(self, region: Region, node: fx.Node) -> fx.Node:
        """The node that made the tensor, which may have come into a checkpoint or out of one."""
        if is_of_checkpoint(node, self.bodies):
            call, index = node.args
            body = self.bodies[call]  # type: ignore[index]
            made = _returned(body.graph.output_node())[index]  # type: ignore[index]
            return self.origin(body, made) if isinstance(made, fx.Node) else node
        if region.parent is None or region.call is None or node.op != "placeholder":
            return node
        position = region.graph.find_nodes(op="placeholder").index(node)
        given = region.call.args[1 + position]
        return self.origin(region.parent, given) if isinstance(given, fx.Node) else node

    def inputs_of(self, probed: Sequence[Place]) -> dict[str, tuple[str, ...]]:
        """For every probed tensor the probed ones that it is computed from, through all others."""
        inputs: dict[str, dict[str, None]] = {tensor_name(one.node): {} for one in probed}
        self._follow(self.regions[0], (), inputs)
        return {name: tuple(found) for name, found in inputs.items()}

    def _follow(
        self, region: Region, given: Sequence[_Names], inputs: dict[str, _Names]
    ) -> tuple[_Names, ...]:
        """Fill ``inputs`` of a region's nodes; returns the sources of what the region returns."""
        sources: dict[fx.Node, _Names] = {}
        returned: dict[fx.Node, tuple[_Names, ...]] = {}
        arguments = iter(given)
        for node in region.graph.nodes:
            if node.op == "placeholder" and region.parent is not None:
                sources[node] = next(arguments)
                continue
            if node.op == "output":
                return tuple(sources.get(one, {}) for one in _returned(node))
            if node in self.bodies:
                passed = [sources.get(one, {}) for one in node.args[1:]]
                returned[node] = self._follow(self.bodies[node], passed, inputs)
            elif node.target is operator.getitem and node.args[0] in returned:
                sources[node] = returned[node.args[0]][node.args[1]]
                continue
            found = {name: None for one in node.all_input_nodes for name in sources[one]}
            own = _known_as(node)
            if own in inputs:
                found.pop(own, None)
                inputs[own].update(found)
            sources[node] = {own: None} if own in inputs else found
        raise AssertionError("a graph without output")

    def bring_out(self, made: Sequence[Place], rows: Sequence[fx.Node]) -> list[fx.Node]:
        """Hand rows made in checkpoints through to the outermost graph as further outputs.

        Args:
            made: What each row is of.
            rows: Nodes of the rows.

        Returns:
            The rows as nodes of the outermost graph.
        """
        brought = list(rows)
        place = [id(one) for one, _ in made]
        for region in reversed(self.regions):
            own = [index for index, one in enumerate(place) if one == id(region)]
            if region.parent is None or region.call is None or not own:
                continue
            output = region.graph.output_node()
            outputs = _returned(output)
            output.args = ((*outputs, *(brought[index] for index in own)),)
            around = region.parent.graph
            for offset, index in enumerate(own, start=len(outputs)):
                with around.inserting_after(region.call):
                    brought[index] = around.call_function(operator.getitem, (region.call, offset))
                place[index] = id(region.parent)
        return brought


# An ordered set.
_Names = dict[str, None]


def probeable_nodes(region: Region, *, internal: bool = False) -> list[fx.Node]:
    """Nodes that make a plain floating-point tensor of the user's step, in graph order.

    Left out: what passes inserted, unless ``internal``; what is handed back as it is, which is the
    tensor of another node; what is made inside a ``vmap`` or ``grad`` transform, where a tensor is
    not yet what it seems; and in the body of a checkpoint its inputs, which are tensors of the
    graph around it.
    """
    nodes, depth = [], 0
    for node in region.graph.nodes:
        name = op_name(node)
        depth += ("increment_nesting" in name) - ("decrement_nesting" in name)
        if depth or node.op not in {"placeholder", "call_function", "call_method", "get_attr"}:
            continue
        if node.op == "placeholder" and region.parent is not None:
            continue
        if (node.meta.get(INTERNAL) and not internal) or not is_float_tensor(node):
            continue
        if same_tensor(node) is not None:
            continue
        example = example_tensor(node)
        if example is not None and example.layout == torch.strided and not example.is_nested:
            nodes.append(node)
    return nodes


def is_passed_through(node: fx.Node, checkpoints: Mapping[fx.Node, Any]) -> bool:
    """Whether the node hands on another one's tensor: a checkpoint's, or one that is measured."""
    is_measured = node.op == "call_function" and node.target is probe_gradient
    return is_measured or is_of_checkpoint(node, checkpoints)


def is_of_checkpoint(node: fx.Node, checkpoints: Mapping[fx.Node, Any]) -> bool:
    """Whether the node is a result of a checkpoint, made by a node of its body."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and (node.args[0] in checkpoints)
    )


def _known_as(node: fx.Node) -> str:
    """The tensor's name; what a rewrite keeps beside it is called the same up to a colon."""
    return tensor_name(node).partition(":")[0]


def _returned(output: fx.Node) -> tuple[Any, ...]:
    (returned,) = output.args
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
