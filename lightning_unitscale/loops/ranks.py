"""Share objects among all ranks, and raise the errors of one rank on all of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn

_Value = TypeVar("_Value")
# The owners of trainings whose ranks may run different numbers of steps.
UNEVEN: weakref.WeakSet[object] = weakref.WeakSet()


def joins_ranks(module: nn.Module) -> bool:
    """Check whether a wrapped module has trained in torch's ``Join`` context."""
    # A rank that has run out of batches repeats only the wrapper's collectives. The private name
    # was checked on torch 2.13 and 2.11.
    return bool(getattr(getattr(module, "_join_config", None), "enable", False))


def world_size() -> int:
    """Return the number of ranks that train together, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_distributed() -> bool:
    """Check whether there are other ranks, and all run the same steps."""
    return world_size() > 1 and not UNEVEN


def gathered(own: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the objects of all ranks, in rank order."""
    if not is_distributed():
        return [own]
    values = [own] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


def gathered_on(
    rank: int, own: _Value, group: dist.ProcessGroup | None = None
) -> list[_Value] | None:
    """Return the objects of a group's ranks on one of them, and ``None`` on the others."""
    values = [own] * dist.get_world_size(group) if dist.get_rank(group) == rank else None
    dist.gather_object(own, values, group=group, group_dst=rank)
    return values


def any_rank(flag: bool) -> bool:
    """Check whether a flag is set on any rank."""
    return any(gathered(flag))


def differing_ranks(own: object, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the ranks whose object differs from the first rank's."""
    values = gathered(own, group)
    return [rank for rank, value in enumerate(values) if value != values[0]]


def broadcast(own: _Value, source: int, group: dist.ProcessGroup | None = None) -> _Value:
    """Return the object of the rank ``source`` of a group on all of its ranks."""
    payload = [own]
    dist.broadcast_object_list(payload, group=group, group_src=source)
    return payload[0]


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a ``ValueError`` of one rank on all ranks, at the end of this context."""
    # Otherwise the others would wait for that rank in their next collective.
    problem = ""
    try:
        yield
    except ValueError as error:
        problem = str(error)
    if problem := next(filter(None, gathered(problem, group)), ""):
        raise ValueError(problem)


def broadcast_tensor(
    tensor: Tensor, source: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Copy the values of the rank ``source`` to all ranks of a group, in place."""
    # Only contiguous tensors can be sent and received.
    dense = tensor.contiguous()
    dist.broadcast(dense, group=group, group_src=source)
    if dense is not tensor:
        tensor.copy_(dense)


def hand_out(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Copy the first rank's values to the other ranks, in place. Each of them calls it."""
    first, *others = ranks
    dense = tensor.contiguous()
    if dist.get_rank(group) == first:
        for other in others:
            dist.send(dense, group=group, group_dst=other)
        return
    dist.recv(dense, group=group, group_src=first)
    if dense is not tensor:
        tensor.copy_(dense)
