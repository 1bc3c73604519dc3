"""Which of several processes this is."""

from __future__ import annotations

import torch.distributed as dist


def world_size() -> int:
    """How many processes train together, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this one, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
