"""``UnitScaledPrecision`` in ``plugins=`` gives the same run as the callback."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import FSDPPrecision, MixedPrecision

import lightning_unitscale
from examples.gpt import GPT
from examples.text import TextDataModule
from lightning_unitscale import FP8, ScaleMonitor, UnitScaleCallback, UnitScaledPrecision
from tests.callbacks.modules import Regression, adamw
from tests.callbacks.runs import QUIET, loader, run
from tests.helpers import assert_same_bits
from tests.loops.loops import batches, new


def _demo(tmp_path: Path, callbacks: list[Any], **options: Any) -> tuple[Any, Any, Any]:
    """A short run of the demo, its losses and the content of its checkpoint."""
    pl.seed_everything(1, verbose=False)
    model = GPT(width=32, depth=2, num_heads=2, context=32, learning_rate=3e-3, warmup_steps=2)
    data = TextDataModule(context=32, batch_size=4, val_samples=8)
    losses: list[Any] = []
    saved = ModelCheckpoint(tmp_path, "{step}")
    trainer = pl.Trainer(
        callbacks=[*callbacks, _Losses(losses), saved],
        **{**QUIET, "enable_checkpointing": True, "max_steps": 6, "gradient_clip_val": 1.0},
        val_check_interval=3,
        check_val_every_n_epoch=None,
        **options,
    )
    trainer.fit(model, data)
    checkpoint = torch.load(saved.best_model_path, weights_only=False)
    return losses, checkpoint, trainer


class _Losses(pl.Callback):
    def __init__(self, losses: list[Any]) -> None:
        self.losses = losses

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].clone())

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs.clone())


@pytest.mark.filterwarnings("ignore:ScaleMonitor. the Trainer has no logger")
def test_demo_with_plugin_matches_demo_with_callback(tmp_path: Path) -> None:
    plugin = UnitScaledPrecision(FP8(evaluation=True))
    ours = _demo(tmp_path / "plugin", [ScaleMonitor(every_n_steps=3)], plugins=[plugin])
    callback = UnitScaleCallback(precision=FP8(evaluation=True))
    others = _demo(tmp_path / "callback", [callback, ScaleMonitor(every_n_steps=3)])
    plain = _demo(tmp_path / "plain", [])
    losses, checkpoint, trainer = ours
    assert_same_bits(losses, others[0])
    assert not torch.equal(losses[-1], plain[0][-1])
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same_bits(checkpoint[part], others[1][part])
    assert checkpoint.keys() == others[1].keys()
    assert_same_bits(
        checkpoint["callbacks"]["UnitScaleCallback"], others[1]["callbacks"]["UnitScaleCallback"]
    )
    assert plugin.explain() == callback.explain() and "FP8" in plugin.explain()
    assert trainer.precision_plugin is plugin and plugin.callback in trainer.callbacks


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed", "bf16-true", "64-true", "16-mixed"])
@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU")
@pytest.mark.filterwarnings("ignore:.*a CPU has no autocast to FP16")
def test_base_matches_lightning_precision_plugin(base: str) -> None:
    make = lambda: Regression(adamw)  # noqa: E731
    plugin = UnitScaledPrecision(simulate="fp8", base=base)
    ours = run(make, plugins=[plugin])
    others = run(make, [UnitScaleCallback(simulate="fp8")], precision=base)
    assert_same_bits(ours.compared(), others.compared())
    expected = others.trainer.precision_plugin
    assert ours.trainer.precision == others.trainer.precision
    assert isinstance(plugin, UnitScaledPrecision) and isinstance(plugin, type(expected))
    assert type(plugin).__qualname__ == type(expected).__qualname__
    assert len(plugin.callback.gauge) >= 4


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluation_without_fit(entry: str) -> None:
    plugin, callback = UnitScaledPrecision(simulate="fp8"), UnitScaleCallback(simulate="fp8")
    ours = run(_Evaluated, plugins=[plugin], entry=entry)
    assert_same_bits(ours.compared(), run(_Evaluated, [callback], entry=entry).compared())
    assert plugin.explain() == callback.explain()


class _Evaluated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def _trained(trainer: Any, ckpt_path: Any = None) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = Regression(adamw, dropout=0.0)
    trainer.fit(module, loader(16), ckpt_path=ckpt_path)
    return dict(module.state_dict())


@pytest.mark.parametrize("first", ["plugin", "callback"])
def test_plugin_and_callback_resume_each_others_checkpoints(tmp_path: Path, first: str) -> None:
    """No warning about missing callbacks: it would be an error here."""

    def trainer(kind: str, max_steps: int) -> pl.Trainer:
        given: dict[str, Any] = {"callbacks": [UnitScaleCallback(simulate="fp8")]}
        if kind == "plugin":
            given = {"plugins": UnitScaledPrecision(simulate="fp8", base="bf16-mixed")}
        else:
            given["precision"] = "bf16-mixed"
        return pl.Trainer(**QUIET, max_steps=max_steps, **given)

    begun = trainer(first, 4)
    _trained(begun)
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    resumed = {kind: trainer(kind, 8) for kind in ("plugin", "callback")}
    weights = [_trained(one, tmp_path / "begun.ckpt") for one in resumed.values()]
    assert_same_bits(*weights)
    gauges = [
        next(each for each in one.callbacks if isinstance(each, UnitScaleCallback)).gauge
        for one in (begun, *resumed.values())
    ]
    assert gauges[0] and gauges[1] == gauges[2]
    assert all(gauges[1][name] == pair for name, pair in gauges[0].items())


def test_gradient_scaler_keeps_its_checkpoint_key(tmp_path: Path) -> None:
    """The state of ``16-mixed`` has the name under which Lightning finds it without the plugin."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    base = MixedPrecision("16-mixed", "cpu", scaler)
    plugin = UnitScaledPrecision(simulate="fp8", base=base)
    ours = pl.Trainer(**QUIET, max_steps=3, plugins=[plugin])
    weights = _trained(ours)
    ours.save_checkpoint(tmp_path / "scaled.ckpt")
    assert ours.scaler is scaler and ours.precision == "16-mixed"
    saved = torch.load(tmp_path / "scaled.ckpt", weights_only=False)
    assert saved["MixedPrecision"]["scale"] == scaler.get_scale()
    again = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    others = pl.Trainer(
        **QUIET, max_steps=3, plugins=[again], callbacks=[UnitScaleCallback(simulate="fp8")]
    )
    assert_same_bits(weights, _trained(others))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"base": "fp8"}, r"base='fp8': not a precision for the rest of the step. Expected one of"),
        ({"base": True}, r"base=True: .* Pass base='bf16-mixed'"),
        ({"precision": "fp16"}, r"precision='fp16': unknown precision. Expected 'fp8', FP8"),
        ({"precision": "fp8", "simulate": "fp8"}, r"precision='fp8': together with simulate"),
        ({"recalibrate": 0}, r"recalibrate=0: no such interval"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        UnitScaledPrecision(**options)
    with pytest.raises(ValueError, match="base=UnitScaledPrecision"):
        UnitScaledPrecision(base=UnitScaledPrecision())


@pytest.mark.parametrize("where", ["trainer", "module", "fabric"])
def test_plugin_with_callback_is_an_error(where: str) -> None:
    plugin, callback = UnitScaledPrecision("fp8"), UnitScaleCallback(simulate="E3M2FN")

    class Brings(Regression):
        def configure_callbacks(self) -> Any:
            return [callback] if where == "module" else []

    text = r"UnitScaledPrecision\('fp8'\) together with .*UnitScaleCallback\(simulate='E3M2FN'\)"
    given: dict[str, Any] = {"accelerator": "cpu", "plugins": [plugin], "devices": 1}
    if where != "module":
        given["callbacks"] = [callback]
    with pytest.raises(MisconfigurationException, match=text):
        if where == "fabric":
            Fabric(**given).setup(torch.nn.Linear(2, 2))
        else:
            pl.Trainer(**{**QUIET, **given}, max_steps=1).fit(Brings(), loader())
    with pytest.raises(ValueError, match=r"plugins=UnitScaledPrecision\('fp8'\)"):
        pl.Trainer(precision="bf16-mixed", **{**given, "callbacks": []})


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_with_two_models(base: str) -> None:
    """Two models in turn, as with the callback."""

    def train(**given: Any) -> list[Any]:
        fabric = Fabric(accelerator="cpu", devices=1, **given)
        fabric.launch()
        pairs = [fabric.setup(*new(seed)) for seed in (1, 2)]
        for x, y in batches():
            for model, optimizer in pairs:
                fabric.backward(F.cross_entropy(model(x).float(), y))
                optimizer.step()
                optimizer.zero_grad()
        return [model.state_dict() for model, _ in pairs]

    plugin = UnitScaledPrecision(simulate="fp8", base=base)
    ours = train(plugins=[plugin])
    others = train(precision=base, callbacks=[UnitScaleCallback(simulate="fp8")])
    assert_same_bits(ours, others)
    plain = train(precision=base)
    assert any(not torch.equal(ours[0][name], plain[0][name]) for name in plain[0])
    assert len(plugin.callback.attachments) == 2 and "rounded" in plugin.explain()
    for attachment in plugin.callback.attachments:
        attachment.detach()


def test_fabric_allows_plain_loss_backward() -> None:
    """With 32-true, a loop may call ``loss.backward()``, as it may without the plugin."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[UnitScaledPrecision()])
    model, optimizer = fabric.setup(*new(1))
    x, y = next(iter(batches()))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    (attachment,) = fabric.strategy.precision.callback.attachments
    assert attachment.step_index == 1
    attachment.detach()


def test_plugin_from_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])
    init_args = {"precision": {"class_path": "lightning_unitscale.FP8", "init_args": {}}}
    init_args["base"] = "bf16-mixed"  # type: ignore[assignment]
    plugin = {"class_path": "lightning_unitscale.UnitScaledPrecision", "init_args": init_args}
    trainer = {"plugins": [plugin], "accelerator": "cpu", "devices": 1, "logger": False}
    model = {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}
    given = {"model": model, "trainer": trainer, "seed_everything": 1}
    cli = LightningCLI(args=given, run=False)
    used = cli.trainer.precision_plugin
    assert repr(used).startswith("UnitScaledPrecision(FP8(") and used.precision == "bf16-mixed"
    assert isinstance(used, MixedPrecision)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copy_works_in_another_trainer(copied: Any) -> None:
    plugin = copied(UnitScaledPrecision(simulate="fp8", base="bf16-mixed"))
    assert isinstance(plugin, MixedPrecision) and "simulate='fp8'" in repr(plugin)
    again = run(Regression, plugins=[plugin])
    others = run(Regression, plugins=[UnitScaledPrecision(simulate="fp8", base="bf16-mixed")])
    assert_same_bits(again.compared(), others.compared())
    assert len(plugin.callback.gauge) >= 4


@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_two_runs_of_a_trainer_and_other_callbacks(tmp_path: Path) -> None:
    plugin = UnitScaledPrecision(simulate="fp8", base="bf16-mixed")
    others = [ThroughputMonitor(lambda batch: len(batch[0]))]
    options = {**QUIET, "logger": pl.loggers.CSVLogger(str(tmp_path)), "plugins": [plugin]}
    trainer = pl.Trainer(max_steps=4, callbacks=others, **options)
    module = Regression()
    trainer.fit(module, loader())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(module, loader())
    assert trainer.callbacks.count(plugin.callback) == 1
    assert trainer.global_step == 8


def test_lightning_plugin_as_base() -> None:
    plugin = UnitScaledPrecision("fp8", base=FSDPPrecision("bf16-mixed"))
    assert isinstance(plugin, FSDPPrecision) and plugin.precision == "bf16-mixed"
    assert plugin.mixed_precision_config.reduce_dtype == torch.bfloat16  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        # Made before Lightning is imported, and in each package alone or beside the other.
        "p = make(); import pytorch_lightning as pl",
        "import lightning.pytorch; import pytorch_lightning as pl; p = make(base='bf16-mixed')",
        "import pytorch_lightning as pl; p = make(base='bf16-mixed'); import lightning.pytorch",
        "import lightning.pytorch as pl; p = make(base='bf16-mixed'); import pytorch_lightning",
    ],
)
def test_plugin_works_with_lightning_and_pytorch_lightning(code: str, tmp_path: Path) -> None:
    script = f"""
from lightning_unitscale import UnitScaledPrecision
make = lambda **k: UnitScaledPrecision(simulate="fp8", **k)
{code}
import logging, warnings
warnings.simplefilter("ignore")
from importlib import import_module
Boring = import_module(pl.__name__ + ".demos.boring_classes").BoringModel
Clip = []
class Module(Boring):
    def configure_gradient_clipping(self, *args, **kwargs):
        Clip.append(1)
        super().configure_gradient_clipping(*args, **kwargs)
trainer = pl.Trainer(accelerator="cpu", plugins=[p], max_steps=2, logger=False, barebones=False,
    enable_checkpointing=False, enable_progress_bar=False, gradient_clip_val=1.0)
trainer.fit(Module())
assert len(Clip) == 2, Clip
base = getattr(import_module(pl.__name__ + ".plugins.precision"),
    "MixedPrecision" if p.precision == "bf16-mixed" else "Precision")
assert isinstance(p, base) and type(p).optimizer_step is base.optimizer_step
assert "rounded" in p.explain(), p.explain()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(lightning_unitscale.__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
