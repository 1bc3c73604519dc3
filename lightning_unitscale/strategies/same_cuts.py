"""All ranks of a pipeline must have cut the same graph in the same places.

Each rank captures and cuts for itself, from the same module and batch and by constants, so they
agree. Where they would not (Python code that asks for its rank, other versions), tensors of one
shape could reach the wrong layer without a word.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch.distributed as dist

from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.stage import stage_info


def check_same_cuts(pipe: Pipe, group: dist.ProcessGroup | None) -> None:
    """Compare the stages of all ranks; every rank calls it.

    Raises:
        RuntimeError: If they differ, on all ranks.
    """
    stages = [
        (stage_info(one), [(node.op, str(node.target)) for node in one.graph.nodes if _named(node)])
        for one in pipe.stages
    ]
    digest = hashlib.sha256(repr(stages).encode()).hexdigest()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, digest, group=group)
    if len(set(found)) > 1:
        others = [rank for rank, one in enumerate(found) if one != found[0]]
        raise RuntimeError(
            f"rank(s) {others} of the pipeline have other stages than the first: their steps were "
            "captured or cut differently; expected the same code, versions and Python state on "
            "all ranks; keep what depends on the rank out of the step, or mark the cuts with "
            "pipe_split() or split={path: SplitPoint.BEGINNING}."
        )


def _named(node: Any) -> bool:
    """Whether the target is a name: the address of a function is another in every process."""
    return node.op in {"call_method", "get_attr"}
