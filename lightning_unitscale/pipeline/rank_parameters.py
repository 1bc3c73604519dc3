"""Manage the owners of parameters among the ranks, and free parameters on the other ranks.

Reading a tensor without storage crashes the process (a segmentation fault on a CPU, torch 2.13). So
the class of a freed parameter is one that raises an error instead.

Stages validate without the weights of other ranks. But a hook may merge adapters into weights, or
swap in averages. All ranks run the same hooks, so each rank needs the values. During the first
validation of a training every rank keeps all values, and reads of them are recorded.
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

from lightning_unitscale.loops.ranks import broadcast_tensor, gathered, gathered_on, hand_out
from lightning_unitscale.pipeline.data_parallel import Replicas
from lightning_unitscale.pipeline.program import named_tensors
from lightning_unitscale.pipeline.stage_owners import Ownership, hand_out_gradient

# Functions that need no values of the tensor.
_DESCRIBES = frozenset(
    {"__hash__", "__len__", "__reversed__", "data_ptr", "dim", "element_size", "get_device",
     "is_complex", "is_contiguous", "is_floating_point", "is_shared", "nelement", "numel",
     "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage",
     "stride", "untyped_storage"}
)  # fmt: skip
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def describes(func: Any) -> bool:
    """Check whether a function of a tensor needs none of its values."""
    attribute = _attribute(func)
    if attribute is not None:
        return bool(attribute) and attribute not in _VIEWS
    return getattr(func, "__name__", "") in _DESCRIBES


def _attribute(func: Any) -> str | None:
    """Return the attribute that a function gets or sets, or ``None`` for a method."""
    if getattr(func, "__name__", "") not in {"__get__", "__set__"}:
        return None
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


class FreedParameter(nn.Parameter):
    """A parameter without storage. It has a shape, a type and a device, but no values."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run functions that only describe the tensor, and refuse all others."""
        if describes(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = _attribute(func) or getattr(func, "__name__", func)
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(args[0].shape) if args and isinstance(args[0], cls) else "unknown"
        raise RuntimeError(
            f"{name} of a parameter of shape {shape}: the values of this parameter "
            "are on another rank of the pipeline (free_unowned=True). Read weights in hooks of the "
            "validation or after the training, pass free_unowned=False, or save a checkpoint."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"FreedParameter({tuple(self.shape)}, {self.dtype}, {self.device})"


class FreedStorage:
    """The memory of parameters, which can be freed and allocated again."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], kept: Iterable[Tensor]) -> None:
        held = Counter(_storage(tensor) for tensor in (*kept, *parameters.values()))
        self.parameters = {
            name: param
            for name, param in parameters.items()
            # Storage that two parameters share is not freed.
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
                # Weights may be mapped from a file, as from_pretrained does.
                param.data = param.detach().clone()
            param.untyped_storage().resize_(0)
            param.__class__ = FreedParameter
        self.is_free = True

    def take(self) -> None:
        """Allocate the memory again without values, which the caller sets. Idempotent."""
        if not self.is_free:
            return
        for param in self.parameters.values():
            param.__class__ = nn.Parameter
            param.untyped_storage().resize_(param.numel() * param.element_size())
        self.is_free = False

    def lose(self) -> None:
        """Make the values NaN on the CPU, because no rank can send them after an error."""
        if not self.is_free:
            return
        for param in self.parameters.values():
            param.__class__ = nn.Parameter
            lost = torch.empty(param.shape, dtype=param.dtype)
            param.data = lost.fill_(torch.nan) if lost.is_floating_point() else lost.zero_()
        self.is_free = False

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy tensors of a state dict to the CPU if their memory will be freed."""
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

        for key, value in state.items():  # in place: a state dict has versions as metadata
            state[key] = tree_map(copy, value)
        return state

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Restore the class of freed parameters within this context, for captures and guards."""
        freed = list(self.parameters.values()) if self.is_free else []
        for param in freed:
            param.__class__ = nn.Parameter
        try:
            yield
        finally:
            for param in freed if self.is_free else ():
                param.__class__ = FreedParameter


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class WatchedParameter(nn.Parameter):
    """A parameter that records whether its values are read."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function, and record whether it does more than describe the tensor."""
        if not describes(func):
            cls.is_read = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    is_read = False


class Watch:
    """A record of reads of a module's parameters, until it ends."""

    def __init__(self, module: nn.Module) -> None:
        # A separate class, because several modules may be watched at the same time.
        self._kind = type("WatchedParameter", (WatchedParameter,), {})
        self._parameters = [one for one in module.parameters() if type(one) is nn.Parameter]
        for parameter in self._parameters:
            parameter.__class__ = self._kind

    def end(self) -> bool:
        """Restore the parameters, and return whether any of them was read. Idempotent."""
        for parameter in self._parameters:
            if type(parameter) is self._kind:
                parameter.__class__ = nn.Parameter
        self._parameters = []
        return bool(self._kind.is_read)  # type: ignore[attr-defined]


@torch.no_grad()
def give_first_weights(module: nn.Module) -> None:
    """Copy the first rank's parameters and buffers to all ranks. Every rank calls it."""
    for tensor in (*module.parameters(), *module.buffers()):
        broadcast_tensor(tensor.data)


class Owners:
    """The owners of a module's parameters and buffers."""

    # Tensors of no stage are the same on all ranks and belong to the first rank.

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
        self._replicas = replicas
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
        """Check whether this rank is the first owner of a tensor, and so counts it."""
        return self._first[self._name_of[id(tensor)]] == self._rank

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every rank the owners' values of all parameters and buffers."""
        self.freed.take()
        for name, tensor in self._tensors.items():
            broadcast_tensor(tensor.data, self._first[name], self._group)

    def free(self, optimizers: Iterable[Optimizer]) -> None:
        """Free values, gradients and optimizer states that are on other ranks."""
        for optimizer in optimizers:
            for param in self.freed.parameters.values():
                optimizer.state.pop(param, None)
        self.freed.free()

    @torch.no_grad()
    def state_on_first(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return ``state()`` with the owners' values on the first rank, and ``{}`` on the others.

        None of its tensors uses memory that is freed later.
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
            return self.freed.copied(state())
        finally:
            if was_free:
                self.freed.free()

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients over the pipelines."""
        # The first owner of a tied weight averages for the others. If each owner did it, the sums
        # could differ in their last bits. The copies of the weight would then differ too.
        if self._replicas.count == 1:
            return
        averaged = {
            name: param for name, param in self._owned.items() if self._first[name] == self._rank
        }
        self._replicas.average(averaged)
        for name, param in self._owned.items():
            ranks = [rank for rank, owned in enumerate(self.names) if name in owned]
            if len(ranks) > 1:
                hand_out_gradient(param, ranks, self._group)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of a single device on the first rank, and ``{}`` on the others."""
        state_dict = optimizer.state_dict()
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        own = {
            index: state
            for index, state in state_dict["state"].items()
            if self.counts_here(parameters[index])
        }
        on_cpu = tree_map_only(Tensor, lambda tensor: tensor.cpu(), own)
        parts = gathered_on(0, on_cpu, self._group)
        if parts is None:
            return {}
        together = {index: state for part in parts for index, state in part.items()}
        return {**state_dict, "state": dict(sorted(together.items()))}

    def num_gradient_elements(self, parameters: Iterable[Tensor]) -> int:
        """Return the number of elements with a gradient, for parameters of all ranks."""
        own = [param for param in parameters if param.grad is not None and self.counts_here(param)]
        return sum(gathered(sum(param.numel() for param in own), self._group))

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Scale the gradients of all ranks so that their joint norm is at most ``limit``."""
        parameters = list(parameters)
        norms = torch.zeros(len(parameters), device=self._device)
        for norm, param in zip(norms, parameters, strict=True):
            if param.grad is not None and self.counts_here(param):
                norm.copy_(torch.linalg.vector_norm(param.grad))
        # Every norm is added to zeros, so the total has the same bits on all ranks, whatever the
        # owners. Otherwise the weights of the pipelines would drift apart.
        dist.all_reduce(norms, group=self._group)
        total = torch.linalg.vector_norm(norms)
        factor = (limit / (total + 1e-6)).clamp(max=1.0)
        for param in parameters:
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.dtype))
