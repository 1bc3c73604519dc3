"""What tracking has to find, from hooks on the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_unitscale.transforms import Metrics
from tests.watching.test_metrics import expected

Found = tuple[Metrics.Data, Metrics.Data | None]


class Oracle:
    """Statistics of a plain step: outputs of linear layers, parameters and inputs.

    Attributes:
        found: By the tensor's name, its statistics and those of its gradient.
    """

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {}

    def hook(self, module: nn.Module) -> None:
        """Measure what linear layers return."""
        for path, layer in module.named_modules():
            if type(layer) is nn.Linear:
                layer.register_forward_hook(self._see(f"{path}.linear" if path else "linear"))

    def add(self, name: str, tensor: Tensor) -> None:
        """Measure a tensor now, and its gradient when it comes."""
        entry = self.found[name] = [expected(tensor), None]
        if tensor.requires_grad:

            def arrive(gradient: Tensor) -> None:
                entry[1] = expected(gradient)

            tensor.register_hook(arrive)

    def _see(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            key, number = name, 0
            while key in self.found:
                number += 1
                key = f"{name}_{number}"
            self.add(key, output)

        return see


def oracle_of(module: nn.Module, batch: tuple[Any, ...], loss: Callable[[Any], Tensor]) -> Oracle:
    """Run a step of a copy of a module, on inputs that all ask for a gradient."""
    module, oracle = copy.deepcopy(module), Oracle()
    oracle.hook(module)

    def asking(tensor: Tensor) -> Tensor:
        new = tensor.detach().clone()
        return new.requires_grad_() if new.is_floating_point() else new

    inputs = tree_map_only(Tensor, asking, batch)
    # Before the step, which may write into them.
    for name, parameter in module.named_parameters():
        oracle.add(name, parameter)
    given = [one for one in inputs if isinstance(one, Tensor) and one.is_floating_point()]
    total = loss(module(*inputs))
    total.backward()
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        oracle.found[name][1] = None if gradient is None else expected(gradient)
    for index, one in enumerate(given):
        gradient = one.grad
        oracle.found[f"given.{index}"] = [None, None if gradient is None else expected(gradient)]
    return oracle
