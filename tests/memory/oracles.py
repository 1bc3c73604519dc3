"""Oracles from a real step: memory events of torch's profiler, and autograd hooks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_unitscale.memory.costs import workspace_bytes


def sum_of(output: Any) -> Tensor:
    """A loss for any output."""
    return torch.stack([tensor.float().square().sum() for tensor in tree_leaves(output)]).sum()


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind tensors, each once; of distributed ones this rank's."""
    plain = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    found = [tensor.untyped_storage() for tensor in plain if isinstance(tensor, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


def measured_peak(
    module: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] = sum_of,
    optimizer: torch.optim.Optimizer | None = None,
) -> int:
    """Bytes at the peak of the second step, from the events of the allocator."""

    def step() -> None:
        output = module(*inputs)
        loss(output).backward()
        del output
        if optimizer is not None:
            optimizer.step()
        module.zero_grad(set_to_none=True)

    step()
    gc.collect()
    state = [] if optimizer is None else list(optimizer.state.values())
    before = storage_bytes(tree_leaves([*module.parameters(), *module.buffers(), inputs, state]))
    with profile(profile_memory=True) as profiled:
        step()
    return before + bytes_allocated(profiled)[0]


def bytes_allocated(profiled: profile) -> tuple[int, int]:
    """The most bytes alive at once of those that were allocated meanwhile, and those at its end."""
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    live = top = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        top = max(top, live)
    return top, live


def measured_saved(
    module: nn.Module, *inputs: Any, loss: Callable[[Any], Any] = lambda output: output
) -> int:
    """Bytes of the storages that autograd saves in a forward pass, parameters and buffers apart."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(module(*inputs))
    there = {
        tensor.untyped_storage()._cdata for tensor in [*module.parameters(), *module.buffers()]
    }
    return storage_bytes(tensor for tensor in kept if tensor.untyped_storage()._cdata not in there)


def allocated_beside_results(function: Callable[[], object]) -> int:
    """Return the most bytes alive during a call in one thread beyond its results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profiled:
            result = function()
    finally:
        torch.set_num_threads(threads)
    peak, alive = bytes_allocated(profiled)
    del result
    return peak - alive


def predicted_workspace(operator: object, arguments: tuple[object, ...], result: object) -> int:
    """Return the workspace that is predicted for a call in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return workspace_bytes(operator, arguments, result, "cpu")
    finally:
        torch.set_num_threads(threads)
