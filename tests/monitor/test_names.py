"""Rows have the names and edges of the captured graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.demo_step import demo_batch
from examples.gpt import GPT
from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from tests.callbacks.modules import Regression
from tests.callbacks.runs import QUIET, Capturing, loader
from tests.monitor.modules import Small

pytestmark = [
    pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
]


def snapshot(make: Callable[[], pl.LightningModule], data: Any, *others: Any) -> ScaleSnapshot:
    pl.seed_everything(5, verbose=False)
    monitor = ScaleMonitor(every_n_steps=1)
    trainer = pl.Trainer(callbacks=[monitor, *others], max_steps=2, **QUIET)
    trainer.fit(make(), data())
    return monitor.snapshots[-1]


def assert_same_rows(ours: ScaleSnapshot, theirs: ScaleSnapshot) -> None:
    assert set(ours.names) == set(theirs.names)
    theirs = theirs.select(ours.names)
    assert ours.modules == theirs.modules
    assert ours.operands == theirs.operands
    assert ours.matmuls == theirs.matmuls
    for name, one, other in zip(ours.names, ours.inputs, theirs.inputs, strict=True):
        assert set(one) == set(other), name
    for direction in ("forward", "backward"):
        # A captured graph takes the rows of a tensor's parts together, and samples each of them.
        rows = [one.rows(direction)[:, : ours.layout.num_head] for one in (ours, theirs)]
        np.testing.assert_allclose(*rows, rtol=1e-6, atol=1e-12)


def test_demo_has_names_of_captured_graph() -> None:
    def data() -> Any:
        return DataLoader([demo_batch(2)] * 2, batch_size=None)

    watched, captured = snapshot(GPT, data), snapshot(GPT, data, Capturing())
    assert len(watched) == 110
    assert watched.names == captured.names
    assert_same_rows(watched, captured)
    names = np.array(watched.names)
    in_block = [name for name in names[watched.read_by_matmuls("forward")] if "blocks.1" in name]
    assert set(in_block) == {
        f"blocks.1.{name}"
        for name in (
            *("attention_norm.layer_norm", "attention.qkv.weight"),
            *(f"attention.{role}" for role in ("query", "key", "value")),
            *("attention.scaled_dot_product_attention", "attention.out.weight"),
            *("mlp_norm.layer_norm", "mlp.up.weight", "mlp.gelu", "mlp.down.weight"),
        )
    }
    assert set(names[watched.read_by_matmuls("backward")]) == {
        name for name in names if name.endswith((".linear", "_attention"))
    }


class Operators(Small):
    def build(self) -> None:
        self.matrix = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = 2 * hidden + hidden / 3 - (1 - hidden) + 1 / (2 + hidden**2) + 2**hidden
        hidden = hidden @ self.matrix - hidden % 2
        hidden = torch.cat([hidden[:, 3:], -hidden[:, :3]], 1)
        hidden += x.mean()
        hidden -= x.amax()
        hidden *= 0.5
        hidden /= 2
        return self.second(F.relu(hidden, inplace=True).clamp(-3, 3))


class Layers(Small):
    def build(self) -> None:
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution(self.first(x).unsqueeze(1))
        hidden = F.max_pool1d(self.batch_norm(hidden).relu_(), 2).mean(1)
        left, right = hidden.chunk(2, -1)
        query, key = torch.stack([left, right]).unbind(0)
        return self.second(torch.cat([left * torch.sigmoid(right), query + key], -1).repeat(1, 2))


class Constants(Small):
    """A table and a mask: only what a matmul reads has a row."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        table = torch.arange(8.0).sin()
        mask = torch.ones(8, 8).tril()
        return self.second(hidden + table + hidden @ mask)


@pytest.mark.parametrize("kind", [Operators, Layers, Constants, Regression])
def test_eager_names_match_captured_graph(kind: type[Regression]) -> None:
    watched, captured = snapshot(kind, loader), snapshot(kind, loader, Capturing())
    assert_same_rows(watched, captured)


def test_names_inside_attention_and_casts() -> None:
    class Attention(Small):
        def build(self) -> None:
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).double().float()[None]
            return self.second(self.attention(hidden, hidden, hidden, need_weights=False)[0][0])

    found = snapshot(Attention, loader)
    inputs = dict(zip(found.names, found.inputs, strict=True))
    matmul = "attention.scaled_dot_product_attention"
    assert inputs[matmul] == ("attention.query", "attention.key", "attention.value")
    assert inputs["attention.value"] == ("attention.linear",)
    assert inputs["getitem"] == ("first.linear",)
    assert not [name for name in found.names if "double" in name or "float" in name]


