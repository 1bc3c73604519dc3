"""Take the pictures of the Scales tab again, after a change of the page.

Run ``make browser`` first, then ``python -m docs.pictures``. It trains the demo with and without
units, the tutorial's notebook and a run with a fault, which takes about ten minutes. ``--logs
logs`` keeps these runs in the folder ``logs``, and takes what is there already.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_unitscale import ScaleMonitor
from tests.browser.browser import Browser
from tests.callbacks.injected import overflow, train
from tests.docs.test_tutorial import executed

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
FAULT_AT = 30
PICTURES: dict[str, dict[str, Any]] = {
    "scales_comparison": {
        "run": "gpt_baseline/version_0",
        "compared": "gpt_unit_scaled/version_0",
        "direction": "backward",
        "operandsOnly": "true",
        "tensor": "blocks.2.attention.qkv.linear",
        "step": 150,
    },
    "tutorial_dashboard": {"run": "unit_scaled/version_0", "operandsOnly": "false"},
    "scales_alerts": {
        "run": "fault/version_0",
        "operandsOnly": "false",
        "tensor": "blocks.1.up.weight",
        "step": FAULT_AT,
    },
}
# The page without TensorBoard's frame, in which the driver cannot click.
BARE = {"scales_alerts": "data/plugin_entry.html?name=scales"}


def train_with_a_fault(logs: Path) -> None:
    train(
        ScaleMonitor(every_n_steps=1, on_violation="warn"),
        overflow,
        at=FAULT_AT,
        max_steps=2 * FAULT_AT,
        logger=TensorBoardLogger(str(logs), name="fault"),
    )


def train_all(logs: Path) -> None:
    for config in ("gpt_baseline", "gpt_unit_scaled"):
        if not (logs / config).exists():
            fit = [sys.executable, "-m", "lightning_unitscale", "fit"]
            options = ["--config", f"configs/{config}.yaml"]
            options += ["--trainer.logger.init_args.save_dir", str(logs)]
            subprocess.run([*fit, *options], cwd=ROOT, check=True)
    if not (logs / "unit_scaled").exists():
        executed(logs.parent)  # into its subfolder `logs`
    if not (logs / "fault").exists():
        train_with_a_fault(logs)


@contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """Serve the logs, and give the address."""
    with closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    address = f"http://localhost:{port}/"
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(address).close()
            except URLError:
                time.sleep(0.5)
            else:
                break
        yield address
    finally:
        server.terminate()


def take(address: str, browser: Browser) -> None:
    for name, state in PICTURES.items():
        fields = (f"scales.{key}={quote(str(value), safe='')}" for key, value in state.items())
        browser("open", url=f"{address}{BARE.get(name, '')}#{'&'.join(('scales', *fields))}")
        browser("resize", width=1360, height=964)
        time.sleep(15)  # TensorBoard's own page has no sign that it is complete
        if name in BARE:
            browser("tap", selector=".alerts summary")
        browser("screenshot", path=str(IMAGES / f"{name}.png"))
        browser("leave")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, help="folder of the runs, named logs")
    with tempfile.TemporaryDirectory() as folder:
        logs = parser.parse_args().logs or Path(folder, "logs")
        logs = logs.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        train_all(logs)
        browser = Browser(Path(folder, "profile"))
        with tensorboard(logs) as address:
            take(address, browser)
        browser.close()


if __name__ == "__main__":
    main()
