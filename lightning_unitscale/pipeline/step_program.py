"""A program from a step that Dynamo captured while it ran: a ``training_step``, say.

There the parameters are inputs of the graph; here they become its attributes, under their names.
Dynamo's own names are used in :func:`static_shapes` (checked on torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo.config
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from lightning_unitscale.graph.capture import GraphInput, copy_graph_module
from lightning_unitscale.graph.nodes import NAME, example_tensor
from lightning_unitscale.graph.out_of_place import make_out_of_place
from lightning_unitscale.pipeline.program import Program, ProgramInput, TensorInfo
from lightning_unitscale.pipeline.stage import add_attribute


def static_shapes() -> contextlib.AbstractContextManager[Any]:
    """Within this context a batch of another size is captured anew, with sizes as numbers."""
    context: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False
    )
    return context


def program_of_step(
    base: fx.GraphModule,
    inputs: Sequence[GraphInput],
    module: nn.Module,
    values: Sequence[Any],
    loss: int | None,
) -> tuple[Program, list[int]]:
    """The program of a captured graph, and which of the graph's inputs are its own.

    Args:
        base: The graph; left as it is.
        inputs: What its placeholders are.
        module: The module of the step.
        values: The graph's inputs in one call.
        loss: Position of the loss among the graph's outputs.
    """
    graph_module = copy_graph_module(base)
    root = nn.Module()
    for name, child in graph_module.named_children():
        root.add_module(name, child)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    own: list[int] = []
    described: list[ProgramInput] = []
    graph = graph_module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    for place, (node, one) in enumerate(zip(placeholders, inputs, strict=True)):
        if one.fqn is None:
            value = values[place]
            own.append(place)
            described.append(
                ProgramInput(one.source, tensor=TensorInfo.of(value))
                if isinstance(value, Tensor)
                else ProgramInput(one.source, value=value)
            )
            continue
        source = parameters.get(one.fqn)
        add_attribute(root, one.fqn, buffers[one.fqn] if source is None else source)
        with graph.inserting_after(placeholders[-1]):
            attribute = graph.create_node("get_attr", one.fqn)
        attribute.meta.update(node.meta)
        attribute.meta[NAME] = one.fqn
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)
    make_out_of_place(graph)
    made = fx.GraphModule(root, graph)
    returned: Any = graph.output_node().args[0]
    in_spec = tree_flatten(((None,) * len(described), {}))[1]
    out_spec = tree_flatten([0] * len(returned))[1]
    return Program(made, tuple(described), in_spec, out_spec, loss), own


def example_outputs(base: fx.GraphModule) -> list[Any]:
    """Tensors of zeros, and constants, such as the graph returns."""
    returned: Any = base.graph.output_node().args[0]
    made: list[Any] = []
    for one in returned:
        example = example_tensor(one)
        if example is None:
            made.append(one)
        else:
            made.append(torch.zeros(example.shape, dtype=example.dtype, device=example.device))
    return made
