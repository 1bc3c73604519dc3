"""Losses, weights, optimizer states, logs and random states are those of the run without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from tests.callbacks.modules import Evaluated, Regression, adamw, momentum
from tests.callbacks.runs import (
    ARRANGED,
    ARRANGEMENTS,
    BOTH_WAYS,
    Run,
    assert_same_run,
    loader,
    monitor_of,
    run,
    unit_scale_of,
)
from tests.helpers import assert_same_bits


@pytest.fixture(scope="module")
def plain() -> Callable[..., Run]:
    """The run without callbacks, made once per kind."""
    made: dict[str, Run] = {}

    def of(key: str, **options: Any) -> Run:
        if key not in made:
            made[key] = run(**options)
        return made[key]

    return of


def _half(init_scale: float) -> dict[str, Any]:
    # Lightning turns precision="16-mixed" on a CPU into BF16; the plugin itself can do FP16.
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}


@ARRANGED
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
def test_every_precision_is_bit_identical(
    plain: Callable[..., Run], precision: str, how: str
) -> None:
    options = {
        "make_module": lambda: Regression(adamw),
        "precision": precision,
        "gradient_clip_val": 1.0,
    }
    callbacks = ARRANGEMENTS[how]()
    found = run(callbacks=callbacks, **options)
    assert_same_bits(found.compared(), plain(precision, **options).compared())
    assert found.outputs[0]["loss"] != found.outputs[-1]["loss"]
    for one in callbacks:
        if isinstance(one, UnitScaleCallback):
            # The inputs are about 0.01, so they are stored in a unit near that.
            assert -8 <= one.gauge.pair("first.linear:input").log2_sigma <= -6
            assert any(pair.log2_gamma for pair in one.gauge.values())
        elif isinstance(one, ScaleMonitor):
            steps = [snapshot.step for snapshot in one.snapshots]
            # Every second or third, and of all trainings the first two steps and the last.
            assert steps in ([0, 1, 2, 4, 5], [0, 1, 3, 5])


def _ordinary(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample all of whose matmuls and gradients are normal numbers of FP16."""
    x = torch.randn(6, generator=generator).sign() + 0.5
    return x, x[:2] * 3


@ARRANGED
def test_fp16_within_its_normal_range(plain: Callable[..., Run], how: str) -> None:
    options: dict[str, Any] = {
        "make_module": lambda: Regression(norm=False),
        "data": lambda: loader(make=_ordinary),
    }
    found = run(callbacks=ARRANGEMENTS[how](), **options, **_half(2.0**8))
    reference = plain("half", **options, **_half(2.0**8))
    assert_same_bits(found.compared(), reference.compared())
    scalers = [one.trainer.precision_plugin.state_dict() for one in (found, reference)]
    assert scalers[0] == scalers[1]


@ARRANGED
def test_fp16_whose_scaler_skips_steps(how: str) -> None:
    # Beyond the range of FP16 the plain matmuls round where ours do not, so no bits are compared.
    callbacks = ARRANGEMENTS[how]()
    found = run(Regression, callbacks, max_steps=40, **_half(2.0**40))
    assert found.trainer.precision_plugin.state_dict()["scale"] < 2.0**32
    assert all(bool(one.isfinite().all()) for one in found.weights.values())
    assert found.outputs[-1]["loss"] < 0.9 * found.outputs[0]["loss"]


@ARRANGED
def test_accumulation_with_an_incomplete_end(plain: Callable[..., Run], how: str) -> None:
    # Four batches an epoch: three and one.
    options: dict[str, Any] = {
        "make_module": Regression,
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.01,
        "max_epochs": 3,
        "max_steps": -1,
    }
    callbacks = ARRANGEMENTS[how]()
    found = run(callbacks=callbacks, **options)
    assert_same_bits(found.compared(), plain("accumulation", **options).compared())
    assert found.trainer.global_step == 6


@BOTH_WAYS
@pytest.mark.parametrize("algorithm", ["value", "norm"])
def test_gradient_clipping_is_bit_identical(algorithm: str, captured: dict[str, Any]) -> None:
    assert_same_run(
        Regression,
        lambda: [UnitScaleCallback(**captured)],
        gradient_clip_val=1e-3,
        gradient_clip_algorithm=algorithm,
    )


