"""Gradient clipping while parameters and gradients are held in units."""

from __future__ import annotations

import contextlib

import lightning.pytorch as pl
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from lightning_unitscale.shadowing import shadowed
from lightning_unitscale.transforms.held_parameters import HeldParameters


class HeldClipping:
    """Gradient clipping that means true gradients.

    ``LightningModule.clip_gradients`` leads to ``clip_gradients`` of the precision plugin
    (Lightning 2.6), in whose place this stands.

    Args:
        trainer: The Trainer, whose precision plugin clips.
        held: The parameters.
    """

    def __init__(self, trainer: pl.Trainer, held: HeldParameters) -> None:
        self._plugin = trainer.precision_plugin
        self._held = held
        self._attached = contextlib.ExitStack()

    def attach(self) -> None:
        """Clip true gradients from now on."""
        self._attached.enter_context(shadowed(self._plugin, clip_gradients=self._clip))

    def remove(self) -> None:
        """Leave clipping to the plugin again."""
        self._attached.close()

    def _clip(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val <= 0:
            return
        parameters = list(self._plugin.main_params(optimizer))
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self._held.clip_by_value(parameters, clip_val)
        else:
            self._held.clip_by_norm(parameters, clip_val)
