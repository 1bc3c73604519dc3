"""Weights are set to unit scale exactly once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.callbacks import rule_scaling as rule_scaling
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.unit_weights import set_to_unit_scale
from tests.callbacks.rule_runs import (
    METHODS,
    Classifier,
    Gradients,
    adamw,
    fit,
    loader,
    plan_of,
    rms,
    trainer_with,
    unit_scale,
    weights,
)
from tests.helpers import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # And of the mark of weights by rules, where they are loaded with strict=False.
    pytest.mark.filterwarnings("ignore:Found keys that are not in the model state dict"),
]


def seeded(make: Any = Classifier) -> Any:
    pl.seed_everything(3, verbose=False)
    return make()


def scheduled(module: nn.Module) -> Any:
    optimizer = adamw(module)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def assert_unit_scale(found: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Each weight is divided by its RMS, to 1 %; biases are 0; norms are unchanged."""
    for name, one in found.items():
        if "norm" in name or ".0." in name.removeprefix("blocks.0").removeprefix("blocks.1"):
            assert torch.equal(one, before[name]), name
        elif name.endswith("bias"):
            assert not one.any(), name
        else:
            assert rms(one) == pytest.approx(1, rel=0.012), name
            torch.testing.assert_close(one / rms(one), before[name] / rms(before[name]))


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_scaled_before_first_step(method: str) -> None:
    module, seen = seeded(), Gradients()
    before = weights(module)
    fit(module, unit_scale(method), seen)
    assert_unit_scale(seen.weights[0], before)
    assert not torch.equal(seen.weights[1]["first.weight"], seen.weights[0]["first.weight"])
    assert all(0.4 < rms(one) < 2 for name, one in weights(module).items() if "weight" in name)


def test_init_weights_false_keeps_weights() -> None:
    module, seen = seeded(), Gradients()
    before = weights(module)
    fit(module, unit_scale("u-mup", init_weights=False), seen)
    assert_same_bits(seen.weights[0], before)


@pytest.mark.slow
def test_model_built_in_configure_model() -> None:
    class Late(Classifier):
        def __init__(self) -> None:
            super().__init__()
            made = {name: self._modules.pop(name) for name in list(self._modules)}
            self.__dict__["made"] = made

        def configure_model(self) -> None:
            for name, one in self.__dict__.pop("made", {}).items():
                setattr(self, name, one)

    late, seen = seeded(Late), Gradients()
    fit(late, unit_scale("u-mup"), seen)
    whole, expected = seeded(), Gradients()
    fit(whole, unit_scale("u-mup"), expected)
    assert_same_bits(seen.weights, expected.weights)


