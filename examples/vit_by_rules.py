"""A Hugging Face ViT that is unit-scaled by rules, in one file.

``UnitScaleCallback("u-mup")`` builds a different model from the same layers: weights at RMS 1,
factors in the graph, and best learning rates near 1 that stay the same as the model gets wider
(Blake et al. (2024), "u-muP: The Unit-Scaled Maximal Update Parametrization"). Tune the rate on a
narrow model and keep it on the wide one.

    python examples/vit_by_rules.py --width 32 --learning_rate 0.05

The script generates its data: an image shows stripes in noise, and its class is their direction.
"""

import argparse
import math

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification
from typing_extensions import override

from lightning_unitscale import UnitScaleCallback

NUM_CLASSES, SIZE = 4, 32


def stripes(count: int, seed: int) -> TensorDataset:
    """Images of stripes `(count, 3, 32, 32)` and the class of their direction `(count,)`."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
    angles = labels * math.pi / NUM_CLASSES
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angles.cos()[:, None, None] * x + angles.sin()[:, None, None] * y
    phases = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
    images = torch.sin(along * math.pi / 4 + phases)[:, None].repeat(1, 3, 1, 1)
    return TensorDataset(images + torch.randn(images.shape, generator=generator), labels)


class ViT(pl.LightningModule):
    """The plain model, without any code for unit scaling.

    Args:
        width: Features per patch.
        depth: Number of layers.
        learning_rate: Of AdamW; by rules it is near 1 where it is 1e-3 in a plain model.
    """

    def __init__(self, width: int = 64, depth: int = 2, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        config = ViTConfig(
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * width,
            image_size=SIZE,
            patch_size=8,
        )
        config.num_labels = NUM_CLASSES
        self.net = ViTForImageClassification(config)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.net(pixel_values=images, labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(pixel_values=images).logits
        self.log("accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.0)


def fit(module: ViT, num_steps: int, **options: object) -> UnitScaleCallback:
    """Train a ViT by rules, and return the callback, whose ``explain()`` shows what it did."""
    scaling = UnitScaleCallback("u-mup")
    trainer = pl.Trainer(max_steps=num_steps, callbacks=[scaling], **options)  # type: ignore[arg-type]
    train = DataLoader(stripes(1024, 0), batch_size=32, shuffle=True)
    trainer.fit(module, train, DataLoader(stripes(256, 1), batch_size=64))
    return scaling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    scaling = fit(ViT(arguments.width, learning_rate=arguments.learning_rate), arguments.steps)
    print(scaling.explain())


if __name__ == "__main__":
    main()
