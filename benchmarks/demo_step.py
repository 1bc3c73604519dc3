"""The demo's GPT as a module that returns its loss, and one training step of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.gpt import GPT
from lightning_unitscale import ScaleMonitor, attach

VOCABULARY = 256
# An interval of samples: but for the first step, which is not measured.
NEVER = 10**9


class DemoLoss(nn.Module):
    """``(tokens, targets) -> loss`` at the sizes of ``configs/gpt_unit_scaled.yaml``."""

    def __init__(self, width: int = 128, depth: int = 4, num_heads: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gpt = GPT(width=width, depth=depth, num_heads=num_heads, context=128)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.gpt(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def demo_batch(batch_size: int = 16, context: int = 128) -> tuple[Tensor, Tensor]:
    """Random bytes: the speed of a step does not depend on the text."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (batch_size, context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def training_step(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    """Forward, backward and AdamW, as one call that returns the loss."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


class WatchedStep:
    """One training step with ``ScaleMonitor`` attached; without a folder nothing is written."""

    def __init__(
        self,
        module: nn.Module,
        batch: tuple[Tensor, Tensor],
        every_n_steps: int,
        folder: str | None,
    ) -> None:
        monitor = ScaleMonitor(every_n_steps=every_n_steps)
        self._attachment = attach(module, callbacks=monitor, log_dir=folder)
        self._step = training_step(module, batch)

    def __call__(self) -> None:
        self._step()
        # Events are written by a thread: without this, during the next variant's step.
        for experiment in self._attachment.loggers:
            experiment.flush()

    def close(self) -> None:
        """Detach the monitor, after which nothing keeps the module."""
        self._attachment.detach()
