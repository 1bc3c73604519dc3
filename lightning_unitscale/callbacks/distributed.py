"""Agree across ranks, and adapt callbacks to a pipelined Trainer.

A pipelined Trainer captures, cuts and runs the step of one microbatch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_unitscale.callbacks.packages import is_lightning, misconfigured
from lightning_unitscale.capture.dynamo_capture import static_shapes
from lightning_unitscale.loops.ranks import gathered, is_distributed
from lightning_unitscale.matmuls.measurement import Measurement, combined_rms
from lightning_unitscale.scales.layout import FloatArray
from lightning_unitscale.scales.reduce import joined_rows, split_rows
from lightning_unitscale.scales.snapshot import ScaleSnapshot, merged_by_name

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_unitscale.pipeline.strategy import PipelineStrategy


def joint_measured(measured: Measurement) -> Measurement:
    """Return a measurement with the RMS over all ranks. The rest is this rank's own."""
    own = measured.forward, measured.backward, measured.outside
    forward, backward, outside = map(_joint, zip(*gathered(own), strict=True))
    return replace(measured, forward=forward, backward=backward, outside=outside)


def joint_late(measured: Measurement, lacking: Iterable[str]) -> tuple[Measurement, bool]:
    """Return the RMS over all ranks of late measurements, in one collective."""
    own = dict(measured.forward), dict(measured.backward), tuple(lacking)
    forward, backward, names = zip(*gathered(own), strict=True)
    result = replace(measured, forward=_joint(forward), backward=_joint(backward))
    return result, any(names) or bool(result.forward or result.backward)


def joint_reasons(*reasons: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """Return the reasons of all ranks, by name. If texts differ, the first rank's is used."""
    return tuple(
        {name: text for texts in reversed(of_ranks) for name, text in texts.items()}
        for of_ranks in zip(*gathered(reasons), strict=True)
    )


def joint_snapshot(snapshot: ScaleSnapshot, device: torch.device) -> ScaleSnapshot:
    """Return the statistics of the joint batch of all ranks."""
    # If ranks ran different graphs (a branch on data), only tensors that all have in the same units
    # are merged, by name. A tensor that a matmul reads on one rank only has its unit there.
    if not is_distributed():
        return snapshot
    if _is_same_on_all_ranks("\n".join(snapshot.names), device):
        rows = np.concatenate([snapshot.forward, snapshot.backward])
        forward, backward = np.split(_reduced(rows, snapshot, device), 2)
        return replace(snapshot, forward=forward, backward=backward)
    return merged_by_name(gathered(snapshot))


def _joint(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the RMS over all ranks of named values. Ranks may have measured different names."""
    names = dict.fromkeys(name for values in of_ranks for name in values)
    return {
        name: combined_rms([values[name] for values in of_ranks if name in values])
        for name in names
    }


def _is_same_on_all_ranks(text: str, device: torch.device) -> bool:
    """Check that all ranks have the same text, by its hash in one small collective."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    largest, negated_smallest = extremes.tolist()
    return bool(largest == -negated_smallest)


def _reduced(rows: FloatArray, snapshot: ScaleSnapshot, device: torch.device) -> FloatArray:
    table: Tensor = torch.as_tensor(rows).to(device)
    sums, extremes = split_rows(table, snapshot.layout)
    dist.all_reduce(sums)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    joint: FloatArray = joined_rows(sums, extremes, snapshot.layout).cpu().numpy()
    return joint


def pipeline_of(trainer: pl.Trainer) -> PipelineStrategy | None:
    """Return the strategy if it cuts training steps into stages, and ``None`` otherwise."""
    # Not by its class, since training on one device must not load the pipeline's engine.
    is_pipeline = hasattr(trainer.strategy, "num_microbatches")
    return cast("PipelineStrategy", trainer.strategy) if is_pipeline else None


def tensor_parallel_size(trainer: pl.Trainer) -> int:
    """Return the number of ranks that share the tensors of a step, 1 without tensor parallelism."""
    strategy: Any = trainer.strategy
    if not is_lightning(strategy, "ModelParallelStrategy"):
        return 1
    return int(strategy.device_mesh["tensor_parallel"].size())


def joint_over_parts(trainer: pl.Trainer) -> Callable[[float], float] | None:
    """Return how a tensor's RMS follows from its parts, or ``None`` if steps are whole."""
    if tensor_parallel_size(trainer) == 1:
        return None
    strategy: Any = trainer.strategy
    group = strategy.device_mesh["tensor_parallel"].get_group()
    return lambda rms: combined_rms(gathered(rms, group))


def refuse_distributed_tensors(trainer: pl.Trainer, option: str) -> None:
    """Refuse an option that takes a captured step apart if its tensors are distributed."""
    if (size := tensor_parallel_size(trainer)) > 1:
        raise misconfigured(
            f"{option} with tensor_parallel_size={size}: captured steps would have distributed "
            "tensors, whose graphs differ and are not supported. Expected "
            "tensor_parallel_size=1. Leave it out."
        )


def refuse_sharded_parameters(trainer: pl.Trainer, option: str, why: str, instead: str) -> None:
    """Refuse an option that needs whole parameters if each rank has only a part of them."""
    if is_lightning(trainer.strategy, "ModelParallelStrategy", "FSDPStrategy"):
        raise misconfigured(
            f"{option}: it {why}, and with {type(trainer.strategy).__name__} each rank has only a "
            f"part of each parameter. Expected a strategy that does not shard them. Use {instead}."
        )


def num_parts(trainer: pl.Trainer) -> int:
    """Return the number of microbatches and replicas that a batch's gradient averages over."""
    strategy = pipeline_of(trainer)
    if strategy is not None:
        return strategy.num_microbatches * strategy.data_parallel
    return trainer.world_size // tensor_parallel_size(trainer)


def rehearsed(trainer: pl.Trainer, batch: Any) -> Any:
    """Return the part of a training batch on which a step is rehearsed: its first microbatch."""
    # Every rank rehearses the whole step on it, before the first step frees parameters of other
    # ranks. Rehearsing on one rank would take as long, while the others wait.
    strategy = pipeline_of(trainer)
    if strategy is None:
        return batch
    from lightning_unitscale.pipeline.program import split_evenly

    return split_evenly(batch, strategy.num_microbatches)[0]


def rehearsing(trainer: pl.Trainer) -> AbstractContextManager[Any]:
    """Return the context of a rehearsed training step. Its captures are the ones to be cut."""
    if pipeline_of(trainer) is None:
        return nullcontext()
    return static_shapes()


def num_gradient_elements(trainer: pl.Trainer, parameters: Iterable[Tensor]) -> int:
    """Return the number of elements with a gradient, other stages included."""
    strategy = pipeline_of(trainer)
    if strategy is not None:
        return strategy.num_gradient_elements(parameters)
    return sum(param.numel() for param in parameters if param.grad is not None)
