"""Agreement of ranks: objects that all of them have, and errors that all of them raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

_Value = TypeVar("_Value")


def world_size() -> int:
    """Return how many ranks train together, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_distributed() -> bool:
    """Tell whether there are other ranks to agree with."""
    return world_size() > 1


def gathered(own: _Value, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the object of every rank, in the order of the ranks."""
    if not is_distributed():
        return [own]
    values = [own] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


def gathered_on(
    rank: int, own: _Value, group: dist.ProcessGroup | None = None
) -> list[_Value] | None:
    """Return the object of every rank of a group on one of them, and ``None`` on the others."""
    values = [own] * dist.get_world_size(group) if dist.get_rank(group) == rank else None
    dist.gather_object(own, values, group=group, group_dst=rank)
    return values


def any_rank(flag: bool) -> bool:
    """Tell whether a flag is set on any rank."""
    return any(gathered(flag))


def differing_ranks(own: object, group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the ranks whose object differs from the first rank's."""
    values = gathered(own, group)
    return [rank for rank, value in enumerate(values) if value != values[0]]


def broadcast(own: _Value, source: int, group: dist.ProcessGroup | None = None) -> _Value:
    """Return the object of the rank ``source`` of a group, on all of its ranks."""
    payload = [own]
    dist.broadcast_object_list(payload, group=group, group_src=source)
    return payload[0]


@contextlib.contextmanager
def failing_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raise a ``ValueError`` of one rank on all ranks, at the end of this context.

    The others would wait for that rank in their next collective.
    """
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
    """Give all ranks of a group the values of the rank ``source``, in place."""
    # Only contiguous tensors can be sent and received.
    dense = tensor.contiguous()
    dist.broadcast(dense, group=group, group_src=source)
    if dense is not tensor:
        tensor.copy_(dense)


def hand_out(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Give ranks the values of the first of them, in place; each of them calls it."""
    first, *others = ranks
    dense = tensor.contiguous()
    if dist.get_rank(group) == first:
        for other in others:
            dist.send(dense, group=group, group_dst=other)
        return
    dist.recv(dense, group=group, group_src=first)
    if dense is not tensor:
        tensor.copy_(dense)
