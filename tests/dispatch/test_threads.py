"""Steps on several threads: each counts the autograd nodes that it makes from its own first one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.dynamo.patches import opened_layers
from tests.dispatch.test_backward_only import Late
from tests.helpers import assert_same_bits

NUM_STEPS = 4


class Branched(nn.Module):
    """Layers of unlike scales, so that the units of one are wrong for another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        for index, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=0.3 * 8.0 ** (index % 2 - 1))
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return Late.apply(x, self.weight)


def here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def in_new_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns that a thread of its own calls, whose first node is the first."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(60)


def penalized(call: Callable[..., Any], *callbacks: Any) -> list[Tensor]:
    """Train with a gradient penalty; ``call`` says which thread runs each part of a step."""
    torch.manual_seed(0)
    model = Branched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, callbacks):
        for _ in range(NUM_STEPS):
            x = torch.randn(5, 8).requires_grad_()
            loss = call(lambda x=x: model(x).square().mean())
            (slope,) = call(lambda x=x, y=loss: torch.autograd.grad(y, x, create_graph=True))
            call((loss + slope.square().sum()).backward)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def test_gradients_of_gradients_that_another_thread_has_numbered() -> None:
    """A pass that is recorded makes nodes where it runs: on a GPU, the engine's thread."""
    callbacks = [UnitScaleCallback(simulate="fp8") for _ in range(2)]
    on_one, on_many = map(penalized, (here, in_new_thread), callbacks)
    assert_same_bits(on_one, on_many)
    one, many = (callback.coverage for callback in callbacks)
    assert one.counts == many.counts and one.fraction_of_flops("format") == 1
    plain, scaled = penalized(here), penalized(in_new_thread, UnitScaleCallback())
    assert_same_bits(plain, scaled)


def in_checkpoint(model: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    y: Tensor = checkpoint(model, x, use_reentrant=reentrant)
    return y


class Trainings:
    """Trainings in threads that take every part of a step together."""

    def __init__(self, num_threads: int) -> None:
        self._barrier = threading.Barrier(num_threads, timeout=60)

    def train(self, seed: int, callbacks: list[Any], reentrant: bool | None) -> list[Tensor]:
        """Train a model, with checkpoints if ``reentrant`` is not ``None``."""
        try:
            return self._train(seed, callbacks, reentrant)
        except BaseException:
            self._barrier.abort()
            raise

    def _train(self, seed: int, callbacks: list[Any], reentrant: bool | None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        model = Branched()
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 2.0**-seed
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, optimizer, callbacks):
            for _ in range(NUM_STEPS):
                x = torch.randn(5, 8, generator=generator).requires_grad_()
                self._barrier.wait()
                y = model(x) if reentrant is None else in_checkpoint(model, x, reentrant)
                self._barrier.wait()
                y.square().mean().backward()
                self._barrier.wait()
                optimizer.step()
                optimizer.zero_grad()
            self._barrier.wait()
        return list(model.parameters())


CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "plain": list,
    "lossless": lambda: [UnitScaleCallback()],
    "simulate": lambda: [UnitScaleCallback(simulate="E4M3FN")],
    "fp8": lambda: [UnitScaleCallback(precision="fp8")],
    "monitor": lambda: [ScaleMonitor(every_n_steps=1)],
}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", CALLBACKS)
def test_models_in_two_threads_keep_to_themselves(kind: str, reentrant: bool | None) -> None:
    """Nodes of both have the same numbers."""
    kinds = (kind, "simulate")
    alone, together = ([CALLBACKS[kind]() for kind in kinds] for _ in range(2))
    expected = [
        in_new_thread(Trainings(1).train, seed, callbacks, reentrant)
        for seed, callbacks in enumerate(alone)
    ]
    trainings = Trainings(len(kinds))
    with ThreadPoolExecutor(len(kinds)) as pool:
        tasks = [
            pool.submit(trainings.train, seed, callbacks, reentrant)
            for seed, callbacks in enumerate(together)
        ]
        assert_same_bits([task.result(120) for task in tasks], expected)
    for one, other in zip(alone, together, strict=True):
        for before, after in zip(one, other, strict=True):
            if isinstance(before, UnitScaleCallback):
                assert after.coverage.counts == before.coverage.counts
                assert after.coverage.num_products


class Parts(nn.Module):
    """A layer that threads run, and one that the calling thread runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return self.second(torch.cat(list(pool.map(self.first, x.chunk(2)))))


def test_what_threads_within_a_step_multiply_is_counted_as_plain() -> None:
    torch.manual_seed(0)
    model, callback = Parts(), UnitScaleCallback()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, [callback]), pytest.warns(UserWarning, match="first"):
        for _ in range(2):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    coverage = callback.coverage
    (reason,) = coverage.reasons
    assert "thread" in reason and coverage.uncovered_modules() == ("first",)
    # Forward, and for the gradient of the weight, by each thread.
    assert (coverage.num_products, coverage.num_in_units) == (2 * 2 + 3, 3)


def test_a_setting_of_all_threads_is_as_before() -> None:
    """Two steps that need fused layers opened end in the order in which they began."""
    first, second = opened_layers(True), opened_layers(True)
    for step in (first, second):
        step.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()
