"""Is the best learning rate of a small model the best of a wider and a deeper one?

The demo's GPT on the demo's text, trained for a short while at rates a factor of 2 apart: widths 32
to 256 at depth 4 and depths 2 to 8 at width 64, in the standard parametrization and under
``UnitScaleCallback("u-mup")``, the output layer with a weight of its own. The grid moves in whole
octaves, so the table also gives the vertex of the parabola through the best rate and its two
neighbors. Every run is kept in the JSON file and not repeated. Muon's rates are in
``muon_transfer.py``.

    python benchmarks/lr_transfer.py                # what is missing, then the table and the plot
    python benchmarks/lr_transfer.py --report       # the table and the plot of what is there
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
from tabulate import tabulate

from benchmarks.measure import RESULTS, machine
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_unitscale import UnitScaleCallback

FILE = RESULTS / "lr_transfer.json"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "lr_transfer.png"
PARAMETRIZATIONS = ("standard", "u-mup")
WIDTHS = (32, 64, 128, 256)
DEPTHS = (2, 4, 8)
BASE_WIDTH, BASE_DEPTH = 64, 4
HEAD_SIZE = 16
CONTEXT, BATCH = 64, 16
STEPS = 150
# Exponents of 2, around the best rate of the base model.
RATES = {
    "standard": range(-11, -5),
    "u-mup": range(-4, 4),
}


Run = dict[str, object]


def train(parametrization: str, width: int, depth: int, log2_rate: float, seed: int) -> float:
    """Validation loss at the end of one run, in nats per byte; infinite if it diverged."""
    pl.seed_everything(seed, verbose=False)
    model = GPT(
        width=width,
        depth=depth,
        num_heads=width // HEAD_SIZE,
        context=CONTEXT,
        tied_head=False,
        learning_rate=2.0**log2_rate,
        weight_decay=0.0,
        betas=(0.9, 0.95),
        warmup_steps=30,
    )
    data = TextDataModule(context=CONTEXT, batch_size=BATCH, val_samples=256)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[UnitScaleCallback("u-mup")] if parametrization == "u-mup" else [],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=STEPS,
        check_val_every_n_epoch=None,
    )
    trainer.fit(model, data)
    loss = float(trainer.callback_metrics["val_loss"])
    return loss if math.isfinite(loss) else math.inf


def shapes() -> list[tuple[int, int]]:
    """Widths at one depth, depths at one width."""
    wide = [(width, BASE_DEPTH) for width in WIDTHS]
    deep = [(BASE_WIDTH, depth) for depth in DEPTHS if depth != BASE_DEPTH]
    return wide + deep


def run_missing(runs: list[Run], seeds: int, parametrizations: Sequence[str]) -> None:
    """Train what is not there yet, the small models first, and write after each run."""
    keys = ("parametrization", "width", "depth", "log2_rate", "seed")
    done = {tuple(run[key] for key in keys) for run in runs}
    plan = [
        (parametrization, width, depth, log2_rate, seed)
        for seed in range(1, seeds + 1)
        for parametrization in parametrizations
        for width, depth in sorted(shapes(), key=lambda shape: shape[0] ** 2 * shape[1])
        for log2_rate in RATES[parametrization]
    ]
    for case in plan:
        if case in done:
            continue
        loss = train(*case)
        runs.append({**dict(zip(keys, case, strict=True)), "val_loss": loss})
        print(*case, f"{loss:.4f}", flush=True)
        FILE.write_text(json.dumps({**machine(), "steps": STEPS, "runs": runs}, indent=1) + "\n")


def curve(runs: list[Run], parametrization: str, width: int, depth: int) -> dict[float, float]:
    """Mean loss over the seeds by exponent of the rate."""
    wanted = (parametrization, width, depth)
    by_rate: dict[float, list[float]] = {}
    for run in runs:
        if (run["parametrization"], run["width"], run["depth"]) == wanted:
            losses = by_rate.setdefault(float(str(run["log2_rate"])), [])
            losses.append(float(str(run["val_loss"])))
    return {rate: sum(losses) / len(losses) for rate, losses in sorted(by_rate.items())}


def vertex(losses_of: dict[float, float]) -> float:
    """Exponent of the rate at the lowest point of the parabola through the best three.

    It is NaN if the best has no neighbor on a side: rates beyond it may be better.
    """
    best = min(losses_of, key=lambda rate: losses_of[rate])
    left, middle, right = (losses_of.get(best + step, math.nan) for step in (-1, 0, 1))
    return best + (left - right) / (2 * (left - 2 * middle + right))


def table(runs: list[Run], parametrizations: Sequence[str]) -> str:
    """Best rate and loss of every model, and what the base model's best rate costs it."""
    rows = []
    for parametrization in parametrizations:
        base = curve(runs, parametrization, BASE_WIDTH, BASE_DEPTH)
        best_of_base = min(base, key=lambda rate: base[rate]) if base else None
        for width, depth in shapes():
            losses_of = curve(runs, parametrization, width, depth)
            if not losses_of or best_of_base is None:
                continue
            best = min(losses_of, key=lambda rate: losses_of[rate])
            moved = f"{vertex(losses_of) - vertex(base):+.2f}"
            cost = losses_of.get(best_of_base, math.nan) - losses_of[best]
            rows.append((parametrization, width, depth, f"2^{best}", moved, losses_of[best], cost))
    headers = (
        "",
        "width",
        "depth",
        "best rate",
        "parabola moved",
        "best loss",
        "base's rate costs",
    )
    return tabulate(rows, headers=headers, floatfmt=".4f", disable_numparse=[4])


def plot(runs: list[Run], parametrizations: Sequence[str]) -> None:
    """Loss over rate, one panel per parametrization and direction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = len(parametrizations)
    figure, axes = plt.subplots(size, 2, figsize=(10, 3.5 * size), sharey=True, squeeze=False)
    for row, parametrization in zip(axes, parametrizations, strict=True):
        wide = [(width, BASE_DEPTH) for width in WIDTHS]
        deep = [(BASE_WIDTH, depth) for depth in DEPTHS]
        for axis, chosen, what in ((row[0], wide, "width"), (row[1], deep, "depth")):
            colors = plt.get_cmap("viridis")(torch.linspace(0, 0.9, len(chosen)).numpy())
            for color, (width, depth) in zip(colors, chosen, strict=True):
                losses_of = curve(runs, parametrization, width, depth)
                if not losses_of:
                    continue
                value = width if what == "width" else depth
                rates = [2.0**log2_rate for log2_rate in losses_of]
                axis.plot(
                    rates, list(losses_of.values()), "o-", color=color, label=f"{what} {value}"
                )
                best = min(losses_of, key=lambda rate: losses_of[rate])
                axis.plot(2.0**best, losses_of[best], "*", color=color, markersize=14)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{parametrization}, over {what}")
            axis.set_xlabel("peak learning rate")
            axis.legend()
        row[0].set_ylabel("validation loss (nats per byte)")
    axes[0, 0].set_ylim(top=3.4)
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(RATES), action="append", help="parametrization")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    parametrizations = [
        each for each in PARAMETRIZATIONS if each in (arguments.only or PARAMETRIZATIONS)
    ]
    runs: list[Run] = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    if not arguments.report:
        run_missing(runs, arguments.seeds, parametrizations)
    print(table(runs, parametrizations))
    plot(runs, parametrizations)


if __name__ == "__main__":
    main()
