"""Simulate the other ranks of modules that FSDP2 or tensor parallelism has sharded.

FSDP allocates and frees gathered parameters by resizing a storage, below the dispatcher. On a GPU
it uses streams, which do not exist without one.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_unitscale.capture.fake_device import SimulatedDevice, is_several_tensors
from lightning_unitscale.patching import nothing, shadowed


@contextlib.contextmanager
def fake_process_group(world_size: int, *, device: str = "cpu") -> Iterator[None]:
    """Make the process rank 0 of a group whose other ranks do not exist.

    For :func:`~lightning_unitscale.profiler.profile_graph` of a sharded module: make its mesh,
    shard it and profile it in this context. Collectives return at once and communicate nothing.

    Args:
        world_size: Number of ranks of the group.
        device: Device type of each rank. A GPU need not exist.

    Raises:
        ValueError: If the process is in a group already, or ``world_size`` is not positive.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> from lightning_unitscale.profiler import fake_process_group, profile_graph
        >>> with torch.device("meta"):
        ...     model = nn.Linear(64, 64)
        >>> with fake_process_group(8):
        ...     model = fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        ...     profile = profile_graph(model, torch.ones(2, 64))
        >>> profile.num_ranks, profile.parameter_bytes, profile.gradient_bytes
        (8, 2080, 2080)
    """
    from torch.distributed.tensor import _dispatch, _random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError(
            f"`world_size={world_size}`: this process is in a group of {dist.get_world_size()} "
            "already. Expected none. Call torch.distributed.destroy_process_group() first."
        )
    if world_size < 1:
        raise ValueError(
            f"`world_size={world_size}`: not a number of ranks. Expected a positive number."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with (
            _streams_of(torch.device(device)),
            # Distributed tensors draw random numbers without a state shared by the ranks.
            shadowed(_random, _rng_tracker=None),
            shadowed(_dispatch, is_rng_supported_mesh=lambda mesh: False),
        ):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _streams_of(device: torch.device) -> Iterator[None]:
    """Give FSDP the CPU's streams instead of the device's."""
    if device.type == "cpu":
        yield
        return
    cpu = torch.cpu
    with (
        shadowed(
            torch.cuda,
            Stream=cpu.Stream,
            Event=cpu.Event,
            stream=cpu.stream,
            current_stream=cpu.current_stream,
            current_device=lambda: 0,
            set_device=nothing,
        ),
        _NewOnDevice(device),
    ):
        yield


class _NewOnDevice(TorchFunctionMode):
    """Mode that makes the empty tensors fake that FSDP creates on the device while sharding."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._mode = SimulatedDevice(device)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_new = device is not None and torch.device(device).type == self._mode.device.type
        is_faking = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if func is not torch.empty or not is_new or is_faking:
            return func(*args, **kwargs)
        with self._mode:
            return func(*args, **kwargs)


@contextlib.contextmanager
def watching_shards(
    resizing: Callable[[Any, int], None],
    unseen: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Show a recorder the resized storages, and hide the propagation of shardings."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        resizing(self, int(size))
        return original(self, size)

    with contextlib.ExitStack() as stack:
        stack.enter_context(shadowed(torch.UntypedStorage, resize_=resize_))
        if _distributed_classes():
            from torch.distributed.tensor._sharding_prop import ShardingPropagator

            name = "_propagate_tensor_meta_non_cached"
            propagate = getattr(ShardingPropagator, name)

            def propagate_unseen(self: Any, op_schema: Any) -> Any:
                with unseen():
                    return propagate(self, op_schema)

            stack.enter_context(shadowed(ShardingPropagator, **{name: propagate_unseen}))
        yield


def _distributed_classes() -> tuple[type, ...]:
    # Only a program with such tensors has imported their classes, and the import is slow.
    return _imported_classes() if "torch.distributed.tensor" in sys.modules else ()


@functools.cache
def _imported_classes() -> tuple[type, ...]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


def has_distributed_class(kinds: Any) -> bool:
    """Check whether one of the classes is that of a shard or of a pending collective's result."""
    return any(issubclass(kind, _distributed_classes()) for kind in kinds)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, or any other tensor unchanged."""
    while isinstance(tensor, _distributed_classes()):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        tensor = getattr(tensor, names[0])
    return tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Check whether a tensor's numbers are in other tensors, as in a quantized weight."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, _distributed_classes())


def wrapped_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the numbers of a tensor: for a plain tensor, itself."""
    if not is_wrapper(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in wrapped_parts(getattr(tensor, name))]


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the memory of a tensor. A sparse tensor has several."""
    is_fake = isinstance(tensor, FakeTensor)
    # Plans are made under a fake tensor mode, which forbids access to a real tensor.
    with contextlib.nullcontext() if is_fake else unset_fake_temporarily():
        if tensor.layout is torch.sparse_coo:
            # The public names work on coalesced tensors, which have other memory.
            return tensor._indices(), tensor._values()
        if tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        if tensor.layout in {torch.sparse_csc, torch.sparse_bsc}:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def is_sharded(module: nn.Module) -> bool:
    """Check whether some of the parameters are distributed tensors."""
    return any(isinstance(param, _distributed_classes()) for param in module.parameters())


def num_ranks(module: nn.Module) -> int:
    """Return the number of ranks that the module is sharded over, or 1 if it is not sharded."""
    return dist.get_world_size() if is_sharded(module) else 1


def take_over(module: nn.Module, device: torch.device) -> SimulatedDevice:
    """Replace the tensors of a sharded module, which cannot be copied, by fake ones."""
    name = type(module).__name__
    if not dist.is_initialized():
        raise ValueError(
            f"`module={name}`: it is sharded, and its process group is gone. Expected one. Profile "
            "it where it was sharded, within fake_process_group(world_size)."
        )
    module.zero_grad(set_to_none=True)
    tensors = [local_tensor(tensor) for tensor in (*module.parameters(), *module.buffers())]
    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    if modes and isinstance(modes[0], SimulatedDevice) and modes[0].device.type == device.type:
        return modes[0]
    found = {str(tensor.device) for tensor in tensors} - {"meta"}
    if found:
        raise ValueError(
            f"`module={name}`: it is sharded, so it cannot be copied, and it is on "
            f"{', '.join(sorted(found))}. Expected a module on meta. "
            'Create and shard it within `with torch.device("meta"):`.'
        )
    if device.type != "cpu" and any(map(_is_offloaded, module.modules())):
        raise ValueError(
            f"`module={name}`: FSDP keeps its shards on the CPU, which is not simulated. Expected "
            "fully_shard without CPUOffloadPolicy. Shard it without the policy to profile it."
        )
    mode = SimulatedDevice(device)
    with mode:
        for param in module.parameters():
            if not is_several_tensors(param):  # a tensor of a layer that is not sharded
                fake = torch.empty(param.shape, dtype=param.dtype, device=device)
                whole = nn.Parameter(fake, requires_grad=param.requires_grad)
                torch.utils.swap_tensors(param, whole)
        emptied(module, device)
    return mode


def _is_offloaded(module: nn.Module) -> bool:
    """Check whether FSDP keeps the parameters of this module itself on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    if not isinstance(module, FSDPModule):
        return False
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    policies = (getattr(group, "offload_policy", None) for group in groups)
    return any(isinstance(policy, CPUOffloadPolicy) for policy in policies)


def emptied(module: nn.Module, device: torch.device | str) -> None:
    """Move a module to a device without its values, and keep its parameter objects."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
