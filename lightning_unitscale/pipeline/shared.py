"""Parameters that stages of several ranks share: one gradient, the sum of all stages' parts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SharedGradients:
    """Sums the gradients of replicated parameters over the ranks that have them.

    Args:
        parameters: This rank's parameters that others have too, by name.
        owners: For every replicated parameter, of this rank or not, the ranks in ``group`` that
            have it, in ascending order.
        group: The pipeline's process group.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.owners = {name: ranks for name, ranks in sorted(owners.items()) if len(ranks) > 1}
        self.parameters = {name: parameters[name] for name in self.owners if name in parameters}
        self._group = group
        self._rank = dist.get_rank(group)
        self._aside: dict[str, Tensor | None] = {}

    def put_aside(self) -> None:
        """Before a step: what was accumulated so far is summed already."""
        self._aside = {name: one.grad for name, one in self.parameters.items()}
        for one in self.parameters.values():
            one.grad = None

    def combine(self) -> None:
        """After a step: sum the new gradients over their ranks and add the earlier ones."""
        # All ranks go through the names in one order, so that no two wait for each other.
        for name, parameter in self.parameters.items():
            parameter.grad = self._sum(parameter, self.owners[name])
        for name, earlier in self._aside.items():
            parameter = self.parameters[name]
            if earlier is not None:
                new = parameter.grad
                parameter.grad = earlier if new is None else earlier + new
        self._aside = {}

    def _sum(self, parameter: nn.Parameter, ranks: tuple[int, ...]) -> Tensor | None:
        """The sum over the owners, in the order of their ranks: the same bits on all of them."""
        first, *others = ranks
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        # A parameter that no rank has a gradient of keeps none, as on one device.
        present = torch.tensor([parameter.grad is not None], device=own.device).int()
        if self._rank != first:
            for one in (present, own):
                self._send(one, first)
            for one in (present, own):
                self._receive(one, first)
            return own if present.item() else None
        for rank in others:
            for total in (present, own):
                part = torch.empty_like(total)
                self._receive(part, rank)
                total += part
        for rank in others:
            for one in (present, own):
                self._send(one, rank)
        return own if present.item() else None

    def _send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor, group=self._group, group_dst=rank)

    def _receive(self, tensor: Tensor, rank: int) -> None:
        dist.recv(tensor, group=self._group, group_src=rank)
