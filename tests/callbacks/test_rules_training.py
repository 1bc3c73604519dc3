"""Training by rules: gradients at RMS 1 at the step, and the user's settings keep their meaning."""

from __future__ import annotations

import statistics
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from torch import Tensor, nn

from lightning_unitscale import ScaleMonitor, transforms
from tests.callbacks.rule_runs import (
    METHODS,
    Classifier,
    Gradients,
    fit,
    loader,
    plan_of,
    rms,
    trainer_with,
    unit_scale,
    weights,
)
from tests.callbacks.runs import MemoryLogger, monitor_of
from tests.callbacks.stored import half
from tests.helpers import assert_same_bits


def made(*args: Any, **kwargs: Any) -> Classifier:
    pl.seed_everything(2, verbose=False)
    return Classifier(*args, **kwargs)


def still(module: nn.Module) -> Any:
    """Nothing moves, so that every batch sees the same model."""
    return torch.optim.SGD(module.parameters(), lr=0.0)


def fast(module: nn.Module) -> Any:
    """u-muP's rates are near 1, and BF16 weights near 1 do not see steps below 1/256."""
    return torch.optim.AdamW(module.parameters(), lr=0.1)


def of_weights(row: dict[str, float]) -> list[float]:
    return [one for name, one in row.items() if name.endswith("weight") and "norm" not in name]


def loss_of(found: Any) -> float:
    return float(found["loss"])


@pytest.mark.slow_cases
@pytest.mark.parametrize("accumulated", [1, 4, 7])
def test_gradients_are_at_rms_1_at_the_step(accumulated: int) -> None:
    seen = Gradients()
    options: dict[str, Any]
    options = {"accumulate_grad_batches": accumulated, "max_steps": 4, "data": loader(28 * 16, 16)}
    fit(made(still), unit_scale("u-mup"), seen, **options)
    for row in seen.rms:
        assert 0.5 < statistics.geometric_mean(of_weights(row)) < 2
    found = [one for row in seen.rms for one in of_weights(row)]
    # Gradients of different batches are not quite independent at the start.
    assert sum(0.5 < one < 2 for one in found) > 0.6 * len(found)
    assert all(0.3 < one < 3.3 for one in found)


@pytest.mark.slow
def test_accumulation_schedule_keeps_gradients_at_rms_1() -> None:
    seen = Gradients()
    schedule = GradientAccumulationScheduler({0: 1, 1: 16})
    options = {"max_epochs": 2, "max_steps": -1, "data": loader(128, 4)}
    fit(made(still), unit_scale("u-mup"), seen, schedule, **options)
    assert len(seen.rms) == 34
    for row in (seen.rms[0], seen.rms[31], seen.rms[32], seen.rms[33]):
        assert 0.5 < statistics.geometric_mean(of_weights(row)) < 2


def precisions() -> list[Any]:
    return [
        pytest.param({"plugins": half}, id="16-mixed"),
        *(pytest.param({"precision": one}, id=one) for one in ("bf16-mixed", "bf16-true")),
        pytest.param({"precision": "64-true"}, id="64-true"),
    ]


class Watching(Classifier):
    """Notes loss scales, and casts its input to its own type."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scales: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(1.0 if scaler is None else scaler.get_scale())


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", precisions())
def test_every_precision_trains_by_rules(options: dict[str, Any]) -> None:
    pl.seed_everything(2, verbose=False)
    module, seen = Watching(fast), Gradients()
    if "plugins" in options:
        options = {"plugins": options["plugins"]()}
    _, outputs = fit(module, unit_scale("u-mup"), seen, max_steps=24, **options)
    assert set(module.scales) == {1.0}
    for name in ("first.weight", "blocks.1.4.weight", "readout.weight"):
        assert rms(seen.weights[0][name]) == pytest.approx(1, rel=0.02)
    assert 0.4 < statistics.geometric_mean(of_weights(seen.rms[0])) < 2.5
    losses = [loss_of(one) for one in outputs]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


class Clipped(Classifier):
    """Notes the norm of all gradients before and after they are clipped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.before = self._gradients()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.after = self._gradients()

    def _gradients(self) -> Tensor:
        grads = [one.grad.flatten() for one in self.parameters() if one.grad is not None]
        return torch.cat(grads).clone()


@pytest.mark.slow_cases
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("threshold", [4.0, 0.02])
def test_clipping_changes_only_outliers(algorithm: str, threshold: float) -> None:
    module = Clipped()
    options = {"gradient_clip_val": threshold, "gradient_clip_algorithm": algorithm}
    trainer, _ = fit(module, unit_scale("u-mup"), max_steps=1, **options)
    assert 0.3 < rms(module.before) < 3
    number = module.before.numel()
    if threshold == 4.0:
        assert_same_bits(module.after, module.before)
    elif algorithm == "norm":
        assert rms(module.after) == pytest.approx(threshold, rel=1e-3)
    else:
        expected = module.before.clamp(-threshold * number**0.5, threshold * number**0.5)
        assert_same_bits(module.after, expected)
        assert not torch.equal(module.after, module.before)
    assert "clip_gradients" not in vars(trainer.precision_plugin)


