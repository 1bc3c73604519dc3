"""Agree among ranks: ``python -m tests.distributed.agreement_run FOLDER``, per rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_unitscale.loops.ranks import (
    any_rank,
    broadcast,
    differing_ranks,
    failing_together,
    gathered,
    hand_out,
    rank,
    world_size,
)


def _problem(of_rank: int) -> str:
    try:
        with failing_together():
            if rank() == of_rank:
                raise ValueError(f"rank {of_rank} refuses")
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Write the findings of this rank."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    own = rank()
    handed = torch.full((2,), float(own))
    if own > 0:
        hand_out(handed, (1, 2), None)
    found: dict[str, Any] = {
        "size": world_size(),
        "gathered": gathered({"rank": own}),
        "any": [any_rank(own == 2), any_rank(own == 3)],
        "differing": [differing_ranks(own // 2), differing_ranks("same")],
        "broadcast": broadcast(f"of {own}", 1),
        "problems": [_problem(1), _problem(3)],
        "handed": handed,
    }
    torch.save(found, folder / f"agreement-{own}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