@ARRANGED
def test_smaller_last_batch_is_bit_identical(plain: Callable[..., Run], how: str) -> None:
    options: dict[str, Any] = {
        "make_module": lambda: Regression(adamw, norm=False),
        "data": lambda: loader(10, 4),
        "max_steps": 9,
    }
    callbacks = ARRANGEMENTS[how]()
    found = run(callbacks=callbacks, **options)
    assert_same_bits(found.compared(), plain("last", **options).compared())


@pytest.mark.parametrize("how", ["both", "both, captured"])
def test_sanity_check_and_validation_during_training(how: str) -> None:
    found, callbacks = assert_same_run(
        Evaluated,
        ARRANGEMENTS[how],
        entry_options={"val_dataloaders": loader(6)},
        num_sanity_val_steps=2,
        val_check_interval=2,
        max_steps=8,
    )
    assert "val_loss" in found.metrics
    assert unit_scale_of(callbacks).gauge.pair("first.linear").log2_gamma
    assert [one.step for one in monitor_of(callbacks).snapshots] == [0, 1, 3, 6, 7]


@pytest.mark.parametrize("inference_mode", [True, False])
def test_layers_shared_by_training_and_validation_across_a_graph_break(
    inference_mode: bool,
) -> None:
    class Broken(Evaluated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return self.second(self.norm(hidden))

    assert_same_run(
        Broken,
        entry_options={"val_dataloaders": loader(6)},
        num_sanity_val_steps=1,
        val_check_interval=2,
        inference_mode=inference_mode,
    )


@pytest.mark.parametrize("how", ["monitor", "both"])
def test_tensor_read_by_several_graphs(how: str) -> None:
    # Its gradient is a sum over readers here and there, whose order decides on the last bits.
    class Gathered(Regression):
        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            out = self.forward(x)
            torch._dynamo.graph_break()
            error = F.mse_loss(out, y) + 0.3 * out.pow(2).mean()
            torch._dynamo.graph_break()
            return error + 0.2 * out.abs().mean()

    assert_same_run(lambda: Gathered(adamw), ARRANGEMENTS[how], max_steps=12)


class Deep(Regression):
    """Attention and a convolution, a tensor used twice and writes in place."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.embedding = nn.Linear(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.recurrent = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x[..., None])
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.convolution(hidden.mT).mT
        for _ in range(2):
            hidden = hidden + torch.tanh(self.recurrent(hidden))
        hidden = torch.relu_(hidden) + 0.1
        hidden[:, 0] += 2
        return self.second(self.dropout(hidden.mean(1)))


@ARRANGED
def test_deeper_module(plain: Callable[..., Run], how: str) -> None:
    options: dict[str, Any] = {"make_module": Deep, "gradient_clip_val": 1.0}
    found = run(callbacks=ARRANGEMENTS[how](), **options)
    assert_same_bits(found.compared(), plain("deep", **options).compared())


@pytest.mark.slow_cases
@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "Adagrad", "NAdam", "LBFGS"])
def test_other_optimizers(optimizer: str) -> None:
    def configure(module: nn.Module) -> Any:
        return getattr(torch.optim, optimizer)(module.parameters(), lr=1e-2)

    # L-BFGS calls the step several times a batch.
    assert_same_run(lambda: Regression(configure), max_steps=4)


@pytest.mark.slow
@pytest.mark.parametrize(("captured", "optimizer"), [({}, adamw), ({"remat": "min_cut"}, momentum)])
def test_300_steps(captured: dict[str, Any], optimizer: Any) -> None:
    found, callbacks = assert_same_run(
        lambda: Regression(optimizer),
        lambda: [*ARRANGEMENTS["monitor"](), UnitScaleCallback(**captured)],
        max_steps=300,
        gradient_clip_val=1.0,
    )
    assert len(found.outputs) == 300
    assert len(monitor_of(callbacks).snapshots) == 100


@pytest.mark.parametrize("executor_options", [{"compile": True}])
def test_inductor_is_close(executor_options: dict[str, Any]) -> None:
    plain = run(lambda: Regression(adamw, dropout=0.0), max_steps=6)
    found = run(
        lambda: Regression(adamw, dropout=0.0),
        [UnitScaleCallback(**executor_options)],
        max_steps=6,
    )
    for one, other in zip(plain.outputs, found.outputs, strict=True):
        torch.testing.assert_close(one["loss"], other["loss"], rtol=1e-5, atol=0)
