"""A GPT to train: large for a GPU, or small to test on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from examples.gpt import GPT
from tests.callbacks.runs import Run, loader, run

CONTEXT = 32
BUDGET = 0.5  # of memory, halfway from the smallest peak to that of the plain step


class Model(GPT):
    """The demo's GPT without evaluation."""

    validation_step = pl.LightningModule.validation_step
    test_step = pl.LightningModule.test_step


def text(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bytes, and the next ones."""
    tokens = torch.randint(256, (CONTEXT + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def device_name(config: pytest.Config) -> str:
    """Return ``"cuda"`` or ``"cpu"``, by ``--device`` or by the machine."""
    name = config.getoption("--device") or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("--device=cuda: torch finds no CUDA device; leave it out to rehearse.", 2)
    return str(name)


def train(
    device: torch.device,
    callbacks: Sequence[pl.Callback] = (),
    *,
    steps: int = 4,
    compile_mode: str | None = None,
    **options: Any,
) -> Run:
    """A seeded training of a few steps.

    Args:
        device: Where.
        callbacks: Of the Trainer.
        steps: How many.
        compile_mode: Of ``torch.compile``, of the module; ``None`` for none.
        **options: Of the Trainer.
    """

    def make() -> Any:
        width = 256 if device.type == "cuda" else 64
        module: Any = Model(width=width, depth=2, num_heads=2, context=CONTEXT, decay_steps=steps)
        if compile_mode is not None:
            module.compile(mode=compile_mode)
        return module

    def data() -> Any:
        return loader(4 * steps, 4, text)

    return run(make, callbacks, data=data, max_steps=steps, accelerator=device.type, **options)


def losses(run: Run) -> list[float]:
    """The loss of every step."""
    return [float(output["loss"]) for output in run.outputs]
