"""Does the best learning rate of a small model stay the best of a wider and of a deeper one?

The demo's GPT on the demo's text, trained for a short while at rates a factor of 2 apart: widths 32
to 256 at depth 4 and depths 2 to 8 at width 64, in the standard parametrization and under
``UnitScaleCallback("u-mup")``, the output layer with a weight of its own. The grid moves in whole
octaves, so the table also gives the vertex of the parabola through the best rate and its two
neighbours. Every run is kept in the JSON file and not repeated. ``--optimizer muon`` has the rate
of Muon for the hidden weights under ``"u-mup"``, with AdamW at rate 1 for the others. Muon's
Newton-Schulz iteration runs in FP32 here, since a CPU emulates BF16 matmuls, ten times as slowly.

    python benchmarks/lr_transfer.py                # what is missing, then the table and the plot
    python benchmarks/lr_transfer.py --report       # the table and the plot of what is there
    python benchmarks/lr_transfer.py --optimizer muon --seeds 3 --widths 32 64 128
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import lightning.pytorch as pl
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.measure import RESULTS, machine
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.optim import MuonAdamW

IMAGES = Path(__file__).parent.parent / "docs" / "images"
# Of each optimizer: the results, the plot, and the parametrizations.
FILES = {"adamw": RESULTS / "lr_transfer.json", "muon": RESULTS / "lr_transfer_muon.json"}
PLOTS = {"adamw": IMAGES / "lr_transfer.png", "muon": IMAGES / "lr_transfer_muon.png"}
PARAMETRIZATIONS = {"adamw": ("standard", "u-mup"), "muon": ("u-mup, Muon",)}
WIDTHS = (32, 64, 128, 256)
DEPTHS = (2, 4, 8)
BASE_WIDTH, BASE_DEPTH = 64, 4
HEAD_SIZE = 16
CONTEXT, BATCH = 64, 16
STEPS = {"standard": 150, "u-mup": 150, "u-mup, Muon": 100}
# Exponents of 2, around the best rate of the base model.
RATES = {
    "standard": range(-11, -5),
    "u-mup": range(-4, 4),
    "u-mup, Muon": range(-4, 0),
}


def rates(parametrization: str, depth: int) -> list[float]:
    """Exponents of 2 to train at. Muon's are divided by the root of the number of branches."""
    shift = math.log2(2 * depth) / 2 if "Muon" in parametrization else 0.0
    return [log2_rate - shift for log2_rate in RATES[parametrization]]


Run = dict[str, object]


class MuonGPT(GPT):
    """The demo's GPT. Its learning rate is Muon's."""

    def configure_optimizers(self) -> Any:
        rate, share = self.hparams["learning_rate"], self._learning_rate_factor()
        optimizer = MuonAdamW(self.parameters(), lr=1.0, muon_lr=rate, betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


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


def train(parametrization: str, width: int, depth: int, log2_rate: float, seed: int) -> float:
    """Validation loss at the end of one run, in nats per byte; infinite if it diverged."""
    pl.seed_everything(seed, verbose=False)
    kind = MuonGPT if "Muon" in parametrization else GPT
    model = kind(
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
        max_steps=STEPS[parametrization],
        callbacks=[UnitScaleCallback("u-mup")] if "u-mup" in parametrization else [],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=STEPS[parametrization],
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


def run_missing(
    file: Path, runs: list[Run], seeds: int, parametrizations: Sequence[str], widths: Sequence[int]
) -> None:
    """Train what is not there yet, the small models first, and write after each run."""
    keys = ("parametrization", "width", "depth", "log2_rate", "seed")
    done = {tuple(run[key] for key in keys) for run in runs}
    plan = [
        (parametrization, width, depth, log2_rate, seed)
        for seed in range(1, seeds + 1)
        for parametrization in parametrizations
        for width, depth in sorted(shapes(), key=lambda shape: shape[0] ** 2 * shape[1])
        if width in widths
        for log2_rate in rates(parametrization, depth)
    ]
    for case in plan:
        if case in done:
            continue
        loss = train(*case)
        runs.append({**dict(zip(keys, case, strict=True)), "val_loss": loss})
        print(*case, f"{loss:.4f}", flush=True)
        file.write_text(
            json.dumps({**machine(), "steps": STEPS[case[0]], "runs": runs}, indent=1) + "\n"
        )


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
    """Exponent of the rate at the lowest point of the parabola through the best three."""
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


def plot(path: Path, runs: list[Run], parametrizations: Sequence[str]) -> None:
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(RATES), action="append", help="parametrization")
    parser.add_argument("--report", action="store_true", help="train nothing")
    parser.add_argument("--optimizer", choices=list(FILES), default="adamw")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=WIDTHS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    wanted = arguments.only or PARAMETRIZATIONS[arguments.optimizer]
    for name, known in PARAMETRIZATIONS.items():
        parametrizations = [each for each in known if each in wanted]
        if not parametrizations:
            continue
        file = FILES[name]
        runs: list[Run] = json.loads(file.read_text())["runs"] if file.exists() else []
        if not arguments.report:
            run_missing(file, runs, arguments.seeds, parametrizations, arguments.widths)
        print(table(runs, parametrizations))
        plot(PLOTS[name], runs, parametrizations)


if __name__ == "__main__":
    main()
