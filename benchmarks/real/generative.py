"""Diffusion models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .project import Loss, Made, Project, loader


def _images() -> Tensor:
    return torch.rand(4, 3, 32, 32)


def diffusers_unet() -> Made:
    from diffusers import DDPMScheduler, UNet2DModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=100)

    def loss(model: Any, images: Tensor) -> Tensor:
        noise, time = torch.randn_like(images), torch.randint(100, (len(images),))
        noisy = scheduler.add_noise(images, noise, time)
        return F.mse_loss(model(noisy, time).sample, noise)

    return Loss(model, loss), loader(_images)


def diffusers_transformer() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, num_layers=2, sample_size=16,
        patch_size=2, num_embeds_ada_norm=50, norm_num_groups=8, dropout=0.1,
    )  # fmt: skip

    def loss(model: Any, images: Tensor) -> Tensor:
        size = len(images)
        time, label = torch.randint(50, (size,)), torch.randint(50, (size,))
        found = model(images[:, :, ::2, ::2].contiguous(), timestep=time, class_labels=label).sample
        return F.mse_loss(found, torch.randn_like(found))

    return Loss(model, loss), loader(_images)


def denoising_diffusion() -> Made:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = GaussianDiffusion(
        Unet(dim=16, dim_mults=(1, 2), flash_attn=True), image_size=32, timesteps=50
    )
    return Loss(model, lambda model, images: model(images)), loader(_images)


PROJECTS = (
    Project("diffusers-unet", ("diffusers",), diffusers_unet),
    Project("diffusers-dit", ("diffusers",), diffusers_transformer),
    Project("denoising-diffusion", ("denoising-diffusion-pytorch",), denoising_diffusion),
)
