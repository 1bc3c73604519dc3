"""Refuse what cannot run as a pipeline, and compare what all ranks must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_unitscale.capture.steps import ModuleSteps, steps_of
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.program import leaves_of
from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.ranks import differing_ranks
from lightning_unitscale.remat.api import StepPartitioner
from lightning_unitscale.strategies.remat import check_schedule


def refuse_unsupported(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    precision: Precision,
    capture: str,
    schedule: Schedule,
) -> None:
    """Refuse what cannot run as a pipeline."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "PipelineStrategy: automatic_optimization=False; expected automatic optimization: "
            "the strategy runs forward and backward together."
        )
    sharded = [name for name, param in module.named_parameters() if isinstance(param, DTensor)]
    if sharded:
        raise MisconfigurationException(
            f"PipelineStrategy: {sharded[0]} is a DTensor, of fully_shard or parallelize_module: a "
            "rank has a part of each parameter, and stages are cut between whole ones; expected "
            "plain parameters; leave configure_model out and take data_parallel=... for more "
            "devices than stages, with shard_optimizer=True to divide gradients and optimizer "
            "states among them, or shard parameters under ModelParallelStrategy."
        )
    trains = trainer.state.fn == TrainerFn.FITTING
    steps = steps_of(module)
    if steps is not None and trains:
        _refuse_steps(steps, capture, schedule)
    if isinstance(precision, MixedPrecision) and precision.scaler:
        raise MisconfigurationException(
            "PipelineStrategy: precision='16-mixed' scales the loss outside of the step, where "
            "the pipeline's backward has run already; expected '32-true' or 'bf16-mixed'."
        )
    normalized = [
        name
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.modules.batchnorm._BatchNorm) and submodule.track_running_stats
    ]
    if normalized and trains:
        raise MisconfigurationException(
            f"PipelineStrategy: {normalized[0]} takes its statistics over each microbatch, not "
            "over the batch; expected normalization of single samples; use GroupNorm or "
            "LayerNorm."
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that must see all parameters, of which a rank steps a part."""
    for optimizer in optimizers:
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        if "ZeroRedundancyOptimizer" in names:
            raise MisconfigurationException(
                "PipelineStrategy: ZeroRedundancyOptimizer divides all parameters among all ranks, "
                "and a rank has those of its stages; expected the optimizer that it wraps; return "
                "that from configure_optimizers, and pass shard_optimizer=True."
            )
        if "LBFGS" in names:
            raise MisconfigurationException(
                "PipelineStrategy: LBFGS takes one direction for all parameters, and a rank has "
                "the gradients of its stages; expected an optimizer that steps each parameter by "
                "itself; use AdamW, say."
            )


def _refuse_steps(steps: ModuleSteps, capture: str, schedule: Schedule) -> None:
    """Refuse what callbacks have asked of the steps, before anything has run."""
    if capture == "forward":
        raise MisconfigurationException(
            f"PipelineStrategy(capture='forward') with {_names(steps)}: they rewrite and observe "
            "training_step as one graph, and forward alone is captured here; expected "
            "capture='auto' or 'step'; change it, or leave the callbacks out."
        )
    if isinstance(steps.partition_fn, StepPartitioner):
        check_schedule(steps.partition_fn.budget, schedule)
    if steps.executor == "inductor":
        raise MisconfigurationException(
            "PipelineStrategy with compile=True: the stages run operation by operation; expected "
            "compile=False; leave it out."
        )


def not_one_graph(steps: ModuleSteps, reason: Exception) -> MisconfigurationException:
    """The error for a step that callbacks want whole and of which only ``forward`` can be cut."""
    return MisconfigurationException(
        f"PipelineStrategy with {_names(steps)}: the step cannot be cut, and of forward alone "
        f"the callbacks would see a part: {reason}"
    )


def _names(steps: ModuleSteps) -> str:
    return (
        ", ".join(owner for owner in steps.owners if owner != "PipelinedStep") or "captured steps"
    )


def check_same_cuts(pipe: Pipe, group: dist.ProcessGroup | None) -> None:
    """Compare the stages of all ranks; every rank calls it."""
    stages = [
        (
            stage.info,
            [(node.op, str(node.target)) for node in stage.graph.nodes if _named(node)],
        )
        for stage in pipe.stages
    ]
    if others := differing_ranks(hashlib.sha256(repr(stages).encode()).hexdigest(), group):
        raise RuntimeError(
            f"rank(s) {others} of the pipeline have other stages than the first: their steps were "
            "captured or cut differently; expected the same code, versions and Python state on "
            "all ranks; keep what depends on the rank out of the step, or mark the cuts with "
            "pipe_split() or split={path: SplitPoint.BEGINNING}."
        )


def _named(node: Any) -> bool:
    """Whether the target is a name: the address of a function differs between processes."""
    return node.op in {"call_method", "get_attr"}


def check_equal(batch: Any, group: dist.ProcessGroup | None, *, what: str = "batches") -> None:
    """Check that all ranks have the same batch; every rank calls it."""
    digest = hashlib.sha256()
    for tensor in leaves_of(batch):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(str(tuple(tensor.shape)).encode())
        # A copy: NumPy's view would fix the size of the batch's memory for good.
        as_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
        digest.update(as_bytes.numpy().tobytes())
    if differing_ranks(digest.hexdigest(), group):
        raise RuntimeError(
            f"the ranks of the pipeline were given different {what}; expected the same on each: "
            "every stage reads the inputs that it needs from its own; call "
            "seed_everything(..., workers=True) before the data is shuffled, and shard no data by "
            "rank."
        )
