"""Run captured steps within a memory budget, or with Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning_unitscale.callbacks.fallbacks import keep_plain_where_recorded
from lightning_unitscale.callbacks.lightning_steps import attach_steps
from lightning_unitscale.callbacks.options import mode_of
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.passes import GraphPass

if TYPE_CHECKING:
    import lightning.pytorch as pl


def capture_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    owner: pl.Callback,
    partitioner: Any,
    *,
    compile: bool | CompileMode,
    passes: Sequence[GraphPass] = (),
    leaving: ExitStack,
) -> ModuleSteps:
    """Capture the steps of a Trainer's module, within a budget or with Inductor if requested."""
    steps = attach_steps(trainer, module, owner)
    name = type(owner).__name__
    leaving.callback(lambda: steps.detach(name, *passes))
    if partitioner is not None:
        steps.partition_by(partitioner)
        leaving.callback(steps.partition_by, None)
    if compile:
        steps.use_executor("inductor", mode_of(compile))
    keep_plain_where_recorded(steps, module)
    for graph_pass in passes:
        steps.add_pass(graph_pass)
    return steps
