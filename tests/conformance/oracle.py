"""The expected results of tracking, from hooks on the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_unitscale.transforms import Metrics
from tests.monitor.test_metrics import expected

# Statistics of a tensor, and of its gradient if one has come.
Entry = list[Metrics.Data | None]


class Oracle:
    """Statistics of a plain step: of parameters and of results of linear layers.

    Attributes:
        found: The statistics by the tensor's name.
        inputs: Those of the gradient of each floating-point argument.
    """

    def __init__(
        self, module: nn.Module, batch: tuple[Any, ...], loss: Callable[[Any], Tensor]
    ) -> None:
        self.found: dict[str, Entry] = {}
        module = copy.deepcopy(module)
        for path, layer in module.named_modules():
            if type(layer) is nn.Linear:
                layer.register_forward_hook(self._see(f"{path}.linear" if path else "linear"))
        # Before the step, which may write into them.
        parameters = dict(module.named_parameters())
        self.found = {name: [expected(one), None] for name, one in parameters.items()}
        given = tree_map_only(Tensor, _asking, batch)
        loss(module(*given)).backward()
        for name, one in parameters.items():
            self.found[name][1] = None if one.grad is None else expected(one.grad)
        floats = [one for one in given if isinstance(one, Tensor) and one.is_floating_point()]
        self.inputs = [None if one.grad is None else expected(one.grad) for one in floats]

    def _see(self, name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            number = sum(key.rpartition("_")[0] == name or key == name for key in self.found)
            entry: Entry = [expected(output), None]
            self.found[f"{name}_{number}" if number else name] = entry
            if output.requires_grad:
                output.register_hook(lambda gradient: entry.__setitem__(1, expected(gradient)))

        return see


def _asking(tensor: Tensor) -> Tensor:
    new = tensor.detach().clone()
    return new.requires_grad_() if new.is_floating_point() else new
