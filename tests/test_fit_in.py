"""The command `fit-in`, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_unitscale.cli import main
from lightning_unitscale.memory.profile_report import format_bytes

_PROJECT = """
import lightning.pytorch as pl, torch
class Net(pl.LightningModule):
    def __init__(self, num_rows=1, num_blocks=2):
        super().__init__()
        self.num_rows = num_rows
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 32))
            for _ in range(num_blocks))
    def training_step(self, batch, batch_idx):
        batch = batch[:, None].expand(-1, self.num_rows, -1)
        for block in self.blocks:
            batch = batch + block(batch)
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(64, 32), batch_size=64)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of the user's in the present folder."""
    name = f"fits_{tmp_path.name.replace('-', '_')}"
    Path(f"{name}.py").write_text(_PROJECT)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    return name


def _run(project: str, *options: str) -> dict[str, Any]:
    given = [f"--model={project}.Net", "--trainer.accelerator=cpu", "--json=fits.json"]
    main(["fit-in", *given, *options])
    found: dict[str, Any] = json.loads(Path("fits.json").read_text())
    return found


def test_precision_plugin_counts_as_its_base(project: str) -> None:
    Path("plugin.yaml").write_text(
        "trainer: {plugins: [{class_path: lightning_unitscale.UnitScaledPrecision, "
        "init_args: {precision: fp8, base: bf16-mixed}}]}"
    )
    found = _run(project, "--memory=1MiB", "--max_shards=1", "--config=plugin.yaml")
    assert found["cheapest"]["precision"] == "bf16-mixed"
    main(["profile", f"--model={project}.Net", "--config=plugin.yaml", "--trainer.accelerator=cpu"])


def test_fits_are_printed_and_written(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--memory=330KiB", "--max_shards=2", "--explain", "--trainer.max_epochs=3"]
    found = _run(project, *options)
    limit, best = 330 * 1024, found["cheapest"]
    assert found["memory_bytes"] == limit and found["samples"] == 64
    assert all(fit["peak_bytes"] <= limit for fit in [*found["fits"], *found["largest"]])
    for fit in found["fits"]:
        assert fit["microbatch"] * fit["num_microbatches"] * fit["num_shards"] == 64
    assert {fit["num_shards"] for fit in found["fits"]} == {1, 2}
    assert {fit["precision"] for fit in found["fits"]} == {"32-true", "bf16-mixed", "bf16-true"}
    assert best == found["fits"][0] and best["is_checked"] and best["num_shards"] == 1
    without, within = found["largest"][:2]
    assert without["budget"] is None and without["microbatch"] < within["microbatch"]
    printed = capsys.readouterr().out
    assert f"The largest batch on one cpu device of {format_bytes(limit)}" in printed
    assert "*   32-true" in printed and "activations of blocks.*." in printed


@pytest.mark.slow
def test_gpu_by_name_has_its_memory(project: str) -> None:
    # Samples of many MiB: fewer batch sizes are tried until the memory is full.
    options = ["--device=t4", "--max_shards=1", "--trainer.accumulate_grad_batches=3"]
    found = _run(project, *options, f"--model.num_rows={2**16}", "--model.num_blocks=1")
    assert found["device"] == "cuda:t4" and found["samples"] == 3 * 64
    assert found["memory_bytes"] == 15 * 2**30
    assert found["cheapest"]["budget"] is None
    assert all(fit["peak_bytes"] <= found["memory_bytes"] for fit in found["largest"])


def test_no_fit_is_reported(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = _run(project, "--memory=64KiB", "--max_shards=1", "--explain")
    assert (found["largest"], found["fits"], found["cheapest"]) == ([], [], None)
    printed = capsys.readouterr().out
    assert printed.count("none fits") == 2
    assert "32-true: a batch of one needs at least" in printed
    assert set(found["owners"]) >= {"parameters", "optimizer state"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], r"memory=None: not a size\. Expected bytes, or a string such as 24GiB\. Pass"),
        (["--memory=-5"], r"memory=-5: not a size\. Expected"),
        (["--memory=much"], r"memory='much': not a size\. Expected"),
        (["--memory=1GiB", "--max_shards=0"], "max_shards=0: not a count"),
        (["--memory=1GiB", "--trainer.precision=64-true"], "precision='64-true'.*Expected one of"),
    ],
)
def test_bad_options_fail_early(options: list[str], text: str, project: str) -> None:
    with pytest.raises(SystemExit, match=f"^lightning-unitscale: `?{text}"):
        _run(project, *options)
