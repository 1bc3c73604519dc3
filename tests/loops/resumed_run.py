"""Trainings that leave a checkpoint, and go on from it: ``python -m ... FOLDER RUN ...``.

``killed:LOOP`` ends by SIGKILL, between a forward and a backward pass, some steps after its
checkpoint. ``resumed:LOOP`` goes on from there, for loops of several processes: each rank writes
what it and a whole run have computed to ``FOLDER/resumed:LOOP-RANK.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.callbacks import Simulate
from tests.distributed.launch import quiet_rank
from tests.distributed.loops_run import SIZES, SPREADS, whole
from tests.loops import zoo
from tests.loops.every_loop import LOOPS, NUM_ACCUMULATED, Batches, optimizer_of

NUM_STEPS = 12
# Units are checked in step 8, which the resumed run has not reached yet.
SAVE_AT, KILL_AT = 6, 10


def callbacks() -> tuple[UnitScaleCallback, ScaleMonitor]:
    """Callbacks whose rounding, and so every bit, depends on the units and on the step."""
    simulate = Simulate("fp8", rounding="stochastic")
    return UnitScaleCallback(simulate=simulate), ScaleMonitor(every_n_steps=2)


def batches(seed: int = 5) -> Batches:
    """Numbers that grow, so that units measured later are others."""
    own = zoo.batches("Blocks", NUM_STEPS * NUM_ACCUMULATED, seed)
    return [(x * 2.0 ** (index / 4), y) for index, (x, y) in enumerate(own)]


def _run(
    call: Callable[..., Any],
    backward: Callable[[Tensor], object],
    optimizer: Any,
    first: int,
    save: Callable[[int], object],
) -> None:
    for step in range(first, NUM_STEPS):
        for index in range(step * NUM_ACCUMULATED, (step + 1) * NUM_ACCUMULATED):
            torch.manual_seed(index)
            backward(call(*batches()[index])["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVE_AT:
            save(step + 1)


def plain(module: nn.Module, own: list[Any], folder: Path, resume: bool) -> None:
    optimizer, path = optimizer_of(module), folder / "run.pt"
    with attach(module, optimizer, own) as attachment:
        parts = {"model": module, "optimizer": optimizer, "callbacks": attachment}

        def save(step: int) -> None:
            torch.save({name: part.state_dict() for name, part in parts.items()}, path)

        if resume:
            state = torch.load(path, weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(state[name])
        _run(module, Tensor.backward, optimizer, attachment.step_index, save)


def fabric(module: nn.Module, own: list[Any], folder: Path, resume: bool, **options: Any) -> None:
    fabric = Fabric(accelerator="cpu", callbacks=own, **{"devices": 1, **options})
    fabric.launch()
    model: Any = fabric.setup(module)
    optimizer: Any = fabric.setup_optimizers(optimizer_of(model))
    (attachment,) = own[0].attachments
    state, path = {"model": model, "optimizer": optimizer}, folder / "run.ckpt"
    if resume:
        attachment.load_state_dict(fabric.load(path, state)["callbacks"])

    def save(step: int) -> None:
        fabric.save(path, {**state, "callbacks": attachment.state_dict()})

    _run(model, fabric.backward, optimizer, attachment.step_index, save)
    attachment.detach()


def tensor_parallel(module: nn.Module, own: list[Any], folder: Path, resume: bool) -> None:
    """A Fabric whose two processes have parts of the same layers, and the same batches."""
    strategy = FabricModelParallel(SPREADS["tensor"], **SIZES["tensor"])
    fabric(module, own, folder, resume, devices=2, strategy=strategy)


def accelerate(module: nn.Module, own: list[Any], folder: Path, resume: bool) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(module, optimizer_of(module))
    with attach(model, optimizer, own) as attachment:
        accelerator.register_for_checkpointing(attachment)
        if resume:
            accelerator.load_state(folder / "run")

        def save(step: int) -> None:
            accelerator.save_state(folder / "run")

        _run(model, accelerator.backward, optimizer, attachment.step_index, save)


def hugging_face(module: nn.Module, own: list[Any], folder: Path, resume: bool) -> None:
    options = {"save_strategy": "steps", "save_steps": SAVE_AT, "resume": resume}
    LOOPS["hugging_face"](module, batches(), own, folder, **options)


def _trainer(name: str, package: Any) -> Callable[..., None]:
    def train(
        module: nn.Module,
        own: list[Any],
        folder: Path,
        resume: bool,
        seed: int = 5,
        **options: Any,
    ) -> None:
        saving = package.callbacks.ModelCheckpoint(
            folder, "{step}", every_n_train_steps=SAVE_AT, save_top_k=-1
        )
        LOOPS[name](
            module,
            batches(seed),
            [*own, saving],
            folder,
            resume=folder / f"step={SAVE_AT}.ckpt" if resume else None,
            enable_checkpointing=True,
            **options,
        )

    return train


def fsdp2(module: nn.Module, own: list[Any], folder: Path, resume: bool) -> None:
    """A Trainer whose two processes have shards of the model, and their own batches."""
    options = {"strategy": ModelParallelStrategy(**SIZES["fsdp"]), "spread": SPREADS["fsdp"]}
    seed = int(os.environ["LOCAL_RANK"])
    RESUMED["lightning"](module, own, folder, resume, seed=seed, devices=2, **options)


RESUMED: dict[str, Callable[..., None]] = {
    "plain": plain,
    "fabric": fabric,
    "accelerate": accelerate,
    "hugging_face": hugging_face,
    "lightning": _trainer("lightning", lightning.pytorch),
    "pytorch_lightning": _trainer("pytorch_lightning", pytorch_lightning),
}
# Those of two processes.
RESUMED_TOGETHER: dict[str, Callable[..., None]] = {
    "lightning_fsdp2": fsdp2,
    "fabric_tensor_parallel": tensor_parallel,
}


def train(
    loop: str, folder: Path, *, resume: bool = False, is_killed: bool = False
) -> dict[str, Any]:
    """Train in a loop; returns the weights, the units, and what the monitor has seen."""
    module = zoo.new("Blocks")
    if is_killed:
        num_calls = 0

        def kill(*_: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == KILL_AT * NUM_ACCUMULATED:
                os.kill(os.getpid(), signal.SIGKILL)

        module.register_forward_hook(kill)
    unit_scale, monitor = callbacks()
    {**RESUMED, **RESUMED_TOGETHER}[loop](module, [unit_scale, monitor], folder, resume)
    return {
        "weights": {name: whole(value) for name, value in module.state_dict().items()},
        "gauge": unit_scale.gauge.state(),
        "steps": [snapshot.step for snapshot in monitor.snapshots],
        "rows": [
            [torch.as_tensor(getattr(snapshot, way)) for way in ("forward", "backward")]
            for snapshot in monitor.snapshots
        ],
    }


def main(folder: Path, run: str) -> None:
    what, loop = run.split(":")
    if what == "killed":
        train(loop, folder / loop / "killed", is_killed=True)
        return
    torch.manual_seed(9)
    found = {"resumed": train(loop, folder / loop / "killed", resume=True)}
    found["whole"] = train(loop, folder / loop / "whole")
    torch.save(found, folder / f"{run}-{os.environ['LOCAL_RANK']}.pt")


if __name__ == "__main__":
    quiet_rank()
    for name in sys.argv[2:]:
        main(Path(sys.argv[1]), name)