class WithoutLoss(Classifier):
    """Validates by a metric, from which no readout can be found."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("hits", (self.forward(batch[0]).argmax(-1) == batch[1]).float().mean())


@pytest.fixture(scope="module")
def expected() -> Gradients:
    """The state that a fit sees without anything before it."""
    seen = Gradients()
    fit(seeded(), unit_scale("u-mup"), seen)
    return seen


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("sanity check", Classifier),
        ("sanity check", WithoutLoss),
        ("validate", WithoutLoss),
        ("predict", Classifier),
    ],
)
def test_evaluation_before_fit_runs_plain_model(
    before: str, kind: Any, expected: Gradients
) -> None:
    """It changes nothing, and the fit is the one that would have been without it."""
    module, seen, callback = seeded(kind), Gradients(), unit_scale("u-mup")
    start = weights(module)
    if before == "predict":
        plain = trainer_with().predict(module, loader(16))
        assert_same_bits(trainer_with(callback).predict(module, loader(16)), plain)
    elif before == "validate":
        (plain,) = trainer_with().validate(module, loader(16), verbose=False)
        (found,) = trainer_with(callback).validate(module, loader(16), verbose=False)
        assert found == plain
    assert_same_bits(weights(module), start)
    checks = 2 if before == "sanity check" else 0
    pl.seed_everything(3, verbose=False)
    options = {"val": loader(16), "num_sanity_val_steps": checks}
    fit(module, callback, seen, **options)
    assert_same_bits(seen.weights, expected.weights)
    assert_same_bits(seen.rms, expected.rms)
    assert plan_of(module)["validation_step:readout.linear"].output == 1 / 16


class Saving(pl.Callback):
    """Notes the weights when batches start and end."""

    def __init__(self) -> None:
        self.starts: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.starts.append(weights(pl_module))


@pytest.mark.slow_cases
@pytest.mark.parametrize("fresh", ["nothing", "callback", "copy"])
def test_second_fit_does_not_rescale_weights(fresh: str) -> None:
    module, callback = seeded(), unit_scale("unit-scaling")
    trainer, _ = fit(module, callback, max_epochs=1, max_steps=-1)
    after, sigmas = weights(module), _sigmas(module)
    seen = Saving()
    if fresh == "nothing":
        trainer.fit_loop.max_epochs = 2
        trainer.callbacks.append(seen)  # type: ignore[attr-defined]
        trainer.fit(module, loader(), loader(8))
    else:
        if fresh == "callback":
            callback = unit_scale("unit-scaling")
        if fresh == "copy":
            module, callback = copy.deepcopy(module), unit_scale("unit-scaling")
        fit(module, callback, seen, Gradients())
    assert_same_bits(seen.starts[0], after)
    assert _sigmas(module) == sigmas
    assert not torch.equal(seen.starts[1]["first.weight"], after["first.weight"])
    assert all(one != 1 for name, one in sigmas.items() if name.endswith("t.weight"))


def _sigmas(module: Any) -> dict[str, float]:
    return {name: one.info.sigma for name, one in plan_of(module).parameters.items()}


@pytest.mark.slow
def test_second_fit_matches_longer_fit() -> None:
    """Rates, factors and gradients of a second fit are those of one that went on."""
    losses = []
    for again in (False, True):
        module = seeded(lambda: Classifier(lambda m: torch.optim.SGD(m.parameters(), lr=0.05)))
        callback = unit_scale("u-mup")
        if again:
            _, first = fit(module, callback, max_epochs=1, max_steps=-1)
            _, second = fit(module, unit_scale("u-mup"), max_epochs=1, max_steps=-1)
            losses.append([*first, *second])
        else:
            losses.append(fit(module, callback, max_epochs=2, max_steps=-1)[1])
    for one, other in zip(*losses, strict=True):
        # A new callback measures units of gradients anew, on trained weights.
        torch.testing.assert_close(one["loss"], other["loss"], rtol=0.02, atol=0)


@pytest.mark.slow
def test_second_module_is_scaled_too() -> None:
    callback = unit_scale("u-mup")
    fit(seeded(), callback)
    module, seen = Classifier(), Gradients()
    before = weights(module)
    fit(module, callback, seen)
    assert_unit_scale(seen.weights[0], before)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "fresh"), [("unit-scaling", False), ("u-mup", True)])
def test_evaluation_after_fit_keeps_weights_and_loss(
    method: str, fresh: bool, tmp_path: Path
) -> None:
    module, callback = seeded(), unit_scale(method)
    trainer, _ = fit(module, callback, val=loader(12), max_epochs=2, max_steps=-1)
    loss = float(trainer.callback_metrics["val_loss"])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    after = weights(module)
    if fresh:
        trainer = trainer_with(unit_scale(method))
    for ckpt_path in (None, tmp_path / "a.ckpt"):
        options = {"ckpt_path": ckpt_path, "verbose": False}
        if ckpt_path is None:
            (found,) = trainer.validate(module, loader(12), **options)
            assert found["val_loss"] == pytest.approx(loss, rel=1e-6)
        (found,) = trainer.test(module, loader(12), **options)
        assert found["test_loss"] == pytest.approx(loss, rel=1e-6)
        assert_same_bits(weights(module), after)
    outputs = trainer.predict(module, loader(12))
    again = torch.nn.functional.cross_entropy(
        torch.cat(outputs), torch.stack([row[1] for row in loader(12).dataset])
    )
    assert float(again) == pytest.approx(loss, rel=1e-5)


def resumable(folder: Path, max_epochs: int, ckpt_path: Any = None, **options: Any) -> Any:
    pl.seed_everything(5, verbose=False)
    module, callback = Classifier(scheduled), unit_scale(options.pop("method", "u-mup"))
    saved = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    trainer, outputs = fit(
        module,
        callback,
        saved,
        val=loader(12),
        ckpt_path=ckpt_path,
        max_epochs=max_epochs,
        max_steps=-1,
        enable_checkpointing=True,
        gradient_clip_val=0.9,
        **options,
    )
    states = [one.state_dict() for one in trainer.optimizers]
    loss = float(trainer.callback_metrics["val_loss"])
    return {"weights": weights(module), "states": states, "loss": loss}, outputs, callback


@pytest.mark.slow_cases
@pytest.mark.parametrize(("method", "checks"), [("unit-scaling", 0), ("u-mup", 1)])
def test_resumed_run_is_bit_identical(method: str, checks: int, tmp_path: Path) -> None:
    options = {"method": method, "num_sanity_val_steps": checks}
    whole, losses, callback = resumable(tmp_path / "whole", 2, **options)
    resumed, others, again = resumable(
        tmp_path / "half", 2, tmp_path / "whole" / "epoch=0.ckpt", **options
    )
    assert_same_bits(resumed, whole)
    assert_same_bits(others[checks:], losses[-len(others) + checks :])
    assert 0 < len(others) < len(losses)
    if checks:  # the sanity check is of the checkpoint's model: its last batch before was this one
        assert_same_bits(others[0], losses[-len(others) + checks - 2])
    assert again.gauge.state() == callback.gauge.state()
    assert again.state_dict()["rules"] == callback.state_dict()["rules"]


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The state after two epochs, and the folder with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("epochs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return resumable(folder, 2)[0], folder


@pytest.mark.slow
def test_resuming_with_same_module_and_callback(two_epochs: Any) -> None:
    whole, folder = two_epochs
    pl.seed_everything(5, verbose=False)
    module, callback = Classifier(scheduled), unit_scale("u-mup")
    for max_epochs, ckpt_path in ((1, None), (2, folder / "epoch=0.ckpt")):
        trainer, _ = fit(
            module,
            callback,
            max_epochs=max_epochs,
            max_steps=-1,
            ckpt_path=ckpt_path,
            gradient_clip_val=0.9,
        )
    assert_same_bits(weights(module), whole["weights"])
    assert_same_bits([one.state_dict() for one in trainer.optimizers], whole["states"])


@pytest.mark.slow
def test_checkpoint_has_plain_types_and_one_extra_key(two_epochs: Any) -> None:
    found = torch.load(two_epochs[1] / "epoch=0.ckpt", weights_only=True)
    (mark,) = set(found["state_dict"]) - set(Classifier().state_dict())
    assert "UnitScaleCallback('u-mup')" in mark and found["state_dict"][mark].numel() == 0
    assert len(found["state_dict"]) == len(Classifier().state_dict()) + 1
    rules = found["callbacks"]["UnitScaleCallback"]["rules"]
    of_gradients = {"log2_gradients", "num_accumulated", "measures_late"}
    assert set(rules) == {"method", "plan", *of_gradients}


@pytest.mark.slow_cases
@pytest.mark.parametrize("entry", ["validate", "fit"])
@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_fit_and_validate_after_load_from_checkpoint(
    entry: str, with_checkpoint: bool, two_epochs: Any
) -> None:
    whole, folder = two_epochs
    path = folder / "epoch=1.ckpt"
    module = Classifier.load_from_checkpoint(path, configure=scheduled, strict=False)
    assert_same_bits(weights(module), whole["weights"])
    ckpt_path = path if with_checkpoint else None
    if entry == "fit":
        seen = Saving()
        options = {"max_epochs": 3, "max_steps": -1, "ckpt_path": ckpt_path}
        fit(module, unit_scale("u-mup"), seen, **options)
        assert_same_bits(seen.starts[0], whole["weights"])
        return
    trainer = trainer_with(unit_scale("u-mup"))
    (found,) = trainer.validate(module, loader(12), ckpt_path=ckpt_path, verbose=False)
    assert found["val_loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert_same_bits(weights(module), whole["weights"])


@pytest.mark.slow
def test_weights_are_scaled_once_over_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fit, resume, a second fit, a test, load_from_checkpoint, and all of it again."""
    scaled: list[str] = []

    def counting(module: Any, plans: Any) -> Any:
        scaled.append(type(module).__name__)
        return set_to_unit_scale(module, plans)

    monkeypatch.setattr(rule_scaling, "set_to_unit_scale", counting)

    def unchanged(module: Any, run: Any) -> None:
        before, seen = weights(module), Saving()
        run(seen)
        assert_same_bits(seen.starts[0] if seen.starts else weights(module), before)

    def check(module: Any) -> None:
        for entry in ("validate", "test", "predict"):
            trainer = trainer_with(unit_scale("u-mup"))
            unchanged(module, lambda _: getattr(trainer, entry)(module, loader(8)))  # noqa: B023

    module, path = seeded(), tmp_path / "a.ckpt"
    check(module)  # before it is trained it is evaluated as it is
    trainer, _ = fit(module, unit_scale("u-mup"), max_epochs=1, max_steps=-1)
    trainer.save_checkpoint(path)
    check(module)
    longer = {"max_epochs": 2, "max_steps": -1}
    unchanged(module, lambda seen: fit(module, unit_scale("u-mup"), seen, **longer))
    fresh = Classifier()
    fit(fresh, unit_scale("u-mup"), ckpt_path=path, **longer)
    check(fresh)
    loaded = Classifier.load_from_checkpoint(path, strict=False)
    check(loaded)
    unchanged(loaded, lambda seen: fit(loaded, unit_scale("u-mup"), seen, **longer))
    assert scaled == ["Classifier"]
    fit(Classifier(), unit_scale("u-mup"), max_steps=1)
    assert len(scaled) == 2  # another one, and this test can count


