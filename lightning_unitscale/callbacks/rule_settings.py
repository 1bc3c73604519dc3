"""What Lightning's own settings have to be while a module is trained by scale rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.callbacks.pipelined import num_gradient_elements
from lightning_unitscale.shadowing import shadowed
from lightning_unitscale.transforms.learning_rates import Method, check_group
from lightning_unitscale.transforms.parameter_info import ParameterInfo
from lightning_unitscale.transforms.scaled_step import ScaledStep, scale_learning_rates

# torch.amp.GradScaler's own default: one that starts elsewhere was chosen by the user.
_DEFAULT_LOSS_SCALE = 2.0**16


class RuleSettings:
    """The settings that follow the scale rules during one fit: rates, clipping, loss scale.

    ``start`` belongs into ``on_fit_start``: the optimizers exist, and no checkpoint has been
    restored into them yet. ``follow_rates`` comes when the parameters are known. ``restore``
    belongs into ``teardown`` and ``on_exception``; it may be called at any time, and more than
    once.

    Args:
        lr_scaling: How learning rates follow; ``None`` leaves them to the user.
    """

    def __init__(self, lr_scaling: Method | None = "match") -> None:
        self.lr_scaling = lr_scaling
        self._undo: list[Callable[[], None]] = []

    def start(self, trainer: pl.Trainer) -> None:
        """Give clipping and the loss scale their meaning for gradients at unit scale.

        What an earlier start has changed is undone first.

        Raises:
            ValueError: If an optimizer's rates cannot follow the rules; nothing is changed then.
        """
        self.restore()
        if self.lr_scaling is not None:
            check_optimizers(trainer, self.lr_scaling)
        clipping = UnitClipping(trainer)
        clipping.attach()
        self._undo += [clipping.remove, start_loss_scale_at_one(trainer)]

    def follow_rates(self, trainer: pl.Trainer, infos: Mapping[Tensor, ParameterInfo]) -> None:
        """Let every optimizer step at each parameter's own rate, if rates are to follow.

        Args:
            trainer: A Trainer whose optimizers are set up.
            infos: What is known of the parameters.

        Raises:
            ValueError: If an optimizer's rates cannot follow the rules.
        """
        if self.lr_scaling is not None:
            steps = scale_optimizers(trainer, infos, self.lr_scaling)
            self._undo += [one.remove for one in steps]

    def restore(self) -> None:
        """Put everything back to what it was."""
        undo, self._undo = self._undo, []
        for one in reversed(undo):
            one()


def scale_optimizers(
    trainer: pl.Trainer, infos: Mapping[Tensor, ParameterInfo], lr_scaling: Method
) -> list[ScaledStep]:
    """Let all optimizers of a Trainer step with each parameter's own rate, and say what is odd.

    Args:
        trainer: A Trainer whose optimizers are set up.
        infos: What is known of the parameters.
        lr_scaling: How learning rates follow.

    Returns:
        One handle for each optimizer, whose ``remove()`` ends it.

    Raises:
        ValueError: If an optimizer's rates cannot follow the rules; none is changed then.
    """
    steps: list[ScaledStep] = []
    try:
        for optimizer in trainer.optimizers:
            steps.append(scale_learning_rates(_unwrapped(optimizer), infos, lr_scaling))
    except ValueError:
        for one in steps:
            one.remove()
        raise
    for one in steps:
        for note in one.notes:
            rank_zero_info(f"UnitScaleCallback: {note}")
    return steps


def check_optimizers(trainer: pl.Trainer, lr_scaling: Method) -> None:
    """Refuse optimizers whose rates cannot follow, before anything is changed.

    Raises:
        ValueError: As ``scale_optimizers`` does.
    """
    for optimizer in map(_unwrapped, trainer.optimizers):
        for group in optimizer.param_groups:
            check_group(optimizer, group, lr_scaling)


class UnitClipping:
    """Gradient clipping with thresholds in units of a unit-scaled gradient.

    Thresholds are chosen for plain models, whose gradients have a global norm about 1. Gradients at
    unit scale have RMS about 1 each, hence a norm about ``sqrt(N)`` for ``N`` elements, which a
    threshold of 1 would clip in every step. A threshold ``c`` is taken as ``c * sqrt(N)``, for the
    norm as for single values, with ``N`` the elements of the optimizer that have a gradient.

    ``LightningModule.clip_gradients`` refuses a value that is not the Trainer's, so the factor is
    put where it leads to: ``clip_gradients`` of the precision plugin (Lightning 2.6).

    Args:
        trainer: The Trainer, whose precision plugin clips.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._plugin = trainer.precision_plugin
        self._attached = contextlib.ExitStack()
        self._is_attached = False
        self._is_reported = False

    def attach(self) -> None:
        """Scale thresholds from now on."""
        if not self._is_attached:
            self._clip_gradients = self._plugin.clip_gradients
            self._attached.enter_context(shadowed(self._plugin, clip_gradients=self._clip))
            self._is_attached = True

    def remove(self) -> None:
        """Take thresholds as they are again."""
        self._attached.close()
        self._is_attached = False

    def _clip(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        factor = 1.0
        if clip_val > 0:
            parameters = self._plugin.main_params(optimizer)
            factor = num_gradient_elements(self._trainer, parameters) ** 0.5
            if not self._is_reported:
                self._is_reported = True
                rank_zero_info(
                    f"UnitScaleCallback: gradient_clip_val={clip_val} is taken as "
                    f"{clip_val * factor:.4g}, since unit-scaled gradients have RMS near 1 and "
                    "their norm is near the root of their number."
                )
        self._clip_gradients(optimizer, clip_val * factor, gradient_clip_algorithm)


def start_loss_scale_at_one(trainer: pl.Trainer) -> Callable[[], None]:
    """Let the gradient scaler of ``16-mixed`` start at 1 instead of 65,536.

    Gradients at unit scale need no loss scale, and the default one overflows them for many steps. A
    scaler that was used already, or that the user made with another scale, stays as it is; one that
    is restored from a checkpoint later goes on from there.

    Args:
        trainer: The Trainer, before its first step and before a checkpoint is restored.

    Returns:
        A function that puts back the start that was, unless the scaler was used in between: then
        its scale is a result of the training.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    before = dict(scaler.state_dict()) if scaler is not None else {}
    # Empty if the scaler is disabled.
    if scaler is None or before.get("scale") != _DEFAULT_LOSS_SCALE or before["_growth_tracker"]:
        return lambda: None
    scaler.load_state_dict({**before, "scale": 1.0})
    started = dict(scaler.state_dict())

    def restore() -> None:
        if scaler.state_dict() == started:
            scaler.load_state_dict(before)

    return restore


def _unwrapped(optimizer: Any) -> Optimizer:
    inner: Optimizer = optimizer
    if isinstance(optimizer, LightningOptimizer):
        inner = optimizer.optimizer
    return inner
