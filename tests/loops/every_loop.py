"""One training in every loop of a single process.

Two batches make an optimizer step, and random numbers are seeded before each batch, so that all of
the loops compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lightning_unitscale import attach

NUM_ACCUMULATED = 2
Batches = Sequence[tuple[Tensor, Tensor]]
Outcome = tuple[list[Tensor], dict[str, Tensor]]
# Distributes a module over the processes of a mesh, if the loop has one.
Spread = Callable[[nn.Module, Any], nn.Module]


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def plain(module: nn.Module, batches: Batches, callbacks: list[Any], folder: Path) -> Outcome:
    optimizer = optimizer_of(module)
    losses = []
    with attach(module, optimizer, callbacks, log_dir=folder):
        for index, batch in enumerate(batches):
            torch.manual_seed(index)
            loss = module(*batch)["loss"]
            (loss / NUM_ACCUMULATED).backward()
            losses.append(loss.detach())
            if index % NUM_ACCUMULATED == NUM_ACCUMULATED - 1:
                optimizer.step()
                optimizer.zero_grad()
    return losses, module.state_dict()


def fabric(
    module: nn.Module, batches: Batches, callbacks: list[Any], folder: Path, **options: Any
) -> Outcome:
    fabric = Fabric(accelerator="cpu", callbacks=callbacks, **{"devices": 1, **options})
    fabric.launch()
    # The model first: what shards it makes other parameters of its own.
    model: Any = fabric.setup(module)
    optimizer: Any = fabric.setup_optimizers(optimizer_of(model))
    losses = []
    for index, batch in enumerate(batches):
        torch.manual_seed(index)
        is_last = index % NUM_ACCUMULATED == NUM_ACCUMULATED - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(*batch)["loss"]
            fabric.backward(loss / NUM_ACCUMULATED)
        losses.append(loss.detach())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    for callback in callbacks:
        for attachment in callback.attachments:
            attachment.detach()
    return losses, module.state_dict()


def accelerate(module: nn.Module, batches: Batches, callbacks: list[Any], folder: Path) -> Outcome:
    accelerator = pytest.importorskip("accelerate").Accelerator(
        cpu=True, gradient_accumulation_steps=NUM_ACCUMULATED
    )
    model, optimizer = accelerator.prepare(module, optimizer_of(module))
    losses = []
    with attach(model, optimizer, callbacks, scaler=accelerator.scaler):
        for index, batch in enumerate(batches):
            torch.manual_seed(index)
            with accelerator.accumulate(model):
                loss = model(*batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return losses, module.state_dict()


class Rows:
    """Batches in their order; one that goes on from a checkpoint begins where that ended."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for self.position in range(self.position, len(self.batches)):  # noqa: B020
            yield self.batches[self.position]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Stream(IterableDataset[Any]):
    """Batches in their order, with the names of the module's arguments."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for x, y in self.batches:
            yield {"x": x, "y": y}


def hugging_face(
    module: nn.Module,
    batches: Batches,
    callbacks: list[Any],
    folder: Path,
    resume: bool = False,
    **options: Any,
) -> Outcome:
    transformers = pytest.importorskip("transformers")
    losses = []

    class Trainer(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    class Seeds(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.index = NUM_ACCUMULATED * state.global_step
            torch.manual_seed(self.index)

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.index += 1
            torch.manual_seed(self.index)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=len(batches) // NUM_ACCUMULATED,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=NUM_ACCUMULATED,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{"save_strategy": "no", **options},
    )
    # Imported here: it imports transformers.
    from lightning_unitscale import HFCallback

    trainer = Trainer(
        module,
        arguments,
        train_dataset=Stream(batches),
        data_collator=lambda items: items[0],
        optimizers=(optimizer_of(module), None),
        callbacks=[Seeds(), *([HFCallback(callbacks)] if callbacks else [])],
    )
    trainer.train(resume_from_checkpoint=resume)
    return losses, module.state_dict()


def _trainer(pl: Any) -> Callable[..., Outcome]:
    """The loop of a Trainer, of whichever of Lightning's packages."""

    class Module(pl.LightningModule):
        def __init__(self, net: nn.Module, spread: Spread | None) -> None:
            super().__init__()
            self.net = net
            self.spread = spread
            self.losses: list[Tensor] = []

        def configure_model(self) -> None:
            if self.spread is not None:
                self.net = self.spread(self.net, self.device_mesh)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            torch.manual_seed(batch_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(*batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            # Lightning divides it.
            self.losses.append(outputs["loss"] * NUM_ACCUMULATED)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    def train(
        module: nn.Module,
        batches: Batches,
        callbacks: list[Any],
        folder: Path,
        spread: Spread | None = None,
        resume: Path | None = None,
        **options: Any,
    ) -> Outcome:
        trained = Module(module, spread)
        trainer = pl.Trainer(
            callbacks=callbacks,
            max_epochs=1,
            accumulate_grad_batches=NUM_ACCUMULATED,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"devices": 1, "logger": False, "enable_checkpointing": False, **options},
        )
        trainer.fit(trained, Rows(batches), ckpt_path=resume, weights_only=False)
        return trained.losses, trained.net.state_dict()

    return train


LOOPS: dict[str, Callable[..., Outcome]] = {
    "plain": plain,
    "fabric": fabric,
    "accelerate": accelerate,
    "hugging_face": hugging_face,
    "lightning": _trainer(lightning.pytorch),
    "pytorch_lightning": _trainer(pytorch_lightning),
}
# Their steps are captured where a method asks for it.
TRAINERS = ("lightning", "pytorch_lightning")
