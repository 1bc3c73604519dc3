"""Is Muon's best rate under u-muP the best of a wider and a deeper model?

The demo's GPT, with an output layer of its own, is trained for a short while by ``MuonAdamW``: Muon
for the hidden matrices, AdamW at rate 1 for the others. The text is random, and the chances of a
token depend on the pair of the two before it, which only attention and an MLP together can find. So
the loss depends on Muon's rate after 100 steps, which on real text takes longer. Widths are 64 to
512 at one depth, and depths 1 to 4 at width 64. Muon's rates are a factor of 2 apart, and go on
until the lowest mean loss of all seeds has two neighbors. The vertex of the parabola through these
three is the best rate. Seeds are drawn again for the spread of the best rate (a bootstrap). Rates
are ``2**log2_rate`` divided by the root of the number of branches. The column "with a factor" is by
what the best rate would move if the rules divided by this root.

Muon's Newton-Schulz iteration runs in FP32 here, since a CPU emulates BF16 matmuls, ten times as
slowly. Every run is kept in the JSON file and not repeated.

    python benchmarks/muon_transfer.py --widths 64 128    # what is missing of these, then the table
    python benchmarks/muon_transfer.py --report           # the table of what is there
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.low_precision_training import parameter_infos
from benchmarks.lr_transfer import vertex
from benchmarks.measure import RESULTS, machine
from examples.gpt import GPT
from lightning_unitscale.optim import MuonAdamW
from lightning_unitscale.rules.scaled_step import scale_learning_rates
from lightning_unitscale.transforms import unit_scale

FILE = RESULTS / "muon_transfer.json"
SHAPES = ((64, 1), (64, 2), (128, 1), (64, 4), (256, 1), (512, 1))
BASE = (64, 1)
HEAD_SIZE, CONTEXT, BATCH = 16, 16, 32
NUM_TOKENS, SHARPNESS = 16, 3.0  # of the text
STEPS, WARMUP = 100, 20
RATES = (-3, -2, -1)  # exponents of 2, where a search begins
VALIDATION = 16  # batches
Run = dict[str, Any]
Shape = tuple[int, int]  # width and depth


class Loss(nn.Module):
    """``(tokens, targets) -> loss`` of a GPT."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        heads = width // HEAD_SIZE
        self.gpt = GPT(width=width, depth=depth, num_heads=heads, context=CONTEXT, tied_head=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


def newton_schulz(
    grad: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Muon's orthogonalization in FP32; ``torch.optim.Muon`` casts to BF16 first."""
    a, b, c = coefficients
    wide = grad.T if grad.size(0) > grad.size(1) else grad
    x = wide / wide.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if wide is not grad else x


def text(num_batches: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of random text, in which the pair of the two last tokens decides on the next."""
    tables = torch.Generator().manual_seed(0)
    logits = SHARPNESS * torch.randn(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS, generator=tables)
    draws = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(NUM_TOKENS, (num_batches * BATCH, CONTEXT + 1), generator=draws)
    for place in range(2, CONTEXT + 1):
        chances = logits[tokens[:, place - 1], tokens[:, place - 2]].softmax(1)
        tokens[:, place] = torch.multinomial(chances, 1, generator=draws)[:, 0]
    return [(each[:, :-1], each[:, 1:]) for each in tokens.split(BATCH)]


@dataclass
class Trial:
    """One model, captured and at unit scale, that is trained at several rates."""

    module: nn.Module
    depth: int
    start: dict[str, Tensor]
    batches: list[tuple[Tensor, Tensor]]
    validation: list[tuple[Tensor, Tensor]]

    @classmethod
    def make(cls, width: int, depth: int, seed: int) -> Trial:
        """Make a model, the same for a seed, and the data."""
        torch.manual_seed(seed)
        module = unit_scale(Loss(width, depth))
        batches, validation = text(STEPS, seed), text(VALIDATION, 0)
        module(*batches[0])  # decides on every operation, and sets the weights
        start = {name: value.clone() for name, value in module.state_dict().items()}
        return cls(module, depth, start, batches, validation)

    def loss_at(self, log2_rate: int) -> float:
        """Train at a rate from the same weights, and return the validation loss."""
        self.module.load_state_dict(self.start)
        rate = 2.0 ** (log2_rate - shift(self.depth))
        optimizer = MuonAdamW(self.module.parameters(), lr=1.0, muon_lr=rate)
        scaled = scale_learning_rates(optimizer, parameter_infos(self.module), "u-mup")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _share)
        for batch in self.batches:
            self.module(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        scaled.remove()
        with torch.no_grad():
            loss = statistics.fmean(float(self.module(*batch)) for batch in self.validation)
        return loss if math.isfinite(loss) else math.inf


def shift(depth: int) -> float:
    """Return the octaves of the root of the number of branches, by which rates are lower."""
    return math.log2(2 * depth) / 2


def _share(step: int) -> float:
    """Return the share of the peak rate: a linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


@contextlib.contextmanager
def fp32_muon() -> Iterator[None]:
    """Run Muon's iteration in FP32."""
    before = torch.optim._muon._zeropower_via_newtonschulz
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
    try:
        yield
    finally:
        torch.optim._muon._zeropower_via_newtonschulz = before


def run_missing(runs: list[Run], seeds: Sequence[int], shapes: Sequence[Shape]) -> None:
    """Train what is not there yet, until each best rate has two neighbors."""
    for shape in shapes:
        rates = set(RATES)
        while rates:
            for seed in seeds:
                _train(runs, shape, seed, rates - rates_of(runs, shape, [seed]))
            losses = mean_losses(runs, shape, seeds)
            best = min(losses, key=lambda rate: losses[rate])
            rates = {best - 1, best + 1} - losses.keys()


def _train(runs: list[Run], shape: Shape, seed: int, rates: Iterable[int]) -> None:
    """Train a model at some rates, and write the losses."""
    missing = sorted(rates)
    if not missing:
        return
    began, (width, depth) = time.process_time(), shape
    trial = Trial.make(width, depth, seed)
    for rate in missing:
        loss = trial.loss_at(rate)
        runs.append({"width": width, "depth": depth, "seed": seed, "log2_rate": rate, "loss": loss})
        seconds = time.process_time() - began
        print(width, depth, seed, f"2^{rate}", f"{loss:.4f}", f"{seconds:.0f} s", flush=True)
        FILE.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


def _losses(runs: Sequence[Run], shape: Shape) -> dict[tuple[int, int], float]:
    """Return a model's losses by exponent of the rate and seed."""
    return {
        (run["log2_rate"], run["seed"]): run["loss"]
        for run in runs
        if (run["width"], run["depth"]) == shape
    }


def rates_of(runs: Sequence[Run], shape: Shape, seeds: Sequence[int]) -> set[int]:
    """Return the exponents of the rates at which a model has been trained with all seeds."""
    found = _losses(runs, shape)
    return {rate for rate, _ in found if all((rate, seed) in found for seed in seeds)}


def mean_losses(runs: Sequence[Run], shape: Shape, seeds: Sequence[int]) -> dict[float, float]:
    """Return the mean loss over seeds by exponent of the rate."""
    found = _losses(runs, shape)
    rates = sorted(rates_of(runs, shape, seeds))
    return {rate: statistics.fmean(found[rate, seed] for seed in seeds) for rate in rates}


def seeds_of(runs: Sequence[Run], shape: Shape) -> list[int]:
    """Return the seeds with which a model has been trained at the first rates."""
    seeds = sorted({seed for _, seed in _losses(runs, shape)})
    return [seed for seed in seeds if rates_of(runs, shape, [seed]) >= set(RATES)]


def table(runs: Sequence[Run]) -> str:
    """Return the best rate of every model, relative to the base model's with the same seeds."""
    rows, columns = [], sorted({run["log2_rate"] for run in runs})
    for shape in SHAPES:
        seeds = [seed for seed in seeds_of(runs, shape) if seed in seeds_of(runs, BASE)]
        if not seeds:
            continue
        losses = mean_losses(runs, shape, seeds)
        drawn = [
            vertex(mean_losses(runs, shape, draw)) - vertex(mean_losses(runs, BASE, draw))
            for draw in itertools.product(seeds, repeat=len(seeds))
        ]
        moved = [each for each in drawn if math.isfinite(each)]  # those with two neighbors
        factored = vertex(losses) - vertex(mean_losses(runs, BASE, seeds))
        octaves = factored - shift(shape[1]) + shift(BASE[1])
        rows.append(
            (
                *shape,
                len(seeds),
                *(f"{losses[rate]:.3f}" if rate in losses else "" for rate in columns),
                f"2^{vertex(losses) - shift(shape[1]):.2f}",
                f"{2**octaves:.2f}",
                f"{2**factored:.2f}",
                f"{2 ** statistics.pstdev(moved):.2f}" if len(moved) > 1 else "",
            )
        )
    rates = (f"2^{rate}" for rate in columns)
    headers = (
        "width",
        "depth",
        "seeds",
        *rates,
        "best rate",
        "moved by",
        "with a factor",
        "spread",
    )
    return tabulate(rows, headers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", default=sorted({w for w, _ in SHAPES}))
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[Run] = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    if not options.report:
        shapes = [shape for shape in SHAPES if shape[0] in options.widths]
        with fp32_muon():
            run_missing(runs, range(1, options.seeds + 1), shapes)
    print(table(runs))


if __name__ == "__main__":
    main()
