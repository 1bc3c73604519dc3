"""What becomes of the results of microbatches, and whether all ranks have one batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten


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


def check_equal(batch: Any, group: dist.ProcessGroup | None, *, what: str = "batches") -> None:
    """Check that all ranks have the same batch; every rank calls it.

    Args:
        batch: The batch, or other tensors that the stages read.
        group: The ranks.
        what: What they are, for the error.

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
            f"the ranks of the pipeline were given different {what}; expected the same on each: "
            "every stage reads the inputs that it needs from its own; call "
            "seed_everything(..., workers=True) before the data is shuffled, and shard no data by "
            "rank."
        )
