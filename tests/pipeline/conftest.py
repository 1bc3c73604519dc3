"""A process group of one rank in the test process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def process_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a Trainer with the strategy on a single rank, in this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield {
        "accelerator": "cpu", "devices": 1, "max_steps": 4, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "limit_val_batches": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
    }  # fmt: skip
    if dist.is_initialized():
        dist.destroy_process_group()
