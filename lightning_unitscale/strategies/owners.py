"""The owners of parameters among the ranks: their values, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_unitscale.pipeline.ownership import Ownership, hand_out_gradient
from lightning_unitscale.pipeline.program import named_tensors
from lightning_unitscale.ranks import gathered_on, hand_out
from lightning_unitscale.strategies.freed_parameters import FreedStorage
from lightning_unitscale.strategies.grid import Replicas


@torch.no_grad()
def give_first_weights(module: nn.Module) -> None:
    """Give all ranks the parameters and buffers of the first one; every rank calls it."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)


class Owners:
    """The owners of a module's parameters and buffers.

    Tensors of no stage are the same on all ranks and count as the first rank's.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        group: dist.ProcessGroup | None,
        replicas: Replicas,
        *,
        frees: bool = False,
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._replicas, self._steppers = replicas, ownership.steppers
        # The ranks that have all gradients and optimizer states together.
        self._together = None if self._steppers else group
        self._tensors = tensors = named_tensors(module)
        self._name_of = {id(tensor): name for name, tensor in tensors.items()}
        self._device = next(iter(tensors.values())).device
        # For each rank of the group, the names of the tensors in its stages.
        self.names = names = ownership.names
        self._owned = ownership.parameters_of(self._rank)
        self._first = {
            name: next((rank for rank, own in enumerate(names) if name in own), 0)
            for name in tensors
        }
        others = {
            name: tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter)
            and name not in self._owned
            and any(name in own for own in names)
        }
        kept = [tensor for name, tensor in tensors.items() if name not in others]
        self.freed = FreedStorage(others if frees else {}, kept)

    def counts_here(self, tensor: Tensor) -> bool:
        """Return whether this rank is the first owner that steps a tensor, and so counts it."""
        name = self._name_of[id(tensor)]
        is_of_pipeline = not self._steppers or self._steppers.get(name, 0) == self._replicas.rank
        return is_of_pipeline and self._first[name] == self._rank

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every rank the owners' values of all parameters and buffers."""
        self.freed.take()
        for name, tensor in self._tensors.items():
            values = tensor.data
            dense = values.contiguous()
            dist.broadcast(dense, group=self._group, group_src=self._first[name])
            if dense is not values:
                values.copy_(dense)

    def free(self, optimizers: Iterable[Optimizer]) -> None:
        """Free values, gradients and optimizer states that are on other ranks."""
        elsewhere = [
            self._tensors[name]
            for name, stepper in self._steppers.items()
            if stepper != self._replicas.rank
        ]
        for optimizer in optimizers:
            for param in (*self.freed.parameters.values(), *elsewhere):
                optimizer.state.pop(param, None)
        self.freed.free()

    @torch.no_grad()
    def state_on_first(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return ``state()`` with the owners' values on the first rank, ``{}`` on the others.

        None of its tensors lies in memory that is freed later.
        """
        was_free = self.freed.is_free
        if self._rank == 0:
            self.freed.take()
        for name, tensor in self._tensors.items():
            owner = self._first[name]
            if owner and self._rank in (owner, 0):
                hand_out(tensor.data, (owner, 0), self._group)
        if self._rank:
            return {}
        try:
            on_first: dict[str, Any] = self.freed.copied(state())
        finally:
            if was_free:
                self.freed.free()
        return on_first

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over the pipelines that step with them.

        The first owner of a tied weight does it for the others. If each owner summed for itself,
        the sums could differ in their last bits, and then the weights would.
        """
        if self._replicas.count == 1:
            return
        averaged = {
            name: param for name, param in self._owned.items() if self._first[name] == self._rank
        }
        self._replicas.average(averaged, self._tensors, self._device, self._steppers)
        for name, param in self._owned.items():
            ranks = [rank for rank, owned in enumerate(self.names) if name in owned]
            if self._steppers.get(name, self._replicas.rank) != self._replicas.rank:
                param.grad = None
            elif len(ranks) > 1:
                hand_out_gradient(param, ranks, self._group)

    def share_steps(self) -> None:
        """Give all pipelines what each has stepped; called after an optimizer's step."""
        trained = {name: param for name, param in self._owned.items() if param.requires_grad}
        if self._steppers:
            self._replicas.share(trained, self._steppers)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of a single device on the first rank, ``{}`` on the others."""
        state_dict = optimizer.state_dict()
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        own = {
            index: state
            for index, state in state_dict["state"].items()
            if self.counts_here(parameters[index])
        }
        on_cpu = tree_map_only(Tensor, lambda tensor: tensor.cpu(), own)
        parts = gathered_on(0, on_cpu, self._together)
        if parts is None:
            return {}
        together = {index: state for part in parts for index, state in part.items()}
        return {**state_dict, "state": dict(sorted(together.items()))}

    def num_gradient_elements(self, parameters: Iterable[Tensor]) -> int:
        """Return the number of elements with a gradient among the parameters of all ranks."""
        own = [param for param in parameters if param.grad is not None and self.counts_here(param)]
        count = torch.tensor(sum(param.numel() for param in own), device=self._device)
        dist.all_reduce(count, group=self._together)
        return int(count)

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Scale the gradients of all ranks so that their norm together is at most ``limit``."""
        parameters = list(parameters)
        norms = torch.zeros(len(parameters), device=self._device)
        for norm, param in zip(norms, parameters, strict=True):
            if param.grad is not None and self.counts_here(param):
                norm.copy_(torch.linalg.vector_norm(param.grad))
        # Every norm is added to zeros, so that the total has the same bits on all ranks and does
        # not depend on the owners. Otherwise the weights of the pipelines would drift apart.
        dist.all_reduce(norms, group=self._together)
        total = torch.linalg.vector_norm(norms)
        factor = (limit / (total + 1e-6)).clamp(max=1.0)
        for param in parameters:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))
