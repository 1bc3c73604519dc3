"""Measure the gradients of a watched step when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.monitor.rows import Measuring, TensorRow
from lightning_unitscale.monitor.torch_state import is_readable, unseen
from lightning_unitscale.patching import nothing


class _GradientHook:
    """A hook that measures the gradient of one output of a node."""

    __slots__ = ("_before", "_index", "_measuring", "_row")

    def __init__(
        self, measuring: Measuring, row: TensorRow, index: int, before: Callable[[], object]
    ) -> None:
        self._measuring, self._row, self._index, self._before = measuring, row, index, before

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        """Measure the gradient, if it has arrived and has statistics."""
        gradient = gradients[self._index]
        # A backward pass that is itself differentiated belongs to the step's forward pass.
        if gradient is None or torch.is_grad_enabled():
            return
        if is_readable(gradient) or gradient.is_sparse:
            self._before()
            self._measuring.gradient(self._row, gradient)


class Gradients:
    """The measurement of gradients when they are complete, before the backward pass continues."""

    # Hooks are on the autograd node, since the tensor belongs to the user. They run after all hooks
    # of the tensor itself, whatever their order.

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self.hooks: list[RemovableHandle] = []
        # A parameter does not keep its node alive. Only the graphs that have read it do.
        self._leaf_nodes: dict[int, Any] = {}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Create the autograd nodes of parameters, as a step does when it reads them."""
        # Creating them within the step would change the numbers of all later nodes, which identify
        # the matmuls of a backward pass.
        # A helper may read a parameter in inference mode before the model does.
        with unseen(), torch.inference_mode(False), torch.enable_grad():
            for leaf in parameters:
                if leaf.requires_grad and not is_lazy(leaf) and is_readable(leaf):
                    node: Any = leaf.grad_fn
                    if node is None:  # the way get_gradient_edge() finds it
                        node = leaf.view_as(leaf).grad_fn
                        node = node.next_functions[0][0]
                    self._leaf_nodes[id(leaf)] = node

    def measure(
        self, row: TensorRow, tensor: Tensor, before: Callable[[], object] = nothing
    ) -> None:
        """Measure the gradient of a tensor into its row."""
        row.is_hooked = True
        node, index = tensor.grad_fn, tensor.output_nr
        if node is None:
            node = self.leaf_node(tensor)

        hook = _GradientHook(self._measuring, row, index, before)
        self.hooks.append(node.register_prehook(hook))

    def close(self) -> None:
        """Stop measuring gradients."""
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()
        self._leaf_nodes.clear()

    def leaf_node(self, leaf: Tensor) -> Any:
        """Return the autograd node of a leaf."""
        if id(leaf) not in self._leaf_nodes:
            with unseen(), torch.inference_mode(False):
                edge: Any = get_gradient_edge(leaf)
            self._leaf_nodes[id(leaf)] = edge.node
        return self._leaf_nodes[id(leaf)]
