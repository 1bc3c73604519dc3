"""A checkpoint is loaded only by the method that trained its weights."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_unitscale import Rules, UnitScaleCallback
from tests.callbacks.rule_runs import Classifier, fit, loader, trainer_with, unit_scale, weights
from tests.helpers import assert_same_bits

# Lightning's warning about other callbacks when the checkpoint was written.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a short run by each method, with and without the optimizer's state."""
    folder, paths = tmp_path_factory.mktemp("checkpoints"), {}
    for method in ("lossless", "unit-scaling", "u-mup"):
        pl.seed_everything(1, verbose=False)
        paths[f"{method}, weights"] = folder / method / "epoch=0.ckpt"
        saved = ModelCheckpoint(folder / method, "{epoch}", save_weights_only=True)
        options = {"max_epochs": 1, "max_steps": -1, "enable_checkpointing": True}
        trainer, _ = fit(Classifier(), UnitScaleCallback(method), saved, **options)
        paths[method] = folder / f"{method}.ckpt"
        trainer.save_checkpoint(paths[method])
        paths[f"{method}, weights afterwards"] = folder / f"{method}-weights.ckpt"
        trainer.save_checkpoint(paths[f"{method}, weights afterwards"], weights_only=True)
    return paths


def _start(entry: str, callbacks: list[Any], path: Path) -> tuple[Any, Any]:
    module = Classifier()
    before = weights(module)
    trainer = trainer_with(*callbacks, max_steps=12, num_sanity_val_steps=0)
    data = {"fit": (loader(16), loader(8))}.get(entry, (loader(16),))
    try:
        result = getattr(trainer, entry)(module, *data, ckpt_path=path)
    except MisconfigurationException:
        assert_same_bits(weights(module), before)
        assert not {"on_load_checkpoint", "on_save_checkpoint"} & set(vars(module))
        raise
    return module, result


@pytest.mark.slow_cases(5)
@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize(
    ("trained", "method"),
    [("u-mup", "lossless"), ("u-mup", "unit-scaling"), ("unit-scaling", "u-mup")],
)
def test_checkpoint_of_other_method_is_an_error(
    entry: str, trained: str, method: Any, checkpoints: dict[str, Path]
) -> None:
    expected = f"^method='{method}': .* trained with method='{trained}', .*. Expected .*. Pass"
    with pytest.raises(MisconfigurationException, match=expected):
        _start(entry, [UnitScaleCallback(method)], checkpoints[trained])


@pytest.mark.parametrize("entry", ["fit", "validate", "load_from_checkpoint"])
def test_rule_based_checkpoint_without_callback_is_an_error(
    entry: str, checkpoints: dict[str, Path]
) -> None:
    expected = re.escape("trained with UnitScaleCallback('u-mup'): pass ckpt_path to a Trainer")
    with pytest.raises(RuntimeError, match=f"(?s)loading state_dict for Classifier.*{expected}"):
        if entry == "load_from_checkpoint":
            Classifier.load_from_checkpoint(checkpoints["u-mup"])
        else:
            _start(entry, [], checkpoints["u-mup"])


def test_non_strict_load_without_callback_warns(checkpoints: dict[str, Path]) -> None:
    with pytest.warns(UserWarning, match=r"UnitScaleCallback\('u-mup'\)"):
        Classifier.load_from_checkpoint(checkpoints["u-mup"], strict=False)


