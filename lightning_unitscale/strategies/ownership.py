"""The owners of parameters among the ranks, and parameters without memory on the others.

A tensor whose storage is gone crashes the process when an operation reads it (a segmentation fault
on a CPU, torch 2.13). So while a parameter is freed its class is one that raises instead.

Private names, checked on torch 2.13: ``torch._C.DisableTorchFunctionSubclass``, ``_cdata``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from lightning_unitscale.pipeline.ownership import Ownership
from lightning_unitscale.pipeline.program import named_tensors
from lightning_unitscale.ranks import hand_out
from lightning_unitscale.strategies.grid import Replicas

# What asks for no value of the tensor.
_DESCRIBES = frozenset(
    {"__hash__", "__len__", "__reversed__", "data_ptr", "dim", "element_size", "get_device",
     "is_complex", "is_contiguous", "is_floating_point", "is_shared", "nelement", "numel",
     "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage",
     "stride", "untyped_storage"}
)  # fmt: skip
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


@torch.no_grad()
def give_first_weights(module: nn.Module) -> None:
    """Give all ranks the first one's parameters and buffers; every rank calls it."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)


def describes(func: Any) -> bool:
    """Return whether a function of a tensor asks for no value of it."""
    attribute = _attribute(func)
    if attribute is not None:
        return bool(attribute) and attribute not in _VIEWS
    return getattr(func, "__name__", "") in _DESCRIBES


def _attribute(func: Any) -> str | None:
    """Return the name of the attribute that a function gets or sets; ``None`` for a method."""
    if getattr(func, "__name__", "") not in {"__get__", "__set__"}:
        return None
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


class FreedParameter(nn.Parameter):
    """A parameter whose storage is freed: it has a shape, a type and a device, and no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Lets through functions that only describe the tensor."""
        if describes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"{_attribute(func) or getattr(func, '__name__', func)}: the values of this parameter "
            "are on another rank of the pipeline (free_unowned=True); expected reads of weights in "
            "hooks of the validation and after the training, when every rank has all of them; read "
            "it there, pass free_unowned=False, or save a checkpoint."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"FreedParameter({tuple(self.shape)}, {self.dtype}, {self.device})"


