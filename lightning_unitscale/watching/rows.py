"""The rows of a watched step: their values and gradients, and the units of operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.graph.recorder import stored_elements
from lightning_unitscale.lossless.gauge import Unit
from lightning_unitscale.lossless.held import Held
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.step_rows import ReadRows, StepRows, TakenRow
from lightning_unitscale.watching.records import ProbedTensor
from lightning_unitscale.watching.torch_state import is_readable, unseen


@dataclass(eq=False)
class TensorRow:
    """A tensor of the step.

    Attributes:
        name: Its name; an attention that reads it may have a better one than it was made with.
        module: Path of the module that makes it.
        inputs: The tensors that it is computed from.
        is_shown: Whether it has a row; otherwise it is only on the way to others.
        is_given: Whether the step starts from it: a parameter, a buffer or a part of the batch.
        is_operand: Whether a matrix product reads it.
        is_product: Whether a matrix product makes it.
        is_constant: Whether it was made outside of the backward pass: a mask, a table.
        is_hooked: Whether its gradient is looked at.
        forward: Statistics of the value, if taken.
        backward: Statistics of the gradients that have arrived.
        log2_sigma: Unit in which a product stores the value, as an exponent of two.
        log2_gamma: Unit of the gradient.
        log2_counted: The unit in which format counts of the value were taken.
        has_unit: Whether a matmul of this step has told the unit of the value; ``None`` if no
            matmul that has units reads it.
        has_gradient_unit: The same of the gradient.
        made_as: The name that it was made with.
    """

    name: str
    module: str
    inputs: tuple[TensorRow, ...] = ()
    is_shown: bool = False
    is_given: bool = False
    is_operand: bool = False
    is_product: bool = False
    is_constant: bool = False
    is_hooked: bool = False
    forward: TakenRow | None = None
    backward: list[TakenRow] = field(default_factory=list)
    log2_sigma: int = 0
    log2_gamma: int = 0
    log2_counted: int = 0
    has_unit: bool | None = None
    has_gradient_unit: bool | None = None

    def __post_init__(self) -> None:
        self.made_as = self.name

    def described(self, inputs: Iterable[TensorRow]) -> ProbedTensor:
        """What a snapshot says of it beside the numbers."""
        held = Held(Unit(log2=self.log2_sigma), Unit(log2=self.log2_gamma))
        names = dict.fromkeys(row.name for row in inputs if row.name != self.name)
        return ProbedTensor(
            self.name,
            self.module,
            held,
            tuple(names),
            self.is_operand,
            self.is_product,
            (self.has_unit is False, self.has_gradient_unit is False),
        )


class Measuring:
    """Computes statistics while a step runs, unseen by its modes and its autograd graph.

    Attributes:
        layout: The same.
        counts_stored: Whether formats are counted as a tensor is measured, in its unit then.
            Otherwise a row holds for every unit.
    """

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.counts_stored = not layout.is_sampled
        self._rows = StepRows(layout.measured)
        # By device and unit: few are different, and each is a kernel to fill.
        self._factors: dict[tuple[torch.device, int], Tensor] = {}

    def value(self, row: TensorRow, tensor: Tensor) -> None:
        """Take the statistics of a value, its formats counted in the row's unit."""
        row.forward = self.of(tensor, row.log2_sigma)
        row.log2_counted = row.log2_sigma

    def gradient(self, row: TensorRow, gradient: Tensor) -> None:
        """Take the statistics of a gradient that has arrived."""
        row.backward.append(self.of(gradient, row.log2_gamma))

    def of(self, tensor: Tensor, log2_unit: int) -> TakenRow:
        """Measure a tensor; exact counts per format are of the tensor over ``2**log2_unit``."""
        # No operation is recorded in inference mode, not even for forward derivatives.
        with unseen(), torch.inference_mode():
            elements = stored_elements(tensor)
            factor = None
            if log2_unit and self.counts_stored:
                factor = self._factor(elements.device, log2_unit)
            return self._rows.add(elements, factor)

    def clear(self) -> None:
        """Forget all rows since the last time that they were sent for."""
        self._rows = StepRows(self.layout.measured)

    def send(self) -> ReadRows:
        """Send for all rows since the last time; what is returned waits for them."""
        with unseen(), torch.inference_mode():
            return self._rows.send()

    def _factor(self, device: torch.device, log2_unit: int) -> Tensor:
        if (device, log2_unit) not in self._factors:
            # Not torch.tensor, whose copy to the device would wait for it.
            factor = torch.full((), 2.0**-log2_unit, device=device)
            self._factors[device, log2_unit] = factor
        return self._factors[device, log2_unit]


class Gradients:
    """Measures gradients when they are complete, before the backward pass goes on.

    On the node and not on the tensor, which is the user's: in whatever order hooks are hung on the
    tensor itself, the node's come after them.
    """

    def __init__(self, measuring: Measuring) -> None:
        self._measuring = measuring
        self._hooks: list[RemovableHandle] = []
        # A parameter does not keep its node alive, only the graphs that have read it do.
        self._leaf_nodes: dict[int, Any] = {}

    @property
    def are_measured(self) -> bool:
        """Whether any gradient will be measured."""
        return bool(self._hooks)

    def begin(self, module: nn.Module) -> None:
        """Make the autograd nodes of the parameters, as a step would when it reads them.

        Within the step an additional node would shift the numbers of all later ones, by which the
        products of a backward pass are told apart.
        """
        for parameter in module.parameters():
            if parameter.requires_grad and not is_lazy(parameter) and is_readable(parameter):
                self.leaf_node(parameter)

    def measure(
        self, row: TensorRow, tensor: Tensor, before: Callable[[], object] = nothing
    ) -> None:
        """Measure the gradient of a tensor into its row."""
        row.is_hooked = True
        node, index = tensor.grad_fn, tensor.output_nr
        if node is None:
            node = self.leaf_node(tensor)

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

    def leaf_node(self, leaf: Tensor) -> Any:
        """The autograd node of a leaf."""
        if id(leaf) not in self._leaf_nodes:
            # A helper may read a parameter in inference mode before the model does.
            with unseen(), torch.inference_mode(False):
                edge: Any = get_gradient_edge(leaf)
            self._leaf_nodes[id(leaf)] = edge.node
        return self._leaf_nodes[id(leaf)]


def shown_inputs(rows: Iterable[TensorRow]) -> dict[TensorRow, dict[TensorRow, None]]:
    """For each row the shown ones that it is computed from, through all others."""
    inputs: dict[TensorRow, dict[TensorRow, None]] = {}
    for row in rows:
        sources: dict[TensorRow, None] = {}
        for source in row.inputs:
            sources.update({source: None} if source.is_shown else inputs.get(source, {}))
        inputs[row] = sources
    return inputs
