"""Graphs and decisions do not depend on Python's hash seed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.transform import unit_scale


def described() -> str:
    """Graphs and factors of a Mamba's step, two times in a row."""
    from transformers import MambaConfig, MambaModel

    texts = []
    for _ in range(2):
        torch.manual_seed(0)
        config = MambaConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=2
        )
        module = unit_scale(MambaModel(config))
        module(input_ids=torch.arange(12).view(2, 6)).last_hidden_state.sum().backward()
        steps = steps_of(module)
        assert steps is not None
        step = steps.steps["forward"]
        # The text before this contains the time of each pass.
        _, _, decisions = module.explain().partition("\nOperations:")  # type: ignore[operator]
        assert "mixer" in decisions
        texts += [*(str(one.base.graph) for one in step.graphs), decisions]
    return "\n".join(texts)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_graphs_do_not_depend_on_hash_seed() -> None:
    found = []
    for seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(process.stdout.splitlines())
    assert len(found[0]) > 100
    assert found[0] == found[1]


if __name__ == "__main__":
    print(described())
