"""Put the factors around linear maps into their weights, where that changes nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from lightning_unitscale.graph.nodes import tensor_name
from lightning_unitscale.transforms.rules.flow import handed_on
from lightning_unitscale.transforms.units import FACTOR

_LINEAR_MAPS = (torch.nn.functional.linear, torch.conv1d, torch.conv2d, torch.conv3d)


def factors_left(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """The factors of the rules that are operations of the graph, readable."""
    return tuple(
        f"{tensor_name(node)} * {node.meta[FACTOR]:.4g}"
        for node in graph_module.graph.nodes
        if FACTOR in node.meta
    )


def fold_factors(graph_module: fx.GraphModule) -> None:
    """Remove every factor that weights can take up, in place.

    A factor on a result goes into the weight and the bias of the linear map that made it, a factor
    on an argument into the weights of the linear maps that read it. Both need parameters that
    nothing else reads.
    """
    parameters = dict(graph_module.named_parameters())
    graph = graph_module.graph
    with torch.no_grad():
        for node in [one for one in graph.nodes if FACTOR in one.meta]:
            source = node.args[0]
            maker = _maker(source, node)
            if maker is not None and _are_free(maker, parameters):
                for one in _weights(maker):
                    parameters[str(one.target)].mul_(node.meta[FACTOR])
            elif node.users and all(_reads_as_input(one, node, parameters) for one in node.users):
                for reader in node.users:
                    parameters[str(_weights(reader)[0].target)].mul_(node.meta[FACTOR])
            else:
                continue
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _maker(node: Any, reader: fx.Node) -> fx.Node | None:
    """The linear map that made a tensor that only ``reader`` reads, seen through views."""
    while isinstance(node, fx.Node) and list(node.users) == [reader]:
        if node.target in _LINEAR_MAPS:
            return node
        node, reader = handed_on(node), node
    return None


def _weights(node: fx.Node) -> list[fx.Node]:
    """Nodes of weight and bias of a linear map."""
    given = [*node.args[1:3], node.kwargs.get("weight"), node.kwargs.get("bias")]
    return [one for one in given if isinstance(one, fx.Node)]


def _are_free(node: fx.Node, parameters: dict[str, nn.Parameter]) -> bool:
    """Whether weight and bias are parameters that nothing else in the graph reads."""
    weights = _weights(node)
    reads = [one.target for one in node.graph.find_nodes(op="get_attr")]
    return bool(weights) and all(
        one.op == "get_attr"
        and str(one.target) in parameters
        and list(one.users) == [node]
        and reads.count(one.target) == 1
        for one in weights
    )


def _reads_as_input(node: fx.Node, value: fx.Node, parameters: dict[str, nn.Parameter]) -> bool:
    is_input = node.target in _LINEAR_MAPS and node.args[:1] == (value,)
    return is_input and value not in node.args[1:] and _are_free(node, parameters)
