"""Add a note to out-of-memory errors: the largest tensors of the step, and a budget that fits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from lightning_unitscale.memory.budgets import parse_bytes
from lightning_unitscale.memory.fitting import owners_table
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.profile_step import profile_graph
from lightning_unitscale.memory.traced_planner import traced_problem
from lightning_unitscale.patching import nothing, shadowed

if TYPE_CHECKING:
    import lightning.pytorch as pl

_CAPACITY = re.compile(r"total capacity of ([0-9.]+ [KMGT]iB)")
_SHARE = 0.9  # the rest is for the CUDA context, workspaces and gaps between blocks


def note_memory(
    error: BaseException, trainer: pl.Trainer, module: pl.LightningModule, arguments: Any
) -> None:
    """Add a note to an out-of-memory error of a training step, and change nothing else."""
    # The step is profiled on fake tensors, which take no memory.
    try:
        note = _note(str(error), trainer, module, arguments)
    except Exception as reason:  # the user's error matters, not why it cannot be explained
        note = f"The step could not be profiled: {reason}"
    error.add_note(f"lightning_unitscale: {note}")


def _note(text: str, trainer: pl.Trainer, module: pl.LightningModule, arguments: Any) -> str:
    device = "cuda" if module.device.type == "cuda" else "cpu"
    options: Any = {
        "device": device,
        "method": "training_step",
        "context": trainer.precision_plugin.forward_context,
    }
    optimizer = trainer.optimizers[0] if trainer.optimizers else None
    with shadowed(module, log=nothing, log_dict=nothing):
        profile = profile_graph(module, *arguments, optimizer=optimizer, **options)
        problem = traced_problem(module, *arguments, **options)
    lines = [
        f"the predicted peak of this step is {format_bytes(profile.peak_bytes)} at batch size "
        f"{profile.batch_size}. The largest owners of its bytes:",
        owners_table(profile),
    ]
    capacity = _capacity(text, module.device)
    if capacity is None:
        return "\n".join(lines)
    resident = profile.optimizer_bytes + profile.library_bytes
    planner = Planner(problem, resident_bytes=resident, forward_bytes=profile.gradient_bytes)
    limit, floor = int(_SHARE * capacity), planner.floor.peak_bytes
    if floor <= limit:
        budget = f'"{limit // 2**20}MiB"' if limit > 2**24 else str(limit)
        lines.append(
            f"RematCallback({budget}) would fit into {format_bytes(capacity)}. The smallest peak "
            f"that can be planned is {format_bytes(floor)}."
        )
    else:
        lines.append(
            f"No budget fits into {format_bytes(capacity)}, since the smallest peak that can be "
            f"planned is {format_bytes(floor)}. Use smaller batches, or divide the model over "
            "ranks."
        )
    return "\n".join(lines)


def _capacity(text: str, device: torch.device) -> int | None:
    """Return the bytes of the device, from the error's text or from the device itself."""
    if (match := _CAPACITY.search(text)) is not None:
        return parse_bytes(match[1])
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return None
