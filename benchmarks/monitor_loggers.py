"""Time of each logger at a sampled step of the demo's GPT, and bytes written.

CPU time of this process: what a logger does in one of its own, as W&B does, is not in it. The first
eight samples have tables, the later ones, of which the mean is taken apart, few. A logger whose
package is not installed is left out.

Run: ``python benchmarks/monitor_loggers.py``
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
from demo_step import DemoLoss, demo_batch, training_step
from tabulate import tabulate

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.loops.loggers import RunWriters
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.snapshot_rows import summarize

_WITH_TABLES = 8


def demo_snapshot() -> ScaleSnapshot:
    """What the monitor takes from the second step of the demo."""
    module, monitor = DemoLoss(), ScaleMonitor(every_n_steps=1)
    step = training_step(module, demo_batch())
    with attach(module, None, [UnitScaleCallback(), monitor]):
        step()
        step()
    return monitor.snapshots[-1]


def loggers(folder: str) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Per name the package that is needed, and what makes the logger."""
    kinds = pl.loggers
    store = f"file:{folder}/mlflow"
    return {
        "CSV": ("csv", lambda: kinds.CSVLogger(f"{folder}/csv")),
        "TensorBoard": ("tensorboard", lambda: kinds.TensorBoardLogger(f"{folder}/tensorboard")),
        "W&B, offline": ("wandb", lambda: kinds.WandbLogger(save_dir=folder, offline=True)),
        "MLflow, files": ("mlflow", lambda: kinds.MLFlowLogger(tracking_uri=store)),
    }


def main() -> None:
    """Write the same sample many times to each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args()
    os.environ.update(WANDB_SILENT="true", MLFLOW_ALLOW_FILE_STORE="true")
    snapshot = demo_snapshot()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (package, make) in loggers(folder).items():
            if find_spec(package) is None:
                continue
            loop: Any = SimpleNamespace(loggers=[make()], is_global_zero=True)
            writers, seconds = RunWriters("operands", lambda _: None), []
            for step in range(options.samples):
                sample = dataclasses.replace(snapshot, step=step)
                start = time.process_time()
                writers.write(loop, sample, summarize(sample), ())
                seconds.append(time.process_time() - start)
            # The first one begins the run.
            early, late = seconds[1:_WITH_TABLES], seconds[_WITH_TABLES:]
            times = [f"{1e3 * statistics.mean(part):.1f}" for part in (early, late)]
            if package == "wandb":
                __import__("wandb").finish()
            files = Path(folder).rglob("*")
            size = sum(path.stat().st_size for path in files if path.is_file())
            rows.append((name, *times, size))
    sizes = [row[-1] for row in rows]
    written = [f"{(b - a) / 1e6:.1f}" for a, b in zip([0, *sizes], sizes, strict=False)]
    table = [(*row[:-1], size) for row, size in zip(rows, written, strict=True)]
    headers = ("logger", "first samples, ms", "later ones, ms", f"{options.samples} samples, MB")
    print(tabulate(table, headers, tablefmt="github"))


if __name__ == "__main__":
    main()
