"""Which rank owns which parameter, and bringing together what the ranks own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.strategies.freed import FreedStorage
from lightning_unitscale.strategies.replicas import Replicas


class Owners:
    """The owners of a module's parameters and buffers.

    Args:
        module: The whole module.
        names: Names of what each rank of the group has in its stages.
        group: The pipeline's process group.
        frees: Whether :meth:`free` frees memory here.

    What no stage has is the same on all ranks and counts as the first rank's.

    Attributes:
        names: As given.
        freed: The parameters that are others'.
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[set[str]],
        group: dist.ProcessGroup | None,
        *,
        frees: bool = False,
    ) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        tensors: dict[str, Tensor] = {**dict(module.named_parameters()),
                                      **dict(module.named_buffers())}  # fmt: skip
        self.names = names
        self._device = next(iter(tensors.values())).device
        self._first = {
            name: next((rank for rank, own in enumerate(names) if name in own), 0)
            for name in tensors
        }
        self._tensors = tensors
        self._by_id = {id(one): name for name, one in tensors.items()}
        others = {
            name: one
            for name, one in tensors.items()
            if isinstance(one, nn.Parameter)
            and any(name in own for own in names)
            and name not in names[self._rank]
        }
        kept = [one for name, one in tensors.items() if name not in others]
        self.freed = FreedStorage(others if frees else {}, kept)

    def counts_here(self, tensor: Tensor) -> bool:
        """Whether this rank is the first owner, and so the one that counts it."""
        return self._first[self._by_id[id(tensor)]] == self._rank

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every rank the owners' values of all parameters and buffers."""
        self.freed.take()
        for name, one in self._tensors.items():
            self._broadcast(one.data, self._first[name])

    def free(self, optimizers: Iterable[Optimizer]) -> None:
        """Free what is others': values, gradients and the optimizers' state."""
        for optimizer in optimizers:
            for one in self.freed.parameters.values():
                optimizer.state.pop(one, None)
        self.freed.free()

    @torch.no_grad()
    def state_on_first(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``state`` returns on the first rank with the owners' values; ``{}`` on the others.

        Nothing in it lies in memory that is freed later.
        """
        was_free = self.freed.is_free
        if self._rank == 0:
            self.freed.take()
        for name, one in self._tensors.items():
            owner = self._first[name]
            if owner and self._rank == owner:
                dist.send(one.data.contiguous(), group=self._group, group_dst=0)
            elif owner and self._rank == 0:
                given = one.data.contiguous()
                dist.recv(given, group=self._group, group_src=owner)
                if given.data_ptr() != one.data_ptr():
                    one.data.copy_(given)
        if self._rank:
            return {}
        try:
            found: dict[str, Any] = self.freed.copied(state())
        finally:
            if was_free:
                self.freed.free()
        return found

    @torch.no_grad()
    def average_gradients(self, replicas: Replicas) -> None:
        """Average the gradients over the pipelines.

        The first owner of a tied weight does it for the others: sums over the pipelines, made by
        each owner for itself, could differ in their last bits, and the owners with them.
        """
        if replicas.count == 1:
            return
        parameters = {
            name: one for name, one in self._tensors.items() if isinstance(one, nn.Parameter)
        }
        own = {name: one for name, one in parameters.items()
               if name in self.names[self._rank] and self._first[name] == self._rank}  # fmt: skip
        replicas.average(own, parameters, self._device)
        for name, one in parameters.items():
            ranks = [rank for rank, owned in enumerate(self.names) if name in owned]
            if len(ranks) > 1 and self._rank in ranks:
                self._hand_out_gradient(one, ranks)

    def _hand_out_gradient(self, parameter: nn.Parameter, ranks: list[int]) -> None:
        """The first rank's gradient for the other owners."""
        first, *others = ranks
        present = torch.tensor([parameter.grad is not None], device=self._device).int()
        if self._rank != first:
            dist.recv(present, group=self._group, group_src=first)
            parameter.grad = torch.empty_like(parameter) if present.item() else None
        for rank in others if self._rank == first else ():
            dist.send(present, group=self._group, group_dst=rank)
        if parameter.grad is None:
            return
        given = parameter.grad.contiguous()
        if self._rank != first:
            dist.recv(given, group=self._group, group_src=first)
            parameter.grad = given
        for rank in others if self._rank == first else ():
            dist.send(given, group=self._group, group_dst=rank)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict that one device would have, on the first rank; ``{}`` on the others."""
        found = optimizer.state_dict()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        own = {
            index: state
            for index, state in found["state"].items()
            if self.counts_here(parameters[index])
        }
        parts: list[Any] | None = None
        if self._rank == 0:
            parts = [None] * dist.get_world_size(self._group)
        dist.gather_object(_on_cpu(own), parts, group=self._group, group_dst=0)
        if parts is None:
            return {}
        together = {index: state for part in parts for index, state in part.items()}
        return {**found, "state": dict(sorted(together.items()))}

    def num_gradient_elements(self, parameters: Iterable[Tensor]) -> int:
        """Elements with a gradient among the parameters of all ranks."""
        own = [one for one in parameters if one.grad is not None and self.counts_here(one)]
        count = torch.tensor(sum(one.numel() for one in own), device=self._device)
        dist.all_reduce(count, group=self._group)
        return int(count)

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[Tensor], limit: float) -> Tensor:
        """Scale the gradients of all ranks so that their norm together is at most ``limit``."""
        gradients = [one for one in parameters if one.grad is not None]
        counted = [one.grad for one in gradients if self.counts_here(one)]
        norms = torch.stack([torch.linalg.vector_norm(one) for one in counted]) if counted else None
        square = torch.zeros((), device=self._device)
        if norms is not None:
            square = norms.float().square().sum()
        # Added in one order everywhere: another norm in another pipeline would part their weights.
        squares = [torch.empty_like(square) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(squares, square, group=self._group)
        total = torch.stack(squares).sum().sqrt()
        factor = (limit / (total + 1e-6)).clamp(max=1.0)
        for one in gradients:
            assert one.grad is not None
            one.grad.mul_(factor.to(one.grad.dtype))
        return total

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        given = tensor.contiguous()
        dist.broadcast(given, group=self._group, group_src=rank)
        if given is not tensor:
            tensor.copy_(given)


def _on_cpu(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        index: {
            key: value.cpu() if isinstance(value, Tensor) else value for key, value in one.items()
        }
        for index, one in state.items()
    }
