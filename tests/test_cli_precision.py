"""The command ``precision``: its JSON, and what it takes from the configuration."""

import json
from pathlib import Path

import pytest

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
    assert reasons["head", "forward"] == "its name is excluded by default"
    assert reasons["blocks.0.mlp.up", "forward"] == "this computation is exempt"
    assert reasons["blocks.0.mlp.up", "input_gradient"] is None
    assert reasons["blocks.0.attention", "forward"] == "it is no linear layer"


def test_tables_have_the_asked_formats(command, capsys):
    main([*command, "--formats=[E2M1FN]", "--limit=2"])
    printed = capsys.readouterr().out
    assert "Damage: change of the loss" in printed and "E2M1FN, all rounded" in printed
    assert "E4M3FN" not in printed
