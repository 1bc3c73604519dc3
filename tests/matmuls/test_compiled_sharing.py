"""Modules of one class share compiled code, but not names and units."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from tests.callbacks.runs import Rows, run
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.usefixtures("torch_kernels")
WIDTH = 16


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Two matmuls, one of them by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) @ self.mixing)


class Module(pl.LightningModule):
    """Blocks, each of another scale."""

    def __init__(self, scale: float = 1.0, *, compiles: str = "blocks") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for index, block in enumerate(self.blocks):
            with torch.no_grad():
                block.layer.weight.mul_(scale * 8.0**index)
            if compiles == "blocks":
                block.compile()
        if compiles == "module":
            self.compile()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def rows() -> Any:
    data = Rows(16, lambda generator: torch.randn(WIDTH, generator=generator))
    return torch.utils.data.DataLoader(data, batch_size=4)


@pytest.mark.slow_cases
@pytest.mark.parametrize("compiles", ["blocks", "module"])
def test_blocks_sharing_graph_have_eager_names_and_units(compiles: str) -> None:
    def trained(compiles: str, *callbacks: pl.Callback) -> Any:
        return run(lambda: Module(compiles=compiles), callbacks, data=rows, max_steps=4)

    plain = trained(compiles)
    eager, compiled = UnitScaleCallback(), UnitScaleCallback()
    trained("", eager)
    scaled = trained(compiles, compiled)
    assert_same_bits((scaled.outputs, scaled.weights), (plain.outputs, plain.weights))
    assert compiled.coverage.num_in_units == compiled.coverage.num_matmuls
    assert compiled.coverage.num_matmuls == eager.coverage.num_matmuls
    assert compiled.gauge.pairs == eager.gauge.pairs
    sigmas = [compiled.gauge.pairs[f"blocks.{i}.layer.linear:weight"].log2_sigma for i in range(3)]
    assert [b - a for a, b in itertools.pairwise(sigmas)] == [3, 3]


@pytest.mark.slow
def test_every_fit_of_a_sweep_has_units() -> None:
    frames = []
    for scale in (1.0, 2.0**-6, 1.0):
        make = lambda scale=scale: Module(scale, compiles="module")  # noqa: E731
        callback = UnitScaleCallback()
        scaled = run(make, [callback], data=rows, max_steps=3)
        frames.append(counters["stats"]["unique_graphs"])
        assert callback.coverage.num_in_units == callback.coverage.num_matmuls == 18 - 1
        weight = callback.gauge.pairs["blocks.1.layer.linear:weight"]
        assert weight.log2_sigma == math.log2(scale)
        plain = run(make, [], data=rows, max_steps=3)
        assert_same_bits((scaled.outputs, scaled.weights), (plain.outputs, plain.weights))
    # Later fits run what was compiled in the first.
    assert frames == [frames[0]] * 3


def _thread(function: Callable[..., Any], *args: Any) -> threading.Thread:
    """Torch's settings are those of a thread: without this one it would compile C++."""

    def run() -> None:
        with torch._inductor.config.patch(fallback_by_default=True):
            function(*args)

    return threading.Thread(target=run)


@pytest.mark.slow
def test_module_compiled_in_user_thread_has_units() -> None:
    module = Module(compiles="module")
    attached = AttachedSession(module, ["training_step"])
    counter = attached.session.counter = CoverageCounter()
    thread = _thread(lambda: module.training_step(torch.randn(4, WIDTH)).backward())
    thread.start(), thread.join()
    assert counter.result().num_in_units == counter.result().num_matmuls == 18 - 1
    attached.detach()


def _stepped(modules: list[Module], order: str) -> list[AttachedSession]:
    """Two modules of one class take steps in turn."""
    attached = [AttachedSession(module, ["training_step"]) for module in modules]
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    for one in attached:
        one.session.counter = CoverageCounter()
    steps = [module.training_step for module in modules]

    def settle() -> None:
        for one in attached:
            one.session.units.settle()

    for _ in range(3):
        if order == "nested":
            losses = [step(x) for step in steps]
            for loss in losses:
                loss.backward()
        elif order == "threads":
            barrier = threading.Barrier(len(steps))

            def train(step: Any, barrier: threading.Barrier = barrier) -> None:
                loss = step(x)
                barrier.wait(60)
                loss.backward()

            threads = [_thread(train, step) for step in steps]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        else:
            for step in steps:
                step(x).backward()
        settle()
    return attached


@pytest.mark.slow_cases
@pytest.mark.parametrize("order", ["threads", "nested", "in turn"])
def test_modules_of_same_class_use_their_own_sessions(order: str) -> None:
    def made(compiles: str) -> list[Module]:
        torch.manual_seed(0)
        return [Module(scale, compiles=compiles) for scale in (1.0, 2.0**-9)]

    expected, compiled = made(""), made("module")
    if order != "threads":  # there the first steps meet in the compiler
        compiled[0].training_step(torch.randn(4, WIDTH)).backward()
        compiled[0].zero_grad()
    of_eager, of_compiled = _stepped(expected, order), _stepped(compiled, order)
    for eager, own in zip(of_eager, of_compiled, strict=True):
        assert own.session.units.gauge.pairs == eager.session.units.gauge.pairs
        counted = own.session.counter.result()
        assert counted.num_in_units == counted.num_matmuls
        assert counted.num_matmuls == eager.session.counter.result().num_matmuls
        own.detach(), eager.detach()
    for module, other in zip(expected, compiled, strict=True):
        grads = [p.grad for p in module.parameters()], [p.grad for p in other.parameters()]
        torch.testing.assert_close(*grads)
