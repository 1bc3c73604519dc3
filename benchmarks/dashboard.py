"""Time that the Scales dashboard takes to show a long run of a large model, in a real browser.

Writes a run of synthetic scales with the package's own writer, opens TensorBoard on it, and
measures in Chromium: from the request of the page to the heat map on screen, a new layout of all
rows, and from a click to the histogram.

Run: ``python benchmarks/dashboard.py`` (needs chromium, node and npm; about five minutes)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import torch
from measure import RESULTS, machine
from ranks import free_port
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.tensorboard.writer import ScaleWriter
from tests.browser.browser import Browser

LAYOUT = RowLayout()
OPS = ("norm", "attn.qkv", "attn.out", "residual", "mlp.up", "mlp.gelu", "mlp.down", "residual_1")


def synthetic_run(folder: Path, *, num_tensors: int, num_steps: int) -> float:
    """Writes the run; returns the seconds that the writer took."""
    names = tuple(f"blocks.{k // len(OPS)}.{OPS[k % len(OPS)]}" for k in range(num_tensors))
    row = statistics_row(torch.randn(4096), LAYOUT).double().numpy()
    generator = np.random.default_rng(0)
    base = generator.normal(-3, 3, num_tensors)
    slope = 6 * np.arange(num_tensors) / num_tensors
    seconds = 0.0
    with SummaryWriter(str(folder)) as experiment:
        writer = ScaleWriter(experiment)
        for step in range(num_steps):
            noise = generator.normal(0, 0.2, num_tensors)
            forward = scaled_rows(row, base + 2 * math.sin(step / 200) + noise)
            backward = scaled_rows(row, -8 - slope - 3 * step / num_steps + noise)
            units = np.round(base).astype(int), np.round(-8 - slope).astype(int)
            snapshot = ScaleSnapshot(
                10 * step,
                names,
                forward,
                backward,
                LAYOUT,
                log2_sigma=units[0],
                log2_gamma=units[1],
            )
            start = time.perf_counter()
            writer.write(snapshot)
            seconds += time.perf_counter() - start
    return seconds


def scaled_rows(row: np.ndarray, log2_scales: np.ndarray) -> np.ndarray:
    """The row of one tensor at many scales, its exponents moved by whole powers of two."""
    rows = np.repeat(row[None], len(log2_scales), axis=0)
    rows[:, LAYOUT.index("square_sum")] *= 4.0**log2_scales
    counts = row[LAYOUT.exponents]
    columns = np.arange(counts.size)[None] - np.round(log2_scales).astype(int)[:, None]
    inside = (columns >= 0) & (columns < counts.size)
    rows[:, LAYOUT.exponents] = np.where(inside, counts[columns.clip(0, counts.size - 1)], 0.0)
    return rows


def wait_until_loaded(url: str, last_step: int) -> None:
    """Returns when TensorBoard's reader has the last step of both directions."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/data/plugin/scales/runs") as answer:
                runs = json.load(answer)["runs"]
        except urllib.error.URLError:
            runs = []
        if runs and set(runs[0]["last_steps"].values()) == {last_step}:
            return
        time.sleep(0.5)
    raise TimeoutError(f"url={url!r}: TensorBoard did not read the run within five minutes")


def measure(browser: Browser, url: str) -> dict[str, float]:
    start = time.perf_counter()
    browser("open", url=f"{url}/data/plugin_entry.html?name=scales")
    browser.wait("window.scalesDashboard?.shown > 0")
    shown = time.perf_counter() - start
    timed = "(() => {{ const start = performance.now(); {}; return performance.now() - start; }})()"
    map_ = "scalesDashboard.heatMap"
    layout = browser.evaluate(timed.format(f"{map_}.set({{ ...{map_}.model, rowMode: 'fit' }})"))
    start = time.perf_counter()
    app = "scalesDashboard"
    browser.evaluate(f"{app}.select({app}.rows[{app}.rows.length >> 1].name, 0)")
    browser.wait("document.querySelector('.bar') !== null")
    histogram = time.perf_counter() - start
    return {"page_seconds": shown, "layout_seconds": layout / 1e3, "histogram_seconds": histogram}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "logs/run"
        written = synthetic_run(run, num_tensors=options.tensors, num_steps=options.steps)
        port = free_port()
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder / "logs")]
        command += ["--port", str(port)]
        server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        browser = Browser(folder / "profile")
        try:
            url = f"http://localhost:{port}"
            wait_until_loaded(url, 10 * (options.steps - 1))
            rounds = [measure(browser, url) for _ in range(options.rounds)]
        finally:
            browser.close()
            server.terminate()
            server.wait()
        measured = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
        measured["event_file_bytes"] = sum(path.stat().st_size for path in run.iterdir())
        measured["writer_seconds_per_step"] = written / options.steps
    title = f"{options.tensors} tensors, {options.steps} steps"
    print("\n".join([title, *(f"{key:>26} {value:.4g}" for key, value in measured.items())]))
    result = {"case": title, "machine": machine(), **measured}
    (RESULTS / "dashboard.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
