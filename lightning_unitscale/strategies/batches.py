"""Microbatches of a batch, what becomes of their results, and whether all ranks have one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def split(batch: Any, num_microbatches: int) -> list[Any]:
    """The batch in equal parts along the first dimension of its tensors.

    Tensors of another first dimension than the first tensor, and what is no tensor, are for all.

    Raises:
        ValueError: If the batch cannot be divided.
    """
    flat, spec = tree_flatten(batch)
    sizes = [len(one) for one in flat if isinstance(one, Tensor) and one.ndim]
    if not sizes or sizes[0] % num_microbatches:
        size = sizes[0] if sizes else 0
        raise ValueError(
            f"num_microbatches={num_microbatches}: a batch of {size} samples cannot be divided "
            "into as many equal parts; expected a multiple; change one of the two, and pass "
            "drop_last=True to the DataLoader if it is the last batch."
        )
    parts: list[list[Any]] = [[] for _ in range(num_microbatches)]
    for one in flat:
        divided = isinstance(one, Tensor) and one.ndim and len(one) == sizes[0]
        pieces = one.chunk(num_microbatches) if divided else [one] * num_microbatches
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [tree_unflatten(part, spec) for part in parts]


def combined(results: Sequence[Sequence[Any]]) -> list[Any]:
    """One result of the microbatches' results.

    The mean of single floating-point numbers, the sum of single whole numbers, and everything else
    one after the other along the first dimension.
    """
    return [_combine(list(each)) for each in zip(*results, strict=True)]


def _combine(values: list[Any]) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].ndim:
        return torch.cat(values)
    stacked = torch.stack(values)
    return stacked.mean() if stacked.is_floating_point() else stacked.sum()


def combined_like(examples: Sequence[Any], count: int) -> list[Any]:
    """Unwritten tensors of the shapes that :func:`combined` gives for ``count`` microbatches."""
    return combined([examples] * count)


def check_equal(batch: Any, group: dist.ProcessGroup | None) -> None:
    """Check that all ranks have the same batch; every rank calls it.

    Raises:
        RuntimeError: If they have not.
    """
    digest = hashlib.sha256()
    for one in tree_flatten(batch)[0]:
        if isinstance(one, Tensor):
            digest.update(str(tuple(one.shape)).encode())
            as_bytes = one.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(as_bytes.numpy().tobytes())
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, digest.hexdigest(), group=group)
    if len(set(found)) > 1:
        raise RuntimeError(
            "the ranks of the pipeline were given different batches; expected the same batch on "
            "each: every stage reads the inputs that it needs from its own; call "
            "seed_everything(..., workers=True) before the data is shuffled, and shard no data by "
            "rank."
        )
