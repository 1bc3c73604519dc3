"""What every test has in common: one thread, a fixed seed, a working folder of its own."""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for the processes that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
# Lightning 2.6 calls names that jsonargparse 4.53 deprecates.
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seeds every generator; what Lightning writes to its default folder lands in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    yield
    # Dynamo counts recompilations per function, over all the tests that call it.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A small text with something to learn in it."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(500)))
    return path
