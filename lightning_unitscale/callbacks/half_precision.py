"""What parameters in 16 bits leave unprotected, whatever is scaled around matmuls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_unitscale.callbacks.packages import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    import lightning.pytorch as pl


def report_unprotected(module: nn.Module) -> None:
    """Warn of what FP16 parameters lose between matmuls, and report what BF16 ones do."""
    types = {parameter.dtype for parameter in module.parameters()}
    if torch.float16 in types:
        rank_zero_warn(
            "UnitScaleCallback: the parameters are FP16 (precision='16-true'). Matmuls are scaled, "
            "but the tensors between them are not: gradients below 6e-8 become zero and values "
            "above 65504 overflow, as without this callback. Use Trainer(precision='16-mixed'), "
            "or 'bf16-mixed'."
        )
    elif torch.bfloat16 in types:
        rank_zero_info(
            "UnitScaleCallback: the parameters are BF16 (precision='bf16-true'). Matmuls are "
            "scaled, but an update below 1/512 of a weight is lost when it is added, as without "
            "this callback. Trainer(precision='bf16-mixed') keeps FP32 weights."
        )


def warn_of_zero_eps(optimizers: Iterable[Optimizer]) -> None:
    """Warn of an ``eps`` that is zero in the type of the parameters that it protects."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps <= 0:
                continue
            types = {parameter.dtype for parameter in group["params"]}
            lost = [dtype for dtype in types if torch.tensor(eps, dtype=dtype) == 0]
            if lost:
                rank_zero_warn(
                    f"{type(optimizer).__name__}(eps={eps}): eps is 0 in {lost[0]}, the type of "
                    "the parameters, so a weight whose squared gradient is 0 becomes NaN. Pass an "
                    "eps of at least 1e-7, or use Trainer(precision='16-mixed')."
                )
                break


def restart_loss_scale(
    trainer: pl.Trainer, checkpoint: dict[str, Any], state: Mapping[str, Any]
) -> None:
    """Leave out the gradient scaler's state of a checkpoint that needed no loss scale.

    Earlier versions had ``depth="all"``, which kept every gradient near 1 and started the scale at
    1. Resumed with that, gradients would be flushed to zero until the scale has grown.
    """
    name = type(trainer.precision_plugin).__qualname__
    if state.get("depth") == "all" and checkpoint.pop(name, None) is not None:
        rank_zero_info(
            "UnitScaleCallback: the checkpoint was written with depth='all', which is no longer "
            "supported. Its weights and optimizer state are loaded; the loss scale starts anew."
        )