def one_cycle(module: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in module.parameters() if one.dim() > 1], "lr": 2e-2},
            {"params": [one for one in module.parameters() if one.dim() == 1]},
        ],
        lr=1e-2,
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=20)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", METHODS)
def test_learning_rate_monitor_and_scheduler_see_user_rates(method: str) -> None:
    found = []
    for callbacks in ([], [unit_scale(method)]):
        logger = MemoryLogger()
        trainer, _ = fit(made(one_cycle), *callbacks, LearningRateMonitor("step"), logger=logger)
        rates = [row for row in logger.rows if any("lr-" in name for name in row[1])]
        groups = [{**group, "params": 0} for group in trainer.optimizers[0].param_groups]
        found.append((rates, groups, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()))
    assert found[0] == found[1]
    assert len(found[0][0]) == 6


def muon(module: nn.Module) -> Any:
    weights_only = [one for one in module.parameters() if one.dim() == 2]
    return torch.optim.Muon(weights_only, lr=0.02)


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.5)


OPTIMIZERS = [fast, sgd, *([muon] if hasattr(torch.optim, "Muon") else [])]


@pytest.mark.slow_cases
@pytest.mark.parametrize("configure", OPTIMIZERS)
def test_every_optimizer_learns(configure: Any) -> None:
    method = "unit-scaling" if configure is muon else "u-mup"
    module = made(configure)
    _, outputs = fit(module, unit_scale(method), max_steps=32)
    losses = [loss_of(one) for one in outputs]
    assert sum(losses[-4:]) < 0.85 * sum(losses[:4])
    assert all(0.3 < rms(one) < 3 for name, one in weights(module).items() if "4.weight" in name)


def test_match_keeps_relative_updates() -> None:
    """The first step of Adam moves each weight by lr, over the RMS that it had."""
    plain, scaled, lr = Gradients(), Gradients(), 1e-2
    configure = lambda module: torch.optim.Adam(module.parameters(), lr=lr, eps=1e-30)  # noqa: E731
    fit(made(configure), plain, max_steps=2)
    module = made(configure)
    fit(module, unit_scale("unit-scaling"), scaled, max_steps=2)
    for name, one in plan_of(module).parameters.items():
        moved = rms(plain.weights[1][name] - plain.weights[0][name])
        step = rms(scaled.weights[1][name] - scaled.weights[0][name])
        expected = moved / (one.info.output_scale if one.action == "zeroed" else one.info.sigma)
        assert step == pytest.approx(expected, rel=1e-3), name


@pytest.mark.slow_cases
@pytest.mark.parametrize("simulate", ["fp8", ("E4M3FN", "E3M2FN")])
def test_simulated_format_trains_by_rules(simulate: Any) -> None:
    losses = []
    for options in ({}, {"simulate": simulate}):
        _, outputs = fit(made(), unit_scale("u-mup", **options), max_steps=24, val=loader(16))
        losses.append([loss_of(one) for one in outputs if isinstance(one, dict)])
    assert losses[0] != losses[1]
    assert losses[1][-1] < 1.15 * losses[0][-1]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=0.05)


