"""Steps on several threads, each with its own numbering of autograd nodes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.capture.dynamo_capture import capture_settings
from lightning_unitscale.capture.patches import opened_layers
from lightning_unitscale.matmuls import execute
from lightning_unitscale.patching import shadowed
from tests.engine_thread import backward_on_engine_thread
from tests.helpers import IS_TORCH_2_11, assert_same_bits
from tests.matmuls.test_backward_only import Late

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
    """Return the result of a function on a new thread, whose first node has the first number."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(60)


def penalized(call: Callable[..., Any], *callbacks: Any) -> list[Tensor]:
    """Train with a gradient penalty; ``call`` runs each part of a step on a thread."""
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


def test_second_derivatives_recorded_on_other_thread() -> None:
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


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", CALLBACKS)
def test_models_in_two_threads_are_independent(kind: str, reentrant: bool | None) -> None:
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
                assert after.coverage.num_matmuls


class Parts(nn.Module):
    """A layer that threads run, and one that the calling thread runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return self.second(torch.cat(list(pool.map(self.first, x.chunk(2)))))


def test_matmuls_of_threads_inside_step_are_unscaled() -> None:
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
    assert (coverage.num_matmuls, coverage.num_in_units) == (2 * 2 + 3, 3)


def test_overlapping_fastpath_settings_are_restored() -> None:
    """Two steps that need fused layers opened end in the order in which they began."""
    first, second = opened_layers(True), opened_layers(True)
    for step in (first, second):
        step.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.mha.get_fastpath_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled()


class Trained(pl.LightningModule):
    """Trained with a checkpoint within, by itself or by hand."""

    def __init__(self, is_by_hand: bool) -> None:
        super().__init__()
        self.net = Branched()
        self.automatic_optimization = not is_by_hand

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = checkpoint(self.net, batch, use_reentrant=False).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Trained, callback: pl.Callback) -> list[Tensor]:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, barebones=True, max_steps=NUM_STEPS, callbacks=[callback]
    )
    trainer.fit(module, torch.randn(5, 5, 8, generator=torch.Generator().manual_seed(0)))
    return list(module.parameters())


@pytest.mark.filterwarnings("ignore:The .* does not have many workers")
def test_trainers_in_two_threads_are_independent() -> None:
    outcomes = []
    for num_threads in (1, 2):
        torch.manual_seed(0)
        modules = [Trained(is_by_hand=False), Trained(is_by_hand=True)]
        callbacks = [UnitScaleCallback(simulate="fp8"), UnitScaleCallback(simulate="E2M3FN")]
        with ThreadPoolExecutor(num_threads) as pool:
            trained = list(pool.map(fit, modules, callbacks))
        outcomes.append((trained, [callback.coverage.counts for callback in callbacks]))
    (alone, counted_alone), (together, counted_together) = outcomes
    assert_same_bits(together, alone)
    assert counted_together == counted_alone


@pytest.mark.filterwarnings("ignore:The .* does not have many workers")
def test_step_during_compilation_in_other_thread_has_units() -> None:
    def trained(runner: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        callback = UnitScaleCallback()
        return runner(fit, Trained(is_by_hand=False), callback), callback.coverage.counts

    alone, beside = trained(here), []

    def backend(graph_module: Any, _: Any) -> Any:
        beside.append(trained(in_new_thread))
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert beside[0][1] == alone[1]
    assert_same_bits(beside[0][0], alone[0])


def adam() -> list[Tensor]:
    """Take some steps of an optimizer that asks whether it is compiled."""
    weight = torch.linspace(-1.0, 1.0, 64).requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (weight - 0.3 * step).square().sum().backward()
        optimizer.step()
    return [weight.detach()]


def test_optimizer_during_capture_in_other_thread_is_unchanged() -> None:
    beside = []

    def backend(graph_module: Any, _: Any) -> Any:
        beside.append(in_new_thread(adam))
        return graph_module.forward

    torch._dynamo.reset()
    with capture_settings():
        torch.compile(torch.cos, backend=backend)(torch.ones(2))
    assert_same_bits(beside, [adam()])


@pytest.mark.skipif(IS_TORCH_2_11, reason="torch 2.11's fake tensors crash on two threads at once")
@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:The .* does not have many workers")
@pytest.mark.parametrize("kind", ["min_cut", "u-mup"])
def test_steps_captured_by_two_threads_at_once(kind: str) -> None:
    def made() -> Any:
        return RematCallback("min_cut") if kind == "min_cut" else UnitScaleCallback(kind)

    outcomes = []
    for num_threads in (1, 2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        modules = [Trained(is_by_hand=False) for _ in range(2)]
        with ThreadPoolExecutor(num_threads) as pool:
            outcomes.append(list(pool.map(fit, modules, [made(), made()])))
    assert_same_bits(*outcomes)


@pytest.mark.parametrize("callbacks", [[UnitScaleCallback()], [ScaleMonitor(every_n_steps=1)]])
def test_builtin_functions_as_hooks_on_engine_thread(callbacks: list[Any]) -> None:
    """An engine's thread calls them without a Python frame."""
    weights = []
    for given in ([], callbacks):
        torch.manual_seed(0)
        model = Branched()
        model.layers[0].weight.register_hook(torch.abs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, optimizer, given):
            for _ in range(2):
                x = torch.randn(5, 8)
                y = checkpoint(model, x.requires_grad_(), use_reentrant=True)
                y.register_hook(torch.square)
                with backward_on_engine_thread():
                    y.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(list(model.parameters()))
    assert_same_bits(*weights)


class Kept(torch.autograd.Function):
    """Reads a gradient in one matmul, so that the copy that two could share is left."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[1].T, None


def test_gradients_on_engine_thread_are_freed() -> None:
    """The thread lives as long as the process; the next step frees what it has kept."""
    copies: list[weakref.ref[Tensor]] = []
    original = execute.scaled_copy

    def scaled_copy(tensor: Tensor, exponent: int) -> Tensor:
        copy = original(tensor, exponent)
        copies.append(weakref.ref(copy))
        return copy

    module = nn.Linear(8, 8)
    module.register_forward_hook(lambda module, inputs, y: Kept.apply(y, module.weight))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with (
        attach(module, optimizer, [UnitScaleCallback()]),
        shadowed(execute, scaled_copy=scaled_copy),
    ):
        for _ in range(2):
            with backward_on_engine_thread():
                (1e-3 * module(torch.randn(5, 8)).square()).sum().backward()
            optimizer.step()
        num_copies = len(copies)
        module(torch.randn(5, 8))
        alive = [copy for copy in copies[:num_copies] if copy() is not None]
    assert num_copies and not alive
