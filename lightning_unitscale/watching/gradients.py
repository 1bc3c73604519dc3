"""The gradients of a watched call: measured by hooks on the nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.patching import nothing
from lightning_unitscale.watching.rows import Measuring, TensorRow
from lightning_unitscale.watching.torch_state import is_readable, unseen


class Gradients:
    """Measures gradients when they are complete, before the backward pass goes on.

    On the node and not on the tensor, which is the user's: in whatever order hooks are hung on the
    tensor itself, the node's come after them.

    Args:
        measuring: Takes the statistics.
    """

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self._hooks: list[RemovableHandle] = []
        # A parameter does not keep its node alive, only the graphs that have read it do.
        self._leaf_nodes: dict[int, Any] = {}

    def begin(self, module: nn.Module) -> None:
        """Make the autograd nodes of the parameters, as a step would when it reads them.

        Within the step an additional node would shift the numbers of all later ones, by which the
        products of a backward pass are told apart.
        """
        for parameter in module.parameters():
            if parameter.requires_grad and not is_lazy(parameter) and is_readable(parameter):
                self._leaf_node(parameter)

    def measure(
        self, row: TensorRow, tensor: Tensor, before: Callable[[], object] = nothing
    ) -> None:
        """Measure the gradient of a tensor into its row.

        Args:
            row: The row.
            tensor: The tensor.
            before: Called when the gradient is there. What it holds lives as long as the step.
        """
        row.is_hooked = True
        node, index = tensor.grad_fn, tensor.output_nr
        if node is None:
            node = self._leaf_node(tensor)

        def see(gradients: Sequence[Tensor | None]) -> None:
            gradient = gradients[index]
            # A backward pass that is itself differentiated is a part of the step's forward pass.
            if gradient is None or torch.is_grad_enabled():
                return
            if not (is_readable(gradient) or gradient.is_sparse):
                return
            before()
            self._measuring.gradient(row, gradient)

        self._hooks.append(node.register_prehook(see))

    def close(self) -> None:
        """Stop measuring gradients."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._leaf_nodes.clear()

    def _leaf_node(self, leaf: Tensor) -> Any:
        if id(leaf) not in self._leaf_nodes:
            # A helper may read a parameter in inference mode before the model does.
            with unseen(), torch.inference_mode(False):
                edge: Any = get_gradient_edge(leaf)
            self._leaf_nodes[id(leaf)] = edge.node
        return self._leaf_nodes[id(leaf)]
