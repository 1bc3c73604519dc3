"""FP8 trainings with operands or gradients that are zero at first, compared with FP32.

A unit is measured at the first value that is not zero. Four small models have such tensors: the
second factor of LoRA, a head that begins with zeros, a second loss whose weight grows from zero,
and an expert that gets no token at first. Each is trained on three seeds; a loss is the mean over
the last steps. "Late" counts parameters whose first gradient comes in a later step than in FP32.

    python benchmarks/zero_at_first.py
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.measure import RESULTS, machine
from lightning_unitscale import UnitScaleCallback, attach

WIDTH, RANK, BATCH, NUM_CLASSES = 64, 16, 64, 16
NUM_LAST = 20
METHODS: dict[str, Callable[[], list[UnitScaleCallback]]] = {
    "FP32": list,
    "FP32 in units": lambda: [UnitScaleCallback()],
    "FP8, simulated, all matmuls": lambda: [UnitScaleCallback(simulate="fp8")],
    "FP8, linear layers": lambda: [UnitScaleCallback(precision="fp8")],
}


def zero(layer: nn.Linear) -> nn.Linear:
    """A layer that begins with zeros."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class Adapted(nn.Module):
    """A frozen layer with two trained factors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, RANK, bias=False)
        self.b = zero(nn.Linear(RANK, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 2 * self.b(self.a(x))
        return result


class Model(nn.Module):
    """Learns which of 16 classes a random network gives a vector; returns the loss of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.made()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def made(self) -> nn.Module:
        """The trained layers before the head."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


class Lora(Model):
    """Two frozen layers with factors of rank 16."""

    def made(self) -> nn.Module:
        return nn.Sequential(Adapted(), nn.GELU(), Adapted(), nn.GELU())


class ZeroHead(Model):
    """A head that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        zero(self.head)


class Annealed(Model):
    """A second loss, whose weight grows from zero for 100 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_CLASSES))

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        h = self.body(x)
        second = F.cross_entropy(self.aux(h), x[:, :NUM_CLASSES].argmax(1))
        return F.cross_entropy(self.head(h), y) + min(step / 100, 1.0) * second


class LateExpert(Model):
    """Two experts, of which the second gets no token for five steps, and a small loss."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(self.made() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, step: int) -> Tensor:
        chosen = x[:, 0] > (0.0 if step >= 5 else 100.0)
        h = torch.zeros_like(x)
        h[~chosen] = self.experts[0](x[~chosen])
        h[chosen] = self.experts[1](x[chosen])
        return F.cross_entropy(self.head(h), y) * 1e-4


MODELS: dict[str, Callable[[], Model]] = {
    "LoRA": Lora,
    "zero-initialized head": ZeroHead,
    "annealed loss": Annealed,
    "late expert": LateExpert,
}


def batches(seed: int, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2))
    found = []
    for _ in range(num_steps):
        x = torch.randn(BATCH, WIDTH, generator=generator)
        found.append((x, (torch.tanh(x @ first / WIDTH**0.5) @ second)[:, :NUM_CLASSES].argmax(1)))
    return found


def train(
    make: Callable[[], Model], seed: int, num_steps: int, callbacks: list[UnitScaleCallback]
) -> tuple[float, dict[str, int]]:
    """The last loss, and the step of each parameter's first gradient."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    losses: list[float] = []
    first: dict[str, int] = {}
    with attach(model, optimizer, callbacks):
        for step, (x, y) in enumerate(batches(seed, num_steps)):
            loss = model(x, y, step)
            loss.backward()
            losses.append(loss.item())
            for name, param in model.named_parameters():
                if param.grad is not None and param.grad.any():
                    first.setdefault(name, step)
            optimizer.step()
            optimizer.zero_grad()
    return statistics.fmean(losses[-NUM_LAST:]), first


def row(name: str, method: str, seeds: list[int], num_steps: int) -> dict[str, Any]:
    """A row of the table."""
    losses, relative, num_late = [], [], 0
    for seed in seeds:
        plain, expected = train(MODELS[name], seed, num_steps, [])
        loss, first = train(MODELS[name], seed, num_steps, METHODS[method]())
        losses.append(loss)
        relative.append(loss / plain - 1)
        num_late += sum(first.get(param, num_steps) > step for param, step in expected.items())
    return {
        "model": name,
        "matmuls in": method,
        "last losses": [float(f"{loss:.5g}") for loss in losses],
        "to FP32": [round(one, 5) for one in relative],
        "worst": round(max(relative, key=abs), 5),
        "late": num_late,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    rows = []
    for name in MODELS:
        for method in METHODS:
            rows.append(row(name, method, args.seeds, args.steps))
            print(rows[-1], flush=True)
    content = {"setting": vars(args), "machine": machine(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "zero_at_first.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(tabulate(rows, headers="keys"))


if __name__ == "__main__":
    main()
