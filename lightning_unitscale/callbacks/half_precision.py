"""Parameters, gradients and clipping held in units while a Trainer trains in 16 bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_unitscale.callbacks.distributed import joint_reasons, pipeline_of
from lightning_unitscale.callbacks.packages import (
    is_lightning,
    misconfigured,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_unitscale.callbacks.steps import all_callbacks
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.lossless.calibrate import HIGH, LOW, root_mean_square
from lightning_unitscale.lossless.gauge import (
    MAX_LOG2_GAMMA,
    MAX_LOG2_SIGMA,
    Gauge,
    GaugePair,
)
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
from lightning_unitscale.lossless.scaled_parameters import HeldParameters
from lightning_unitscale.optim.optimizers import check_optimizer
from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.scales.transfer import numbers_of

if TYPE_CHECKING:
    import lightning.pytorch as pl


HoldParameters = bool | Literal["auto"]
_BREAKS = "graph breaks"
# They read or write parameters between steps, and know of no units.
_CONFLICTING_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging")


class ParameterHolding:
    """Holds the parameters of one LightningModule in units for the length of a fit.

    Args:
        choice: Whether to; ``"auto"`` does for ``16-true`` and ``bf16-true``, ``False`` never.
        rewrite: The pass whose gauge knows the units.

    Attributes:
        is_wanted: Whether this Trainer's parameters are to be held.
        events: When units were taken, one line each.
    """

    def __init__(self, choice: HoldParameters, rewrite: LosslessUnitScale) -> None:
        self.is_wanted = False
        self.events: list[str] = []
        self._choice = choice
        self._rewrite = rewrite
        self._held: HeldParameters | None = None
        self._last_units: dict[str, GaugePair] = {}
        self._measured: dict[str, tuple[Tensor, Tensor]] = {}
        self._clipping = contextlib.ExitStack()
        self._hooks: list[Any] = []
        self._restored: dict[int, dict[str, Any]] = {}
        self._evaluation = contextlib.ExitStack()

    @property
    def is_unknown(self) -> bool:
        """Whether parameters are to be held in units that were not measured yet."""
        return self.is_wanted and self._held is None

    def wants(self, trainer: pl.Trainer) -> bool:
        """Whether a Trainer's parameters are to be held."""
        if self._choice == "auto":
            return is_lightning(trainer.precision_plugin, "HalfPrecision")
        return self._choice

    def attach(self, trainer: pl.Trainer, *, is_other: bool) -> None:
        """Decide for a Trainer; before anything is captured.

        Args:
            trainer: The Trainer.
            is_other: Whether it has another module than before, whose units are forgotten.

        Raises:
            MisconfigurationException: If holding was asked for and the Trainer does not go with it.
        """
        if self._choice is False:
            return
        is_half = is_lightning(trainer.precision_plugin, "HalfPrecision")
        self.is_wanted = self.wants(trainer)
        self._rewrite.holds_parameters = self.is_wanted
        if is_other:
            self._last_units = {}
        if self.is_wanted:
            _check(trainer)
        if is_half and trainer.precision == "16-true" and self._rewrite.depth == "products":
            rank_zero_warn(
                "UnitScaleCallback(depth='products') with precision='16-true': gradients between "
                "matrix products are in true units, of which FP16 loses what is below 2**-24; "
                "expected depth='all'; pass it."
            )

    def start_fit(self, trainer: pl.Trainer) -> None:
        """Check the optimizers, and keep the state that a checkpoint has of them.

        Parameters are held from the first batch on: until then, summaries and loggers may call the
        module. The state would lose in FP16 and true units what it has in FP32.

        Raises:
            ValueError: If an optimizer is not in the table; nothing is changed then.
        """
        if not self.is_wanted:
            return
        for optimizer in trainer.optimizers:
            check_optimizer(optimizer)
        self._forget_restored()
        if self._last_units:
            self._hooks = [
                optimizer.register_load_state_dict_pre_hook(self._keep_restored)
                for optimizer in trainer.optimizers
            ]

    def follow(self, trainer: pl.Trainer) -> None:
        """Hold where units are known, and go over to optimizers that a tuner has put in."""
        if self.is_unknown and self._last_units:
            self._hold(trainer, self._last_units)
            for optimizer in trainer.optimizers:
                if id(optimizer) in self._restored:
                    groups = optimizer.state_dict()["param_groups"]
                    state = self._restored[id(optimizer)]["state"]
                    optimizer.load_state_dict({"state": state, "param_groups": groups})
            self._forget_restored()
        if self._held is not None and not self._held.belongs_to(trainer.optimizers):
            units = self._held.units
            self.release()
            self._hold(trainer, units)

    def measured(
        self,
        trainer: pl.Trainer,
        step: CapturedStep,
        gradients: Mapping[str, float],
        graph_breaks: Sequence[str],
    ) -> None:
        """Hold every parameter that the captured step reads, in units near its size.

        Args:
            trainer: The Trainer.
            step: The captured training step.
            gradients: RMS of the gradient of each parameter.
            graph_breaks: Reasons why it was captured in parts, if it was.
        """
        if not self.is_wanted or self._held is not None:
            return
        inputs = (graph_input for graph in step.graphs for graph_input in graph.inputs)
        reads = {str(read.fqn): "read" for read in inputs if read.kind == "parameter"}
        if graph_breaks:
            reads[_BREAKS] = "the step has graph breaks, between which code sees the parameters"
        # Ranks may run different branches, and average gradients of one parameter in one unit.
        (read,) = joint_reasons(reads)
        if _BREAKS in read:
            self._decline(read[_BREAKS])
            return
        named = dict(trainer.lightning_module.named_parameters())
        names = [name for name in gradients if name in read and named[name].requires_grad]
        sizes = numbers_of([root_mean_square(named[name]) for name in names])
        units = {
            name: GaugePair.of_rms(size, gradients[name])
            for name, size in zip(names, sizes, strict=True)
        }
        self._hold(trainer, units)

    def decline(self, why: str) -> None:
        """Leave parameters as they are.

        Raises:
            MisconfigurationException: If holding was asked for by name.
        """
        if self.is_wanted and self._held is None:
            self._decline(why)

    def before_step(self, optimizer: Optimizer) -> None:
        """Measure what an optimizer is about to use, to see whether the units still fit."""
        if self._held is None:
            return
        ours = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._measured.update(
            (name, (root_mean_square(param), root_mean_square(param.grad)))
            for name, param in self._held.named().items()
            if id(param) in ours and param.grad is not None
        )

    def after_step(self, when: str, *, always: bool) -> None:
        """Take new units where a parameter or its gradient has left [1/4, 4], or for all."""
        measured, self._measured = self._measured, {}
        if self._held is None:
            return
        new, outside = {}, []
        sizes_of = numbers_of([size for pair in measured.values() for size in pair])
        for name, value, gradient in zip(measured, sizes_of[::2], sizes_of[1::2], strict=True):
            old = self._held.units[name]
            sizes = [size for size in (value, gradient) if math.isfinite(size) and size > 0]
            is_outside = any(not LOW <= size <= HIGH for size in sizes)
            if is_outside:
                outside.append(name)
            if always or is_outside:
                moved = GaugePair.of_rms(value, gradient)
                pair = GaugePair(
                    _bounded(old.log2_sigma + moved.log2_sigma, MAX_LOG2_SIGMA),
                    _bounded(old.log2_gamma + moved.log2_gamma, MAX_LOG2_GAMMA),
                )
                if pair != old:
                    new[name] = pair
        if new:
            self._take(new)
            names = ", ".join(outside[:3])
            self.events.append(
                f"New units for {len(new)} parameters at {when}" + (f": {names}" if names else "")
            )

    @contextlib.contextmanager
    def true_parameters(self) -> Iterator[None]:
        """Within this context parameters have their true values, for captured steps as well."""
        held, rewrite = self._held, self._rewrite
        if held is None:
            yield
            return
        units = rewrite.gauge.parameters
        rewrite.set_parameter_units({})
        try:
            with held.true_values():
                yield
        finally:
            rewrite.set_parameter_units(units)

    def start_evaluation(self) -> None:
        """Show true values until :meth:`end_evaluation`: such steps may do what they want."""
        self.end_evaluation()
        self._evaluation.enter_context(self.true_parameters())

    def end_evaluation(self) -> None:
        """Go on with held values."""
        self._evaluation.close()

    def check_graph_breaks(self, graph_breaks: Sequence[str]) -> None:
        """Refuse a training step that has come to be captured in parts.

        Raises:
            RuntimeError: With the reason of the first break.
        """
        if self._held is not None and graph_breaks:
            raise RuntimeError(
                f"training_step: a graph break while parameters are held in units "
                f"({graph_breaks[0]}), so code between graphs would see them as they are stored; "
                "expected a step that is captured whole; pass Lossless(hold_parameters=False)."
            )

    def release(self) -> None:
        """Give parameters and optimizer state back in true units. Idempotent."""
        self.end_evaluation()
        self._forget_restored()
        self._clipping.close()
        if self._held is not None:
            self._last_units = self._held.units
            self._held.release()
            self._held = None
            self._rewrite.set_parameter_units({})

    def state_dict(self) -> dict[str, list[int]]:
        """Units of the parameters, for a checkpoint; the parameters there are in true units."""
        units = self._last_units if self._held is None else self._held.units
        return {name: list(pair) for name, pair in Gauge(units).state().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` in the next fit."""
        if self._choice is not False:
            self._last_units = dict(Gauge.from_state(state))

    def _keep_restored(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = (param for group in optimizer.param_groups for param in group["params"])
        # Other types lose nothing, and what is loaded may share memory with this.
        if any(param.dtype == torch.float16 for param in parameters):
            self._restored[id(optimizer)] = state

    def _forget_restored(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._restored = [], {}

    def _hold(self, trainer: pl.Trainer, units: Mapping[str, GaugePair]) -> None:
        rewrite = self._rewrite
        module = trainer.lightning_module
        held = HeldParameters(module, trainer.optimizers, lambda: rewrite.is_running)
        held.attach()
        self._held = held
        named = dict(module.named_parameters())
        self._take({name: pair for name, pair in units.items() if name in named})
        # Thresholds mean true gradients; to these two leads ``clip_gradients`` (Lightning 2.6).
        plugin = trainer.precision_plugin
        clipping = {
            "clip_grad_by_norm": lambda optimizer, limit: held.clip_by_norm(
                list(plugin.main_params(optimizer)), limit
            ),
            "clip_grad_by_value": lambda optimizer, limit: held.clip_by_value(
                list(plugin.main_params(optimizer)), limit
            ),
        }
        for name, clip in clipping.items():
            replacement = Replacement(getattr(plugin, name), clip)
            self._clipping.enter_context(shadowed(plugin, **{name: replacement}))
        self.events.append(f"{len(units)} parameters and their gradients held in units")

    def _take(self, units: Mapping[str, GaugePair]) -> None:
        assert self._held is not None
        self._held.take(units)
        self._rewrite.set_parameter_units(self._held.units)

    def _decline(self, why: str) -> None:
        if self._choice is True:
            raise misconfigured(
                f"hold_parameters=True: {why}; expected a step that runs whole in captured graphs, "
                "under automatic optimization; pass Lossless(hold_parameters=False)."
            )
        self.is_wanted = False
        self.events.append(f"Parameters are not held in units: {why}")
        rank_zero_info(f"UnitScaleCallback: {self.events[-1]}.")


def _check(trainer: pl.Trainer) -> None:
    strategy = trainer.strategy
    if not is_lightning(strategy, "SingleDeviceStrategy", "DDPStrategy") or pipeline_of(trainer):
        raise misconfigured(
            f"hold_parameters with {type(strategy).__name__}: it shards or moves parameters, whose "
            "units would be lost on the way; expected a single device or DDP; pass "
            "Lossless(hold_parameters=False)."
        )
    for callback in all_callbacks(trainer):
        if is_lightning(callback, *_CONFLICTING_CALLBACKS):
            raise misconfigured(
                f"hold_parameters with {type(callback).__name__}: it averages parameters over "
                "steps, between which their units may change; expected a Trainer without it; pass "
                "Lossless(hold_parameters=False)."
            )


def _bounded(exponent: int, limit: int) -> int:
    return max(-limit, min(limit, exponent))
