"""Gradient clipping while parameters and gradients are held in units."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from lightning_unitscale.transforms.held_parameters import HeldParameters

_MISSING = object()


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
        self._shadowed: Any = _MISSING

    def attach(self) -> None:
        """Clip true gradients from now on."""
        self._shadowed = vars(self._plugin).get("clip_gradients", _MISSING)
        vars(self._plugin)["clip_gradients"] = self._clip

    def remove(self) -> None:
        """Leave clipping to the plugin again."""
        if self._shadowed is _MISSING:
            del vars(self._plugin)["clip_gradients"]
        else:
            vars(self._plugin)["clip_gradients"] = self._shadowed

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