@pytest.mark.slow
def test_match_with_weights_of_other_run_warns(tmp_path: Path) -> None:
    trainer, _ = fit(seeded(), unit_scale("unit-scaling"), max_epochs=1, max_steps=-1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = Classifier.load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
    with pytest.warns(UserWarning, match=r"lr_scaling='match': .* Pass ckpt_path"):
        fit(module, unit_scale("unit-scaling"), max_steps=1)
    longer = {"max_epochs": 2, "max_steps": -1, "ckpt_path": tmp_path / "a.ckpt"}
    fit(Classifier(), unit_scale("unit-scaling"), **longer)


def test_weights_of_plain_checkpoint_are_scaled_once(tmp_path: Path) -> None:
    plain = seeded()
    fit(plain, max_epochs=1, max_steps=-1)[0].save_checkpoint(tmp_path / "plain.ckpt")
    seen = Gradients()
    with pytest.warns(UserWarning, match=r"^method='u-mup': .* trained without UnitScaleCallback"):
        fit(Classifier(), unit_scale("u-mup"), seen, ckpt_path=tmp_path / "plain.ckpt")
    for name in ("first.weight", "readout.weight", "blocks.1.4.weight"):
        expected = weights(plain)[name]
        torch.testing.assert_close(
            seen.weights[0][name] / rms(seen.weights[0][name]), expected / rms(expected)
        )
        assert rms(seen.weights[0][name]) == pytest.approx(1, rel=0.012)


@pytest.mark.slow
def test_module_keeps_only_plan_after_fit() -> None:
    module = seeded()
    kept = {"_unit_scale_plan", "_unit_scale_parameters", "on_save_checkpoint"}
    before = set(vars(module)) | kept
    fit(module, UnitScaleCallback("u-mup"))
    fit(plain := seeded())
    assert set(vars(module)) - before == set(vars(plain)) - before
    assert steps_of(module) is None


def test_validation_plan_does_not_rewrite_training_graphs() -> None:
    rewrites: list[list[int]] = []

    class Counts(pl.Callback):
        def count(self, module: pl.LightningModule) -> None:
            graphs = steps_of(module).steps["training_step"].graphs  # type: ignore[union-attr]
            rewrites.append([graph.num_rewrites for graph in graphs])

        def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.count(pl_module)

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.count(pl_module)

    trainer = trainer_with(
        UnitScaleCallback("u-mup"), Counts(), max_epochs=2, num_sanity_val_steps=0
    )
    trainer.fit(Classifier(), loader(), loader())
    assert rewrites and rewrites[0] and all(one == rewrites[0] for one in rewrites)
