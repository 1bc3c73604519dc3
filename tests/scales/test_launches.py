"""Repeated launches of the statistics kernels, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_unitscale.scales.layout import RowLayout
from tests.triton_helpers import needs_triton

pytestmark = needs_triton
LIGHT = RowLayout().measured
STREAM = 7


class Kernel:
    """Replaces a kernel of ``triton.jit``, and notes launches by Triton and repeated ones."""

    def __init__(self) -> None:
        self.found: list[tuple[Any, ...]] = []
        self.repeated: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **_: Any) -> Any:
            self.found.append((*grid, *map(_address, arguments)))
            return SimpleNamespace(run=self._run, function=1, packed_metadata=(8, 1, 0))

        return launch

    def _run(self, *arguments: Any) -> None:
        assert arguments[1:3] == (1, 1)
        assert arguments[4:9] == (1, (8, 1, 0), None, None, None)
        self.repeated.append((arguments[0], *arguments[9:]))


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.fixture
def kernels() -> Iterator[dict[str, Kernel]]:
    """Kernels by name, with no earlier launches, of a version of Triton that was checked."""
    import triton

    from lightning_unitscale.scales import triton_statistics

    made = {name: Kernel() for name in ("partial_rows", "joint_rows")}
    triton_statistics._plan.cache_clear()
    stand_ins = {**made, "current_device": lambda: None, "_JOINT_LAUNCHES": {}}
    with (
        mock.patch.multiple(triton_statistics, **stand_ins),
        mock.patch.object(triton, "__version__", "3.7.0"),
    ):
        yield made
    triton_statistics._plan.cache_clear()


def _rows(num_waiting: int = 64) -> Any:
    from lightning_unitscale.scales.triton_statistics import TritonRows

    return TritonRows(LIGHT, torch.device("cpu"), num_waiting)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 70),
        torch.randn(300, 70)[:, 1:],
        torch.randn(70, 1, 30).expand(70, 4, 30),
        torch.randn(7, 5, 2).bfloat16().permute(2, 0, 1)[:, 1:],
        torch.tensor(2.0),
    ],
    ids=["plain", "gaps", "repeated", "permuted", "scalar"],
)
def test_launch_is_repeated_for_same_tensor_kind(
    kernels: dict[str, Kernel], tensor: Tensor
) -> None:
    """A repeated launch has the same grid and arguments, except for the row."""
    kernel, rows = kernels["partial_rows"], _rows()
    assert rows.repeat(tensor, STREAM) is None  # neither memory nor a launch before
    assert rows.add(tensor) == 0
    assert rows.repeat(tensor, STREAM) == 1
    ((grid, *found),) = kernel.found
    ((other_grid, *repeated),) = kernel.repeated
    assert (other_grid, repeated) == (grid, [*found[:4], 1, *found[5:]])
    assert repeated[0] == tensor.data_ptr()


def test_launch_is_not_repeated_for_other_tensors(kernels: dict[str, Kernel]) -> None:
    """Triton launches other shapes, types or alignments; copied tensors are read from the copy."""
    rows, memory = _rows(), torch.randn(4096)
    rows.add(memory[:64])
    for tensor in (
        memory[:65],
        memory[:64].view(8, 8)[:, :4],
        memory[:64].double(),
        memory[1:65],
        memory[:64].to_sparse(),
        memory[:0],
        memory[:128].view(torch.complex64).conj().imag,
    ):
        assert rows.repeat(tensor, STREAM) is None
    for copied in (
        memory[:64].to(torch.float8_e4m3fn),
        memory.view([4] * 6)[:3, :3, :3, :3, :3, :3],
    ):
        assert rows.add(copied) == rows._number - 1
        assert rows.repeat(copied, STREAM) is None
    assert not kernels["partial_rows"].repeated
    rows.add(copied)  # its copy is one like the last one's
    assert kernels["partial_rows"].repeated.pop()[1] != copied.data_ptr()


def test_launch_of_joint_rows_is_repeated(kernels: dict[str, Kernel]) -> None:
    """The launch that makes rows of parts is repeated where its numbers are the same."""
    tensor = torch.randn(40)
    rows = _rows(num_waiting=2)
    for _ in range(4):
        rows.add(tensor)
    kernel = kernels["joint_rows"]
    ((grid, *found),) = kernel.found
    ((other_grid, *repeated),) = kernel.repeated
    assert (grid, found[:3], found[4:]) == (other_grid, repeated[:3], repeated[4:])
    assert repeated[3] == rows._rows[1].data_ptr()
    alone = _rows(num_waiting=1)
    alone.add(tensor)
    assert len(kernel.found) == 2


def test_launch_is_not_repeated_under_profiler(kernels: dict[str, Kernel]) -> None:
    import triton

    hooks = SimpleNamespace(calls=[print])
    runtime = SimpleNamespace(launch_enter_hook=hooks, launch_exit_hook=SimpleNamespace(calls=[]))
    with mock.patch.object(triton, "knobs", SimpleNamespace(runtime=runtime)):
        rows = _rows()
        for _ in range(2):
            rows.add(torch.randn(40))
        assert rows.repeat(torch.randn(40), STREAM) is None
    assert not kernels["partial_rows"].repeated


def test_launch_is_not_repeated_on_other_device(kernels: dict[str, Kernel]) -> None:
    from lightning_unitscale.scales import triton_statistics

    rows, tensor = _rows(), torch.randn(40)
    rows.add(tensor)
    with mock.patch.object(triton_statistics, "current_device", lambda: 1):
        assert rows.repeat(tensor, STREAM) is None
    assert rows.repeat(tensor, STREAM) == 1


def test_launch_is_not_repeated_with_unknown_triton(kernels: dict[str, Kernel]) -> None:
    import triton

    with mock.patch.object(triton, "__version__", "9.9.0"):
        rows, tensor = _rows(), torch.randn(40)
        rows.add(tensor)
        assert rows.repeat(tensor, STREAM) is None
