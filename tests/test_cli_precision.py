"""The command ``precision``: its JSON, and what it takes from the configuration."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_unitscale.cli.entry_point import main

CONFIG = """
seed_everything: 1
model: {class_path: examples.gpt.GPT, init_args: {width: 32, depth: 1, num_heads: 2, context: 16}}
data:
  class_path: examples.text.TextDataModule
  init_args: {context: 16, batch_size: 2, max_bytes: 65536}
trainer:
  accelerator: cpu
  callbacks:
    - class_path: lightning_unitscale.UnitScaleCallback
      init_args:
        precision:
          class_path: lightning_unitscale.FP8
          init_args: {exempt: [["blocks.0.mlp.*", "forward"]]}
    - class_path: lightning_unitscale.ScaleMonitor
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = f"--config={tmp_path / 'run.yaml'}"
    return ["precision", config, "--directions=1", "--pairs=1"]


def test_json_has_every_computation(command, capsys):
    main([*command, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["matmuls", "remainder", "exempt"]
    keys = "name module computation format added inherited loss_change runs_in_format reason"
    assert all(list(row) == keys.split() for row in found["matmuls"])
    assert isinstance(found["remainder"], float)
    assert ["blocks.0.mlp.*", "forward"] in found["exempt"]
    reasons = {(row["module"], row["computation"]): row["reason"] for row in found["matmuls"]}
    assert reasons["head", "forward"] == "name excluded by default"
    assert reasons["blocks.0.mlp.up", "forward"] == "this computation is exempt"
    assert reasons["blocks.0.mlp.up", "input_gradient"] is None
    assert reasons["blocks.0.attention", "forward"] == "not a linear layer"


class FeedForward(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def training_step(self, batch, batch_idx):
        return self.fc2(self.fc1(batch).relu()).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 16), 8)


def run_on(method, tmp_path, *, is_list=True):
    scaling = {"class_path": "lightning_unitscale.UnitScaleCallback"}
    scaling["init_args"] = {"method": method, "precision": "fp8"}
    config = {
        "model": {"class_path": f"{__name__}.FeedForward"},
        "trainer": {"accelerator": "cpu", "callbacks": [scaling] if is_list else scaling},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    path = f"--config={tmp_path / 'run.yaml'}"
    main(["precision", path, "--directions=1", "--pairs=1", "--json"])


@pytest.mark.parametrize("is_list", [True, False])
def test_model_without_readout_has_no_default_exclusions(is_list, tmp_path, capsys):
    run_on("lossless", tmp_path, is_list=is_list)
    rows = json.loads(capsys.readouterr().out)["matmuls"]
    reasons = {(row["module"], row["computation"]): row["reason"] for row in rows}
    assert reasons["fc1", "forward"] is None and reasons["fc2", "forward"] is None


def test_rules_are_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"method=Rules\(.*rules capture.*'lossless'"):
        run_on("u-mup", tmp_path)


def test_plugin_sets_formats_and_exemptions(tmp_path, capsys):
    fp8 = {"class_path": "lightning_unitscale.FP8", "init_args": {"exempt": [["fc1", "forward"]]}}
    plugin = {"class_path": "lightning_unitscale.UnitScaledPrecision"}
    config = {
        "model": {"class_path": f"{__name__}.FeedForward"},
        "trainer": {"accelerator": "cpu", "plugins": [plugin | {"init_args": {"precision": fp8}}]},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    path = f"--config={tmp_path / 'run.yaml'}"
    main(["precision", path, "--directions=1", "--pairs=1", "--json"])
    found = json.loads(capsys.readouterr().out)
    reasons = {(row["module"], row["computation"]): row["reason"] for row in found["matmuls"]}
    assert reasons["fc1", "forward"] == "this computation is exempt"
    assert reasons["fc2", "forward"] is None and ["fc1", "forward"] in found["exempt"]


class NoBatch(FeedForward):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(4, 16), 8, drop_last=True)


def test_data_without_batch_is_an_error(tmp_path):
    config = {"model": {"class_path": f"{__name__}.NoBatch"}, "trainer": {"accelerator": "cpu"}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="`precision`: the training data has no batch"):
        main(["precision", f"--config={tmp_path / 'run.yaml'}"])


def test_tables_have_requested_formats(command, capsys):
    main([*command, "--formats=[E2M1FN]", "--limit=2"])
    printed = capsys.readouterr().out
    assert "Damage: change of the loss" in printed and " computations rounded: loss" in printed
    assert "E4M3FN" not in printed