class Small(Classifier):
    """A step of which little is to be compiled."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.first(batch[0])
        return F.cross_entropy(self.readout(x + self.blocks[0][0](x).tanh()), batch[1])


@pytest.mark.slow
def test_inductor_matches_eager(torch_kernels: None) -> None:
    losses = []
    for compile_it in (False, True):
        pl.seed_everything(2, verbose=False)
        callback = unit_scale("u-mup", compile=compile_it)
        _, outputs = fit(Small(fast), callback, max_steps=6)
        losses.append([loss_of(one) for one in outputs])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] != losses[0][0]


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_first", [False, True])
def test_scale_monitor_shows_rms_1(is_first: bool) -> None:
    callbacks = [unit_scale("u-mup"), ScaleMonitor(every_n_steps=1)][:: 1 if is_first else -1]
    fit(made(), *callbacks, max_steps=1, logger=MemoryLogger())
    (snapshot,) = monitor_of(callbacks).snapshots
    forward = dict(zip(snapshot.names, snapshot.log2_rms("forward"), strict=True))
    linears = [name for name in snapshot.names if name.endswith("linear")]
    assert len(linears) == 6
    for name in linears:
        # A readout is below 1 before training: by the root of its width.
        expected = -2.0 if name.startswith("readout") else 0.0
        assert forward[name] == pytest.approx(expected, abs=0.7), name


def test_explain_lists_operations_and_parameters() -> None:
    callback, module = unit_scale("u-mup"), made()
    assert "No step has run yet" in callback.explain()
    fit(module, callback, max_steps=1)
    text = callback.explain()
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    changed = {name: one for name, one in plan_of(module).items() if one.changes}
    assert len(changed) == 8
    for name, one in changed.items():
        assert one.origin in rows[name]
    for name, one in plan_of(module).parameters.items():
        assert one.action in rows[name] and one.info.role.value in rows[name]
    assert "Parameters: 6 scaled, 6 zeroed, 6 left." in text


class Language(pl.LightningModule):
    """One causal attention block over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 16), nn.Embedding(16, 16)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 11)
        self.mix, self.back = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = (
            one.unflatten(-1, (2, 8)).transpose(1, 2)
            for one in self.mix(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.back(mixed.transpose(1, 2).flatten(2))
        return self.out(x)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), on_step=False, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.slow
def test_evaluation_matches_training_at_every_shape() -> None:
    pl.seed_everything(4, verbose=False)
    tokens = torch.randint(11, (20, 13))
    module, callback = Language(), unit_scale("u-mup")
    data = torch.utils.data.DataLoader(tokens, batch_size=8)
    trainer, _ = fit(module, callback, data=data, val=data, max_epochs=2, max_steps=-1)
    validated = float(trainer.callback_metrics["val"])
    whole = torch.cat(trainer.predict(module, torch.utils.data.DataLoader(tokens, 20)))
    expected = F.cross_entropy(whole[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert validated == pytest.approx(float(expected), rel=1e-5)
    # The output so far does not depend on later tokens, nor on the rest of the batch.
    for length in (5, 9):
        short = torch.utils.data.DataLoader(tokens[:, :length].clone(), 3)
        found = torch.cat(trainer_with(unit_scale("u-mup")).predict(module, short))
        torch.testing.assert_close(found, whole[:, :length], rtol=1e-4, atol=1e-5)


class Noisy(Classifier):
    """Adds to its input in training only, so that its later sums have other names."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] + 0.0 * torch.randn_like(batch[0])
        loss = F.cross_entropy(self.forward(x), batch[1])
        return loss if batch_idx else loss + 0 * x.sum()


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", [Classifier, Noisy])
def test_validation_loss_matches_training_loss(kind: Any) -> None:
    pl.seed_everything(4, verbose=False)
    data = loader(20, 8)
    options = {"max_epochs": 1, "max_steps": -1, "data": data, "val": data}
    _, outputs = fit(kind(still), unit_scale("u-mup"), **options)
    trained = [loss_of(one) for one in outputs if isinstance(one, dict)]
    validated = [float(one) for one in outputs if not isinstance(one, dict)]
    assert len(trained) == len(validated) == 3
    assert validated == pytest.approx(trained, rel=1e-5)


class Helped(Classifier):
    """Its training step uses another method for a loss without gradients."""

    def helped(self, batch: Any) -> Any:
        return F.cross_entropy(self.forward(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            reference = self.helped(batch)
        if batch_idx == 0:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.forward(batch[0]), batch[1]) - 0.5 * reference


class HelpedByAStep(Helped):
    """That method is a step, also in predictions."""

    def helped(self, batch: Any) -> Any:
        return self.validation_step(batch, 0)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.forward(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step(batch, batch_idx)


class WrapsAStep(pl.Callback):
    """A user's own wrapper around a step that is scaled already."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        scaled = pl_module.validation_step
        pl_module.validation_step = lambda *args: scaled(*args)  # type: ignore[method-assign]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("simulate", "wraps"), [(None, []), ("fp8", []), ("fp8", [WrapsAStep()])])
def test_step_that_calls_other_step(simulate: str | None, wraps: list[pl.Callback]) -> None:
    trained, covered, batch = [], [], next(iter(loader(8)))
    for kind in (Helped, HelpedByAStep):
        torch._dynamo.reset()
        pl.seed_everything(2, verbose=False)
        module, scaling = kind(), unit_scale("u-mup", simulate=simulate)
        trainer, found = fit(module, scaling, *wraps, max_steps=1)
        trained.append(([loss_of(one) for one in found], weights(module)))
        covered.append([count.module for count in scaling.coverage.counts])
    assert_same_bits(trained[0], trained[1])
    if wraps:
        return
    assert covered[0] == covered[1]
    predicted: Any = trainer.predict(module, loader(8))
    deployed = transforms.deploy(module.eval(), batch[0])
    expected = F.cross_entropy(deployed(batch[0]), batch[1]).detach()
    assert float(predicted[0]) == pytest.approx(float(expected), rel=1e-6 if not simulate else 0.1)