@pytest.mark.filterwarnings("ignore:ScaleMonitor. include=.*matches nothing")
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"include": "*attention.query"}, ["query"]),
        (
            {"include": "*attention.*", "exclude": ["*.key", "*_attention", "*.qkv.*", "*.out.*"]},
            ["query", "value"],
        ),
        ({"include": "*.getitem*"}, []),
    ],
)
def test_patterns_match_displayed_names(options: Any, shown: list[str]) -> None:
    def data() -> Any:
        return DataLoader([demo_batch(2)] * 2, batch_size=None)

    for others in ([], [Capturing()]):
        monitor = ScaleMonitor(every_n_steps=1, **options)
        trainer = pl.Trainer(callbacks=[monitor, *others], max_steps=1, **QUIET)
        trainer.fit(GPT(depth=1), data())
        names = {name for one in monitor.snapshots for name in one.names}
        assert names == {f"blocks.0.attention.{role}" for role in shown}
        for one in monitor.snapshots:
            assert np.isfinite(one.log2_rms("backward")).all()


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize(
    "options", [{"method": "u-mup"}, {"remat": "min_cut"}, {"precision": "fp8"}]
)
def test_operands_are_marked_in_rewritten_steps(options: Any) -> None:
    def data() -> Any:
        return DataLoader([demo_batch(2)] * 2, batch_size=None)

    plain, rewritten = (
        snapshot(lambda: GPT(depth=1), data, *others)
        for others in ([], [UnitScaleCallback(**options)])
    )
    rewritten = rewritten.select(plain.names)
    assert any(plain.operands) and rewritten.operands == plain.operands
    assert any(plain.matmuls) and rewritten.matmuls == plain.matmuls


def test_batch_inputs_have_names() -> None:
    class Batch(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            named = batch["named"]
            return self.loss((named[0], batch["target"])) + self.first(named[0]).mean()

    def rows(generator: torch.Generator) -> Any:
        x = torch.randn(6, generator=generator)
        return {"named": (x, 3), "target": x[:2], "index": 4}

    found = snapshot(Batch, lambda: loader(make=rows))
    given = [name for name in found.names if name.startswith("input.")]
    assert given == ["input.batch_named_0", "input.batch_target"]
    statistics = found.statistics("input.batch_named_0")
    assert statistics is not None
    assert statistics.numel == 24


def test_optimizer_and_logger_have_no_rows() -> None:
    class Manual(Small):
        def build(self) -> None:
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.log("loss", loss, on_epoch=True, on_step=True)

    found = snapshot(Manual, loader)
    made = [name for name in found.names if not name.endswith(("weight", "bias"))]
    assert set(made) == {
        "input.batch_0",
        "input.batch_1",
        "first.linear",
        "norm.layer_norm",
        "gelu",
        "dropout.dropout",
        "second.linear",
        "mse_loss",
    }
    assert np.isfinite(found.log2_rms("backward")[found.names.index("first.linear")])


def test_inner_gradients_of_penalty_are_left_out() -> None:
    """With a gradient penalty, the row shows the gradient of the loss."""
    seen: list[Tensor] = []

    class Penalty(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].clone().requires_grad_()
            hidden = self.first(x)
            (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
            hidden.register_hook(seen.append)
            return slope.square().mean()

    found = snapshot(Penalty, loader)
    row = found.statistics("first.linear", "backward")
    assert row is not None
    assert row.numel == seen[-1].numel()
    assert row.rms == pytest.approx(float(seen[-1].square().mean().sqrt()))


def test_autograd_function_results_have_names() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Own(Small):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(Twice.apply(self.first(x)))

    found = snapshot(Own, loader)
    inputs = dict(zip(found.names, found.inputs, strict=True))
    assert inputs["second.linear"][0] == "Twice"
    assert inputs["Twice"] == ("first.linear",)
    gradients = found.log2_rms("backward")
    place = {name: index for index, name in enumerate(found.names)}
    assert gradients[place["first.linear"]] == gradients[place["Twice"]] + 1


def test_accumulated_batches_and_repeated_calls_share_row() -> None:
    class Shared(Small):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.hidden(x))

    pl.seed_everything(5, verbose=False)
    monitor = ScaleMonitor(every_n_steps=1)
    options = {**QUIET, "accumulate_grad_batches": 2}
    pl.Trainer(callbacks=[monitor], max_steps=1, **options).fit(Shared(), loader())
    (found,) = monitor.snapshots
    for direction in ("forward", "backward"):
        one = found.statistics("first.linear", direction)
        assert one is not None
        assert one.numel == 2 * 4 * 8


def test_unsampled_steps_run_original_method() -> None:
    seen: list[tuple[int, bool]] = []

    class Looking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append((batch_idx, "training_step" in vars(self)))
            return self.loss(batch)

    pl.seed_everything(5, verbose=False)
    monitor = ScaleMonitor(every_n_steps=3)
    pl.Trainer(callbacks=[monitor], max_steps=6, **QUIET).fit(Looking(), loader(24))
    assert seen == [(0, True), (1, True), (2, False), (3, True), (4, False), (5, True)]


def test_monitor_does_not_extend_tensor_lifetimes() -> None:
    alive: list[bool] = []

    class Freeing(Small):
        def forward(self, x: Tensor) -> Tensor:
            negative = -self.first(x)  # which autograd does not keep
            seen = weakref.ref(negative)
            hidden = negative + 1
            del negative
            alive.append(seen() is not None)
            return self.second(hidden)

    snapshot(Freeing, loader)
    assert alive == [False, False]


def test_checkpoint_adds_no_tensors() -> None:
    class Checkpointed(Small):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return result

    # That of torch 2.11 makes an empty tensor that requires gradients.
    assert set(snapshot(Checkpointed, loader).names) == set(snapshot(Small, loader).names)
