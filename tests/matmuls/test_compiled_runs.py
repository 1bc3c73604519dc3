"""Matmuls of a compiled graph are measured together, without changing a bit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_unitscale.matmuls import kernels
from lightning_unitscale.matmuls.compiled_graphs import GRAPHS
from lightning_unitscale.matmuls.compiled_runs import CompiledMatmul
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.matmuls.measurement import FORWARD, Measurement
from lightning_unitscale.matmuls.scaled_methods import AttachedSession

pytestmark = pytest.mark.slow  # Inductor compiles C++


class Net(nn.Module):
    """Reads a buffer in a matmul, as a norm by power iteration does, and writes it in the end."""

    turned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16, bias=False)
        self.register_buffer("turned", torch.randn(32, 4) * 100)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            norm = (self.down.weight @ self.turned).norm()
            self.turned.mul_(1e-3)
        return self.down(self.up(x).relu() * 50) / norm


class Module(nn.Module):
    def __init__(self, *, is_compiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net: Any = Net()
        if is_compiled:
            self.net.compile()

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean()
        return loss


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Of torch's own, while it compiles.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch._dynamo.reset()


def looked_at(*, is_compiled: bool) -> tuple[Gauge, Measurement, list[Tensor]]:
    """Units of the first step, stored scales of the second, and gradients and buffers."""
    module, x = Module(is_compiled=is_compiled), torch.randn(64, 16)
    attached = AttachedSession(module, ["step"])
    units = attached.session.units
    attached.session.begin_step()
    module.step(x * 1e-2).backward()
    units.settle()
    gauge, units.is_looking = units.gauge, True
    attached.session.begin_step()
    module.step(x * 1e-2).backward()
    measurement = units.send()()
    attached.detach()
    return gauge, measurement, [*(p.grad for p in module.parameters()), *module.buffers()]


def extents(measurement: Measurement) -> dict[tuple[str, str], list[float]]:
    """The smallest and the largest magnitude of the operands of matmuls."""
    return {
        (matmul.site.name, matmul.slot): [
            number
            for extent in (*matmul.extents, *matmul.addends)
            for number in (extent.smallest, extent.largest)
        ]
        for matmul in measurement.matmuls
    }


def test_measurements_match_eager() -> None:
    torch.manual_seed(1)
    units, expected, tensors = looked_at(is_compiled=False)
    torch.manual_seed(1)
    GRAPHS.clear()
    same_units, found, same_tensors = looked_at(is_compiled=True)
    torch.testing.assert_close(same_tensors, tensors)
    assert same_units.pairs == units.pairs
    assert units.pairs["net.matmul:other"].log2_sigma == 7  # before it is written
    assert found.forward == pytest.approx(expected.forward)
    assert found.backward == pytest.approx(expected.backward)
    assert len(extents(found)) == 6
    assert extents(found) == {
        matmul: pytest.approx(numbers, rel=1e-3) for matmul, numbers in extents(expected).items()
    }
    (graph,) = GRAPHS.values()
    matmuls = [matmul for matmul in graph.matmuls if isinstance(matmul, CompiledMatmul)]
    assert sorted(one.index for look in graph.looks.values() for one in look) == [
        *range(len(matmuls))
    ]
    # All of the forward pass at once, and in the backward pass one for each site.
    slots = [{matmuls[one.index].slot for one in look} for look in graph.looks.values()]
    assert len(slots) == 1 + 2
    assert [FORWARD in of_look for of_look in slots].count(True) == 1


def test_no_python_per_matmul_between_measurements() -> None:
    module, x = Module(is_compiled=True), torch.randn(64, 16)
    attached = AttachedSession(module, ["step"])
    files = {kernels.__file__}
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in files:
            calls.append(frame.f_code.co_name)

    # In the first run torch watches what operators do.
    module.step(x).backward()
    sys.setprofile(note)
    module.net(x).sum().backward()
    sys.setprofile(None)
    assert not calls
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        module.step(x).backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["aten::mm"] + counts["aten::addmm"] == 3 + 1 + 2
    attached.detach()
