"""The example trains the same on one device and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

pytest.importorskip("transformers")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_losses_on_two_devices_match_one(tmp_path: Path) -> None:
    for devices in (1, 2):
        arguments = ("--devices", str(devices))
        run_ranks("examples.padded_gpt2", tmp_path, *arguments, num_ranks=devices)
    one, two = (json.loads((tmp_path / f"losses-{n}.json").read_text()) for n in (1, 2))
    assert len(one) == 10
    assert one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-6)
