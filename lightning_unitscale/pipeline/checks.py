"""Refuse settings that cannot run as a pipeline, and compare stages and batches between ranks."""

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

from lightning_unitscale.capture.module_steps import ModuleSteps, steps_of
from lightning_unitscale.loops.ranks import differing_ranks
from lightning_unitscale.memory.budgets import Budget
from lightning_unitscale.memory.remat_module import StepPartitioner
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.program import leaves_of
from lightning_unitscale.pipeline.schedules import Schedule


def refuse_unsupported(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    precision: Precision,
    capture: str,
    schedule: Schedule,
) -> None:
    """Refuse modules, callbacks and settings that cannot run as a pipeline."""
    if not module.automatic_optimization:
        raise MisconfigurationException(
            "PipelineStrategy: automatic_optimization=False is not supported, because the strategy "
            "runs forward and backward together. Use automatic optimization."
        )
    sharded = [name for name, param in module.named_parameters() if isinstance(param, DTensor)]
    if sharded:
        raise MisconfigurationException(
            f"PipelineStrategy: {sharded[0]} is a DTensor, made by fully_shard or "
            "parallelize_module. Stages are cut between whole parameters. Leave configure_model "
            "out and use data_parallel=... for more devices than stages, or shard under "
            "ModelParallelStrategy."
        )
    trains = trainer.state.fn == TrainerFn.FITTING
    steps = steps_of(module)
    if steps is not None and trains:
        if capture == "forward" and needs_whole_step(steps):
            raise MisconfigurationException(
                f"PipelineStrategy(capture='forward') with {_names(steps)}: rules and memory "
                "budgets need training_step as one graph, but only forward is captured. Use "
                "capture='auto' or 'step', or leave the rules and the budget out."
            )
        if isinstance(steps.partition_fn, StepPartitioner):
            check_schedule(steps.partition_fn.budget, schedule)
        if steps.executor == "inductor":
            raise MisconfigurationException(
                "PipelineStrategy with compile=True: the stages run operation by operation. Leave "
                "compile=True out."
            )
    if isinstance(precision, MixedPrecision) and precision.scaler:
        raise MisconfigurationException(
            "PipelineStrategy: precision='16-mixed' scales the loss after the step, but the "
            "backward pass runs within the step. Use '32-true' or 'bf16-mixed'."
        )
    normalized = [
        name
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.modules.batchnorm._BatchNorm) and submodule.track_running_stats
    ]
    if normalized and trains:
        raise MisconfigurationException(
            f"PipelineStrategy: {normalized[0]} takes its statistics over each microbatch instead "
            "of the batch. Normalize single samples: use GroupNorm or LayerNorm."
        )


def refuse_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers that need all parameters. A rank steps only a part of them."""
    for optimizer in optimizers:
        names = {cls.__name__ for cls in type(optimizer).__mro__}
        if "ZeroRedundancyOptimizer" in names:
            raise MisconfigurationException(
                "PipelineStrategy: ZeroRedundancyOptimizer divides all parameters among all ranks, "
                "but a rank has only those of its stages. Return the optimizer that it wraps from "
                "configure_optimizers. More stages divide the optimizer state further."
            )
        if "LBFGS" in names:
            raise MisconfigurationException(
                "PipelineStrategy: LBFGS takes one direction for all parameters, but a rank has "
                "only the gradients of its stages. Use an optimizer that steps each parameter by "
                "itself, such as AdamW."
            )


def check_schedule(budget: Budget, schedule: Schedule) -> None:
    """Refuse a budget that a schedule cannot keep."""
    if budget != "min_cut" and schedule.num_in_flight(0, 1, 1) is None:
        raise MisconfigurationException(
            f"budget={budget!r} with PipelineStrategy({schedule.name!r}): the ranks alternate "
            "between several stages, so the number of microbatches that each stage keeps at the "
            "peak is unknown. Use budget='min_cut', or the schedule '1F1B' or 'GPipe'."
        )


def needs_whole_step(steps: ModuleSteps) -> bool:
    """Check whether callbacks rewrite the whole step. Others scale or measure its tensors."""
    return steps.changes_function or steps.partition_fn is not None


def not_one_graph(steps: ModuleSteps, reason: Exception) -> MisconfigurationException:
    """Return the error for an uncuttable step that callbacks need as a whole."""
    return MisconfigurationException(
        f"PipelineStrategy with {_names(steps)}: rules and memory budgets need the whole step, "
        f"which cannot be cut: {reason}"
    )


def _names(steps: ModuleSteps) -> str:
    owners = (owner for owner in steps.owners if owner != "PipelinedStep")
    return ", ".join(owners) or "captured steps"


def check_same_cuts(pipe: Pipe, group: dist.ProcessGroup | None) -> None:
    """Compare the stages of all ranks. Every rank must call it."""
    # Compare only targets that are names. The address of a function differs between processes.
    named = {"call_method", "get_attr"}
    stages = [
        (stage.info, [(node.op, node.target) for node in stage.graph.nodes if node.op in named])
        for stage in pipe.stages
    ]
    if others := differing_ranks(hashlib.sha256(repr(stages).encode()).hexdigest(), group):
        raise RuntimeError(
            f"the stages of rank(s) {others} differ from those of the pipeline's first rank. All "
            "ranks need the same code, versions and Python state. Keep code that depends on the "
            "rank out of the step, or mark the cuts with pipe_split() or split={path: "
            "SplitPoint.BEGINNING}."
        )


def check_equal(batch: Any, group: dist.ProcessGroup | None, *, what: str = "batches") -> None:
    """Check that all ranks have the same batch. Every rank must call it."""
    digest = hashlib.sha256()
    for tensor in leaves_of(batch):
        if not isinstance(tensor, Tensor):
            continue
        digest.update(str(tuple(tensor.shape)).encode())
        # Copied, because a NumPy view would keep the batch's storage from being resized.
        as_bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()
        digest.update(as_bytes.numpy().tobytes())
    if differing_ranks(digest.hexdigest(), group):
        raise RuntimeError(
            f"the ranks of the pipeline were given different {what}. Every stage reads its inputs "
            "from its own rank's batch. Call seed_everything(..., workers=True) before the data is "
            "shuffled, and do not shard data by rank."
        )