@pytest.mark.slow_cases
@pytest.mark.parametrize("when", ["", " afterwards"])
def test_weights_only_checkpoint_needs_same_method(when: str, checkpoints: dict[str, Path]) -> None:
    path = checkpoints[f"u-mup, weights{when}"]
    with pytest.raises(RuntimeError, match="UnitScaleCallback\\('u-mup'\\)"):
        _start("validate", [], path)
    with pytest.raises(MisconfigurationException, match=r"^method='lossless': .*'u-mup'"):
        _start("validate", [UnitScaleCallback()], path)
    _, (alone,) = _start("validate", [UnitScaleCallback(Rules("u-mup"))], path)
    _, (whole,) = _start("validate", [unit_scale("u-mup")], checkpoints["u-mup"])
    assert alone["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-5)


@pytest.mark.slow
def test_rule_based_run_resumes(checkpoints: dict[str, Path]) -> None:
    module, _ = _start("fit", [unit_scale("u-mup")], checkpoints["u-mup"])
    assert "on_load_checkpoint" not in vars(module)


class Signing(Classifier):
    """Writes its name into its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["module"] = self


@pytest.mark.slow
def test_copies_of_rule_based_module_mark_their_checkpoints() -> None:
    module, callback = Signing(), unit_scale("u-mup")
    for _ in range(2):
        fit(module, callback, max_steps=1)
    copied = copy.deepcopy(module)
    for own in (module, copied, pickle.loads(pickle.dumps(copied))):
        checkpoint: dict[str, Any] = {"state_dict": own.state_dict()}
        own.on_save_checkpoint(checkpoint)
        assert checkpoint["module"] is own
        assert len(checkpoint["state_dict"]) == len(own.state_dict()) + 1


@pytest.mark.slow
def test_lossless_checkpoint_resumed_by_rules_warns(checkpoints: dict[str, Path]) -> None:
    expected = r"^method='u-mup': .* trained with method='lossless'. .*. Expected .*. To continue"
    with pytest.warns(UserWarning, match=expected):
        _start("fit", [unit_scale("u-mup")], checkpoints["lossless"])
    # An evaluation leaves it as it is.
    _start("validate", [unit_scale("u-mup")], checkpoints["lossless"])


def test_lossless_checkpoint_loads_without_callback(checkpoints: dict[str, Path]) -> None:
    for saved in ("lossless", "lossless, weights", "lossless, weights afterwards"):
        found = torch.load(checkpoints[saved], weights_only=True)["state_dict"]
        assert set(found) == set(Classifier().state_dict())
    _start("fit", [], checkpoints["lossless"])


@pytest.mark.slow
def test_checkpoint_hooks_of_module_are_called(tmp_path: Path) -> None:
    class Keeping(Classifier):
        def on_save_checkpoint(self, checkpoint: Any) -> None:
            # Such as one that leaves out what is frozen.
            own = super().state_dict()
            checkpoint["state_dict"] = {name: checkpoint["state_dict"][name] for name in own}
            checkpoint["kept"] = 3

        def on_load_checkpoint(self, checkpoint: Any) -> None:
            self.kept = checkpoint["kept"]

    saved = ModelCheckpoint(tmp_path, "{epoch}")
    options = {"max_epochs": 1, "max_steps": -1, "enable_checkpointing": True}
    fit(Keeping(), unit_scale("u-mup"), saved, **options)
    trainer, module = trainer_with(unit_scale("u-mup"), max_steps=6), Keeping()
    trainer.fit(module, loader(), loader(8), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert module.kept == 3
    with pytest.raises(RuntimeError, match="UnitScaleCallback"):
        trainer_with(max_steps=6).fit(
            Classifier(), loader(), loader(8), ckpt_path=tmp_path / "epoch=0.ckpt"
        )


@pytest.mark.slow_cases
@pytest.mark.parametrize("is_first", [False, True])
def test_averaged_weights_are_marked_and_run_resumes(is_first: bool, tmp_path: Path) -> None:
    def callbacks() -> list[pl.Callback]:
        pair = [unit_scale("u-mup"), EMAWeightAveraging(decay=0.9)]
        return pair if is_first else pair[::-1]

    saved = ModelCheckpoint(tmp_path, "{epoch}")
    options = {"max_epochs": 1, "max_steps": -1, "enable_checkpointing": True}
    fit(Classifier(), *callbacks(), saved, **options)
    path = tmp_path / "epoch=0.ckpt"
    fit(Classifier(), *callbacks(), max_steps=6, ckpt_path=path)
    with pytest.raises(RuntimeError, match="UnitScaleCallback"):
        Classifier.load_from_checkpoint(path)
