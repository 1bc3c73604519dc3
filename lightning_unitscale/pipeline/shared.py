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
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        rank = dist.get_rank(group)
        for ranks in dict.fromkeys(self.owners.values()):
            if rank in ranks:
                members = [_global_rank(group, one) for one in ranks]
                # Only the members call it: other pipelines have groups of their own.
                made = dist.new_group(members, use_local_synchronization=True)
                assert isinstance(made, dist.ProcessGroup)
                self._groups[ranks] = made
        self._aside: dict[str, Tensor | None] = {}

    def put_aside(self) -> None:
        """Before a step: what was accumulated so far is summed already."""
        self._aside = {name: one.grad for name, one in self.parameters.items()}
        for one in self.parameters.values():
            one.grad = None

    def combine(self) -> None:
        """After a step: sum the new gradients over their ranks and add the earlier ones."""
        for ranks, group in self._groups.items():
            names = [name for name in self.parameters if self.owners[name] == ranks]
            self._combine(names, group)
        for name, earlier in self._aside.items():
            parameter = self.parameters[name]
            if earlier is not None:
                new = parameter.grad
                parameter.grad = earlier if new is None else earlier + new
        self._aside = {}

    def _combine(self, names: list[str], group: dist.ProcessGroup) -> None:
        parameters = [self.parameters[name] for name in names]
        present = torch.tensor(
            [one.grad is not None for one in parameters],
            dtype=torch.int32,
            device=parameters[0].device,
        )
        # A parameter that no rank has a gradient of keeps none, as on one device.
        dist.all_reduce(present, group=group)
        for one, count in zip(parameters, present.tolist(), strict=True):
            if count:
                gradient = torch.zeros_like(one) if one.grad is None else one.grad.contiguous()
                dist.all_reduce(gradient, group=group)
                one.grad = gradient


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
