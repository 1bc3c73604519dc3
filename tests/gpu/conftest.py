"""Choose the device of these tests: a GPU, or a CPU to check that they start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.models import device_name

# Asked for by deterministic algorithms; read when the library is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker("gpu")
            item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device."""
    return torch.device(device_name(request.config))


@pytest.fixture(autouse=True)
def _reproducible(device: torch.device, _own_world: None) -> Iterator[None]:
    """Plain runs are to have the same bits twice, or nothing could be compared with them."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield
