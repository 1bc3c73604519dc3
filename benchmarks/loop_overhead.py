"""Step time of every loop with ``UnitScaleCallback()`` and ``ScaleMonitor()``, as a ratio.

The demo's GPT, compiled by ``module.compile()`` as users do, is trained by Lightning's Trainer, by
that of ``pytorch_lightning``, by Fabric, by a loop of one's own, by Hugging Face's Trainer and by
Accelerate. Each variant of a loop has a process of its own, since the callbacks work on operators
of the whole process; the processes take turns of ten steps, in another order each time. A round is
as many turns as lie between two samples of the monitor. Times are CPU time of the process, the
thread that writes the event file included. The plain loop stands twice, so that the table shows
what is noise. Two things are a matter of each process's luck, and would be the larger part of it:
whether the C library gives memory back to the system after a step, only to take 10,000 pages again
in the next, and where these pages lie. So it keeps what is freed, and takes it in huge pages.

Run: ``python benchmarks/loop_overhead.py [loops...]``
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
from demo_step import DemoLoss, demo_batch
from measure import ALLOCATOR, report
from torch import Tensor, nn
from torch.utils.data import IterableDataset

STEPS = 10  # of a turn
TURNS = 5  # of a round: 50 steps from one sample of the monitor to the next, by default
VARIANTS = ("plain", "plain once more", "with callbacks")


class Turns(IterableDataset[Any]):
    """One batch over and over, ``STEPS`` times a turn; between turns the other variants run."""

    def __init__(self, connection: Connection, num_turns: int) -> None:
        self.connection = connection
        self.num_turns = num_turns
        self.num_steps = STEPS * num_turns + 1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batch = demo_batch()
        for _ in range(self.num_turns):
            # Before its turn comes: events of the last one may still be written.
            start = time.process_time()
            self.connection.recv()
            for _ in range(STEPS):
                yield batch
            self.connection.send((time.process_time() - start) / STEPS)
        # With this one's request the last turn has ended, in loops that fetch one ahead too.
        yield batch


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4)


def plain(module: nn.Module, turns: Turns, callbacks: list[Any], folder: str) -> None:
    """A loop of one's own."""
    from lightning_unitscale import attach

    optimizer = _optimizer(module)
    with attach(module, optimizer, callbacks, log_dir=folder):
        for batch in turns:
            optimizer.zero_grad()
            module(*batch).backward()
            optimizer.step()


def fabric(module: nn.Module, turns: Turns, callbacks: list[Any], folder: str) -> None:
    """Fabric, which attaches callbacks itself."""
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger

    fabric = Fabric(
        accelerator="cpu", devices=1, callbacks=callbacks, loggers=TensorBoardLogger(folder)
    )
    fabric.launch()
    model, optimizer = fabric.setup(module, _optimizer(module))
    for batch in turns:
        optimizer.zero_grad()
        fabric.backward(model(*batch))
        optimizer.step()


def accelerate(module: nn.Module, turns: Turns, callbacks: list[Any], folder: str) -> None:
    """Accelerate, attached to after ``prepare``."""
    from accelerate import Accelerator

    from lightning_unitscale import attach

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(module, _optimizer(module))
    with attach(model, optimizer, callbacks, log_dir=folder):
        for batch in turns:
            optimizer.zero_grad()
            accelerator.backward(model(*batch))
            optimizer.step()


def hugging_face(module: nn.Module, turns: Turns, callbacks: list[Any], folder: str) -> None:
    """Hugging Face's Trainer."""
    import transformers

    from lightning_unitscale import HFCallback

    class Trainer(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(*inputs)

    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=turns.num_steps, per_device_train_batch_size=1, use_cpu=True,
        report_to=["tensorboard"], disable_tqdm=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(
        module,
        arguments,
        train_dataset=turns,
        data_collator=lambda batches: batches[0],
        optimizers=(_optimizer(module), None),
        callbacks=[HFCallback(callbacks)] if callbacks else [],
    )
    trainer.train()


def _trainer(package: str) -> Callable[[nn.Module, Turns, list[Any], str], None]:
    def train(module: nn.Module, turns: Turns, callbacks: list[Any], folder: str) -> None:
        pl, loggers = import_module(package), import_module(f"{package}.loggers")

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = module

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.net(*batch)  # type: ignore[no-any-return]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return _optimizer(self)

        trainer = pl.Trainer(
            accelerator="cpu", devices=1, max_steps=turns.num_steps, callbacks=callbacks,
            logger=loggers.TensorBoardLogger(folder), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), turns)

    return train


LOOPS: dict[str, Callable[[nn.Module, Turns, list[Any], str], None]] = {
    "lightning": _trainer("lightning.pytorch"),
    "pytorch_lightning": _trainer("pytorch_lightning"),
    "fabric": fabric,
    "plain": plain,
    "hugging_face": hugging_face,
    "accelerate": accelerate,
}


def _run(loop: str, variant: str, connection: Connection, num_turns: int, threads: int) -> None:
    """One variant, in its own process."""
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(threads)
    from lightning_unitscale import ScaleMonitor, UnitScaleCallback

    units = UnitScaleCallback()
    callbacks = [units, ScaleMonitor()] if variant == "with callbacks" else []
    module = DemoLoss()
    module.compile()
    # Events may still be on their way.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        LOOPS[loop](module, Turns(connection, num_turns), callbacks, folder)
    # What was not applied costs nothing.
    if callbacks and not 0 < units.coverage.num_matmuls == units.coverage.num_in_units:
        raise RuntimeError(f"{loop}: {units.coverage}")


def measure(loop: str, rounds: int, warmup: int, threads: int) -> dict[str, list[float]]:
    """Mean seconds per step of the variants of one loop, in every round."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    for variant in VARIANTS:
        connections[variant], theirs = spawn.Pipe()
        arguments = (loop, variant, theirs, TURNS * (warmup + rounds), threads)
        processes.append(spawn.Process(target=_run, args=arguments, daemon=True))
        processes[-1].start()
        # Theirs alone has to be open, so that a process that failed is not waited for.
        theirs.close()
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    dice = random.Random(0)
    for _ in range(TURNS * (warmup + rounds)):
        for variant in dice.sample(VARIANTS, len(VARIANTS)):
            connections[variant].send("go")
            taken[variant].append(connections[variant].recv())
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
    starts = [TURNS * index for index in range(warmup, warmup + rounds)]
    return {
        variant: [statistics.fmean(means[start : start + TURNS]) for start in starts]
        for variant, means in taken.items()
    }


def main() -> None:
    """Measure loop after loop, and print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loops", nargs="*", choices=[[], *LOOPS], help="all by default")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="rounds, the first one compiles")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.update(ALLOCATOR)  # for the processes that are started
    seconds, baselines = {}, {}
    for loop in options.loops or LOOPS:
        found = measure(loop, options.rounds, options.warmup, options.threads)
        twins = zip(found["plain"], found["plain once more"], strict=True)
        mean = f"{loop}, plain (mean)"
        seconds[mean] = [(a + b) / 2 for a, b in twins]
        seconds |= {f"{loop}, {variant}": values for variant, values in found.items()}
        baselines |= {name: mean for name in seconds if name.startswith(f"{loop},")}
    report("Loops, compiled, monitor every 50 steps", seconds, baselines, "loop_overhead.json")


if __name__ == "__main__":
    main()