class FreedStorage:
    """Frees the memory of parameters, and takes it again."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], kept: Iterable[Tensor]) -> None:
        held = Counter(_storage(tensor) for tensor in (*kept, *parameters.values()))
        self.parameters = {
            name: param
            for name, param in parameters.items()
            # A storage that two parameters share is freed by neither.
            if held[_storage(param)] == 1
            and type(param) is nn.Parameter
            and param.untyped_storage().nbytes() == param.numel() * param.element_size() > 0
        }
        self.is_free = False

    def free(self) -> None:
        """Free the memory, gradients included. Idempotent."""
        if self.is_free:
            return
        for param in self.parameters.values():
            param.grad = None
            if not param.untyped_storage().resizable():
                # Weights that were mapped from a file, as from_pretrained does.
                param.data = param.detach().clone()
            param.untyped_storage().resize_(0)
            param.__class__ = FreedParameter
        self.is_free = True

    def take(self) -> None:
        """Take memory again, of any values: the caller fills it. Idempotent."""
        if not self.is_free:
            return
        for param in self.parameters.values():
            param.__class__ = nn.Parameter
            param.untyped_storage().resize_(param.numel() * param.element_size())
        self.is_free = False

    def lose(self) -> None:
        """After an error, when no rank can send the values: make them NaN, on the CPU."""
        if not self.is_free:
            return
        for param in self.parameters.values():
            param.__class__ = nn.Parameter
            lost = torch.empty(param.shape, dtype=param.dtype)
            param.data = lost.fill_(torch.nan) if lost.is_floating_point() else lost.zero_()
        self.is_free = False

    def copied(self, state: Any) -> Any:
        """The structure, with CPU copies of the tensors in memory that will be freed."""
        own = {_storage(param) for param in self.parameters.values()}
        copies: dict[Any, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or _storage(leaf) not in own:
                return leaf
            # Tied weights stay one tensor.
            key = (_storage(leaf), leaf.storage_offset(), leaf.shape, leaf.stride())
            if key not in copies:
                copies[key] = leaf.detach().to("cpu", copy=True)
            return copies[key]

        if not isinstance(state, dict):
            return tree_map(copy, state)
        for key, value in state.items():  # in place: a state dict carries versions with it
            state[key] = tree_map(copy, value)
        return state

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Within this context freed parameters are of the usual class, for captures and guards."""
        freed = self.is_free
        if freed:
            for param in self.parameters.values():
                param.__class__ = nn.Parameter
        try:
            yield
        finally:
            if freed and self.is_free:
                for param in self.parameters.values():
                    param.__class__ = FreedParameter


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Owners:
    """The owners of a module's parameters and buffers.

    What no stage has is the same on all ranks and counts as the first rank's.

    Attributes:
        names: Names of what each rank of the group has in its stages.
        freed: The parameters that are others'.
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
        self._group = group
        self._rank = dist.get_rank(group)
        self._replicas = replicas
        self._steppers = ownership.steppers
        # The ranks that have all gradients and optimizer states together.
        self._together = None if self._steppers else group
        tensors = named_tensors(module)
        self.names = names = ownership.names
        self._owned = ownership.parameters_of(self._rank)
        self._device = next(iter(tensors.values())).device
        self._first = {
            name: next((rank for rank, own in enumerate(names) if name in own), 0)
            for name in tensors
        }
        self._tensors = tensors
        self._by_id = {id(tensor): name for name, tensor in tensors.items()}
        others = {
            name: param
            for rank in range(len(names))
            for name, param in ownership.parameters_of(rank).items()
            if name not in self._owned
        }
        kept = [tensor for name, tensor in tensors.items() if name not in others]
        self.freed = FreedStorage(others if frees else {}, kept)

    def counts_here(self, tensor: Tensor) -> bool:
        """Whether this rank is the first owner that steps it, and so the one that counts it."""
        name = self._by_id[id(tensor)]
        is_of_pipeline = not self._steppers or self._steppers.get(name, 0) == self._replicas.rank
        return is_of_pipeline and self._first[name] == self._rank

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every rank the owners' values of all parameters and buffers."""
        self.freed.take()
        for name, tensor in self._tensors.items():
            self._broadcast(tensor.data, self._first[name])

    def free(self, optimizers: Iterable[Optimizer]) -> None:
        """Free values and gradients of what other ranks own, and what they step of the state."""
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
        """On the first rank the result of ``state`` with the owners' values; ``{}`` on the others.

        Nothing in it lies in memory that is freed later.
        """
        was_free = self.freed.is_free
        if self._rank == 0:
            self.freed.take()
        for name, tensor in self._tensors.items():
            owner = self._first[name]
            if owner and self._rank == owner:
                dist.send(tensor.data.contiguous(), group=self._group, group_dst=0)
            elif owner and self._rank == 0:
                received = tensor.data.contiguous()
                dist.recv(received, group=self._group, group_src=owner)
                if received.data_ptr() != tensor.data_ptr():
                    tensor.data.copy_(received)
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
        """Average the gradients over the pipelines, for those that step with them.

        The first owner of a tied weight does it for the others: sums over the pipelines, made by
        each owner for itself, could differ in their last bits, and the owners with them.
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
                self._hand_out_gradient(param, ranks)

    def share_steps(self) -> None:
        """After an optimizer's step: what each pipeline has stepped, for all of them."""
        trained = {name: param for name, param in self._owned.items() if param.requires_grad}
        if self._steppers:
            self._replicas.share(trained, self._steppers)

    def _hand_out_gradient(self, parameter: nn.Parameter, ranks: list[int]) -> None:
        """The first rank's gradient for the other owners."""
        present = torch.tensor([parameter.grad is not None], device=self._device).int()
        hand_out(present, ranks, self._group)
        if self._rank != ranks[0]:
            parameter.grad = torch.empty_like(parameter).contiguous() if present.item() else None
        if parameter.grad is not None:
            hand_out(parameter.grad.contiguous(), ranks, self._group)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict that one device would have, on the first rank; ``{}`` on the others."""
        state_dict = optimizer.state_dict()
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        own = {
            index: state
            for index, state in state_dict["state"].items()
            if self.counts_here(parameters[index])
        }
        parts: list[Any] | None = None
        if dist.get_rank(self._together) == 0:
            parts = [None] * dist.get_world_size(self._together)
        on_cpu = tree_map_only(Tensor, lambda tensor: tensor.cpu(), own)
        dist.gather_object(on_cpu, parts, group=self._together, group_dst=0)
        if parts is None:
            return {}
        together = {index: state for part in parts for index, state in part.items()}
        return {**state_dict, "state": dict(sorted(together.items()))}

    def num_gradient_elements(self, parameters: Iterable[Tensor]) -> int:
        """Elements with a gradient among the parameters of all ranks."""
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
        # Each is added to zeros, so that the norm does not depend on which rank has what. Another
        # one in another pipeline would part their weights.
        dist.all_reduce(norms, group=self._together)
        total = torch.linalg.vector_norm(norms)
        factor = (limit / (total + 1e-6)).clamp(max=1.0)
        for param in parameters:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))

    def _broadcast(self, tensor: Tensor, rank: int) -> None:
        sent = tensor.contiguous()
        dist.broadcast(sent, group=self._group, group_src=rank)
        if sent is not tensor:
            tensor.copy_(sent)
