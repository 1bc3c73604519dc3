from typing import Any

import lightning.pytorch as pl
import pytest

pytest.importorskip("transformers")

from examples.vit_by_rules import NUM_CLASSES, ViT, fit, stripes
from lightning_unitscale.rules.unit_weights import parameter_rms
from tests.callbacks.runs import QUIET


def test_classes_are_stripe_directions() -> None:
    data = stripes(64, 0)
    images, labels = data.tensors
    assert images.shape == (64, 3, 32, 32) and set(labels.tolist()) == set(range(NUM_CLASSES))
    # Noise aside, an image of the first class is the same in each row, and of no other class.
    spread = images.mean((1, 3)).std(1)
    vertical = spread[labels == 0].max()
    horizontal = spread[labels == NUM_CLASSES // 2].min()
    assert horizontal > vertical


@pytest.mark.slow
def test_vit_learns_by_rules() -> None:
    pl.seed_everything(0, verbose=False)
    module = ViT(width=32)
    options: dict[str, Any] = {**QUIET, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 2}
    scaling = fit(module, 64, **options)
    assert float(module.trainer.callback_metrics["accuracy"]) > 0.9
    text = str(scaling.explain())
    assert "unit scale by rules" in text and "training_step" in text
    # Weights that began at about fan_in ** -0.5 are at unit scale.
    rms = parameter_rms(module.net.vit.layers[0].mlp.fc1.weight)
    assert 0.5 < rms < 2.0
