"""Diffusion with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_unitscale import attach

from .entry_point import EntryPoint, Trained


def _image_folder(folder: Path, count: int) -> str:
    from PIL import Image

    (images := folder / "images").mkdir()
    for index, image in enumerate(np.random.default_rng(0).integers(256, size=(count, 32, 32, 3))):
        Image.fromarray(image.astype(np.uint8)).save(images / f"{index}.png")
    return str(images)


def denoising_diffusion(callbacks: list[Any], folder: Path) -> Trained:
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

    images = _image_folder(folder, 100)
    trainer = Trainer(
        GaussianDiffusion(
            Unet(dim=16, dim_mults=(1, 2), flash_attn=True), image_size=32, timesteps=4
        ),
        images, train_batch_size=8, gradient_accumulate_every=2, train_num_steps=20,
        ema_update_every=2, save_and_sample_every=10, num_samples=4, calculate_fid=False,
        results_folder=str(folder / "results"),
    )  # fmt: skip
    if callbacks:
        # Its Trainer has prepared model and optimizer by Accelerate, and takes no callbacks.
        with attach(trainer.model, trainer.opt, callbacks):
            trainer.train()
    else:
        trainer.train()
    return Trained(trainer.model, list(trainer.ema.ema_model.parameters()))


ENTRY_POINTS = (
    EntryPoint(
        "denoising-diffusion", "Trainer.train", "attach", ("denoising-diffusion-pytorch",),
        "accelerate", ("denoising_diffusion_pytorch",), denoising_diffusion,
    ),
)  # fmt: skip
