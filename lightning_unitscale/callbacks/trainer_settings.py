"""Check and adapt settings of a Trainer: rates, clipping, loss scales, precisions, plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.callbacks.distributed import (
    num_gradient_elements,
    refuse_sharded_parameters,
)
from lightning_unitscale.callbacks.lightning_steps import all_callbacks
from lightning_unitscale.callbacks.memory_budget import RematCallback
from lightning_unitscale.callbacks.packages import (
    is_lightning,
    misconfigured,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_unitscale.functional.low_precision import why_no_fp8
from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.rules.learning_rates import Method, ParameterInfo, check_group, known_class
from lightning_unitscale.rules.muon import give_roles
from lightning_unitscale.rules.plan import RulePlan
from lightning_unitscale.rules.scaled_step import rate_notes, scale_learning_rates

if TYPE_CHECKING:
    import lightning.pytorch as pl


# The default of torch.amp.GradScaler. The user has chosen any other start.
_DEFAULT_LOSS_SCALE = 2.0**16
_SHOWN = 3  # operations that a warning names
_HIDING_MATMULS = {
    "TransformerEnginePrecision": "it replaces layers with its own, which run in FP8 by "
    "themselves and hide their matmuls from the graph",
    "BitsandbytesPrecision": "it replaces layers with its own, which hold quantized weights and "
    "hide their matmuls from the graph",
}
_CONFLICTS_OF_FP8 = {
    "DeepSpeedPrecision": "it runs the module in an engine that casts and scales by itself"
}


class RuleSettings:
    """The settings that follow the scale rules during one fit: rates, clipping, loss scale."""

    # Call `start` in `on_fit_start`: the optimizers exist, but no checkpoint has been restored.
    # Call `follow_rates` when the parameters are known. Call `restore` in `teardown` and
    # `on_exception`. It may be called at any time, and more than once.

    def __init__(self, lr_scaling: Method | None) -> None:
        self.lr_scaling = lr_scaling
        self._changes = contextlib.ExitStack()

    def start(self, trainer: pl.Trainer) -> None:
        """Adapt clipping and the loss scale to gradients at unit scale."""
        # Changes of an earlier start are undone first.
        self.restore()
        if self.lr_scaling is not None:
            for optimizer in trainer.optimizers:
                inner = _unwrapped(optimizer)
                for group in inner.param_groups:
                    check_group(inner, group, self.lr_scaling)
                if _optimizers_within(optimizer):
                    name = type(optimizer).__name__
                    rank_zero_warn(
                        f"UnitScaleCallback: the rates of {type(inner).__name__} in {name} follow "
                        f"the scales. Changes of gradients and weights by {name} itself, such as "
                        "clipping to a norm, do not. Choose its settings for gradients at RMS 1."
                    )
        self._changes.enter_context(unit_clipping(trainer))
        self._changes.callback(start_loss_scale_at_one(trainer))

    def follow_rates(self, trainer: pl.Trainer, infos: Mapping[Tensor, ParameterInfo]) -> None:
        """Make every optimizer step at each parameter's own rate, if rates follow the rules."""
        optimizers = list(map(_unwrapped, trainer.optimizers))
        for optimizer in optimizers:
            give_roles(optimizer, infos)
        if self.lr_scaling is None:
            return
        with contextlib.ExitStack() as steps:
            for optimizer in optimizers:
                steps.callback(scale_learning_rates(optimizer, infos, self.lr_scaling).remove)
            self._changes.enter_context(steps.pop_all())
        for optimizer in optimizers:
            for note in rate_notes(optimizer, infos, self.lr_scaling):
                rank_zero_info(f"UnitScaleCallback: {note}")

    def restore(self) -> None:
        """Restore all settings."""
        self._changes.close()


def unit_clipping(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Convert thresholds of clipping to unit-scaled gradients within this context."""
    # Thresholds are chosen for unscaled models, whose gradients have a global norm about 1.
    # Gradients at unit scale have RMS about 1 each, so `N` elements have a norm about `sqrt(N)`. A
    # threshold of 1 would clip them in every step. A threshold `c` is applied as `c * sqrt(N)`,
    # both for the norm and for single values. `N` counts the optimizer's elements with a gradient.
    #
    # `LightningModule.clip_gradients` refuses a value that differs from the Trainer's. So the
    # factor is applied in `clip_gradients` of the precision plugin (Lightning 2.6).
    plugin = trainer.precision_plugin
    clip_gradients = plugin.clip_gradients
    is_reported = False

    def clip(
        optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        nonlocal is_reported
        if clip_val <= 0:
            return
        factor = num_gradient_elements(trainer, plugin.main_params(optimizer)) ** 0.5
        if not is_reported:
            is_reported = True
            rank_zero_info(
                f"UnitScaleCallback: gradient_clip_val={clip_val} is applied as "
                f"{clip_val * factor:.4g}, since unit-scaled gradients have RMS near 1 and their "
                "norm is near the root of their number."
            )
        clip_gradients(optimizer, clip_val * factor, gradient_clip_algorithm)

    return shadowed(plugin, clip_gradients=Replacement(clip_gradients, clip))


def start_loss_scale_at_one(trainer: pl.Trainer) -> Callable[[], None]:
    """Start the gradient scaler of ``16-mixed`` at 1 instead of 65,536."""
    # Gradients at unit scale need no loss scale, and the default one overflows them for many steps.
    # A used scaler, or one that the user made with another scale, stays unchanged. A scaler that is
    # restored from a checkpoint continues from there.
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    before = dict(scaler.state_dict()) if scaler is not None else {}
    # The state is empty if the scaler is disabled.
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
    if is_lightning(optimizer, "LightningOptimizer"):
        inner = optimizer.optimizer
    while known_class(inner) is None and (stepped := _optimizers_within(inner)):
        inner = stepped[0]
    return inner


def _optimizers_within(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers whose parameter groups and steps another one shares."""
    held = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
    return [one for one in held if one.param_groups is optimizer.param_groups]


def check_sharding(
    trainer: pl.Trainer, method: object, *, is_sharded: bool, is_compiled: bool
) -> None:
    """Refuse scaling by rules if the steps of a sharded module do not support it."""
    if not is_sharded:
        refuse_sharded_parameters(
            trainer,
            f"method={method!r}",
            "sets whole parameters to RMS 1",
            "ModelParallelStrategy with fully_shard, DDP, or method='lossless'",
        )
    elif is_compiled:
        raise misconfigured(
            f"compile=True with method={method!r}: FSDP gathers parameters in the middle "
            "of the graph, which Inductor does not compile. Expected compile=False with "
            "ModelParallelStrategy. Leave it out, or use DDP."
        )
    elif any(isinstance(callback, RematCallback) for callback in all_callbacks(trainer)):
        raise misconfigured(
            f"method={method!r} with RematCallback: FSDP gathers parameters in the "
            "middle of the graph of a rule-based step, so nothing can be recomputed. Expected "
            "only one of them with ModelParallelStrategy. Checkpoint the blocks yourself, or "
            "use DDP."
        )


def refuse_rate_search(trainer: pl.Trainer) -> None:
    """Refuse a search for a learning rate, which would run without the rules."""
    # Weights, factors and rates are set when the first batch starts. A search runs that batch
    # without the callbacks. It would find a rate of the unscaled model, and apply it to another
    # one.
    callbacks = all_callbacks(trainer)
    if any(is_lightning(callback, "LearningRateFinder") for callback in callbacks):
        raise misconfigured(
            "LearningRateFinder: it takes the callbacks out of the Trainer while it searches, so "
            "it would find the rate of the unscaled model, not of the one that is scaled by rules. "
            "Expected no search with method='unit-scaling' or 'u-mup'. Leave it out (u-muP's best "
            "rates are near 1), or pass method='lossless', with the unscaled model's rates."
        )


def refuse_statistics_update(trainer: pl.Trainer, module: nn.Module) -> None:
    """Refuse a callback that ends training with an epoch whose steps cannot be captured."""
    # It computes the statistics of batch norms with ``momentum=None``. They read the number of
    # batches by ``float()``, which breaks the graph in front of weights at unit scale.
    norms = [
        path
        for path, one in module.named_modules()
        if isinstance(one, nn.modules.batchnorm._BatchNorm)
    ]
    averaging = "StochasticWeightAveraging"
    if norms and any(is_lightning(callback, averaging) for callback in all_callbacks(trainer)):
        raise misconfigured(
            f"{averaging}: it computes the statistics of {norms[0]} (a batch norm) again at the "
            "end of the training, in steps that rules cannot scale. Expected another average with "
            "method='unit-scaling' or 'u-mup'. Use EMAWeightAveraging or WeightAveraging, or pass "
            "method='lossless'."
        )


def check_fp8(trainer: pl.Trainer) -> None:
    """Refuse a Trainer whose device or precision plugin does not support FP8 linears."""
    refuse_plugins(trainer, "precision='fp8'", _CONFLICTS_OF_FP8)
    check_fp8_device(trainer.strategy.root_device)


def refuse_plugins(trainer: pl.Trainer, option: str, others: Mapping[str, str] = {}) -> None:
    """Refuse a Trainer whose precision plugin hides the matmuls, or is one of ``others``."""
    plugin = trainer.precision_plugin
    for kind, why in {**_HIDING_MATMULS, **others}.items():
        if is_lightning(plugin, kind):
            raise misconfigured(
                f"{option} with {type(plugin).__name__}: {why}. Expected '32-true', "
                "'bf16-mixed', '16-mixed', 'bf16-true' or '16-true'. Change the Trainer's "
                f"precision, or leave out {option} here."
            )


def check_fp8_device(device: torch.device) -> None:
    """Refuse a device without FP8."""
    why_not = why_no_fp8(device)
    if why_not is not None:
        raise misconfigured(
            f"precision='fp8' on {device}: {why_not}. Expected a GPU of "
            "compute capability 8.9 or above, or a CPU. Pass simulate='fp8' to see what FP8 would "
            "do, or leave it out."
        )


def report_unprotected(module: nn.Module) -> None:
    """Warn about losses of FP16 parameters between matmuls, and report those of BF16 ones."""
    types = {parameter.dtype for parameter in module.parameters()}
    if torch.float16 in types:
        rank_zero_warn(
            "UnitScaleCallback: the parameters are FP16 (precision='16-true'). Matmuls are scaled, "
            "but the tensors between them are not: gradients below 6e-8 become zero and values "
            "above 65504 overflow, as without this callback. Use Trainer(precision='16-mixed'), "
            "or 'bf16-mixed'."
        )
    elif torch.bfloat16 in types:
        rank_zero_info(
            "UnitScaleCallback: the parameters are BF16 (precision='bf16-true'). Matmuls are "
            "scaled, but an update below 1/512 of a weight is lost when it is added, as without "
            "this callback. Trainer(precision='bf16-mixed') keeps FP32 weights."
        )


def warn_of_own_factors(plan: RulePlan, trained: RulePlan) -> None:
    """Warn of operations of a new evaluation that no earlier step runs in the same way."""
    known = {(one.op, one.factors, one.reason) for one in trained.values()}
    step = next(iter(plan.steps() - trained.steps()), "")
    own = [
        name.partition(":")[2]
        for name, one in plan.items()
        if name.startswith(f"{step}:")
        and one.changes
        and (one.op, one.factors, one.reason) not in known
    ]
    if own:
        more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        rank_zero_warn(
            f"UnitScaleCallback: {step} runs operations that training_step does not run in the "
            f"same way: {', '.join(own[:_SHOWN])}{more}. Rules give them factors of their own. If "
            "the model's outputs depend on them, they are those of another model. Call the model "
            "in the same way in both steps."
        )


def warn_of_zero_eps(optimizers: Iterable[Optimizer]) -> None:
    """Warn about an ``eps`` that is zero in the type of its parameters."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if not isinstance(eps, float) or eps <= 0:
                continue
            types = {parameter.dtype for parameter in group["params"]}
            lost = [dtype for dtype in types if torch.tensor(eps, dtype=dtype) == 0]
            if lost:
                rank_zero_warn(
                    f"{type(optimizer).__name__}(eps={eps}): eps is 0 in {lost[0]}, the type of "
                    "the parameters, so a weight whose squared gradient is 0 becomes NaN. Pass "
                    "eps=1e-4 or more, or use Trainer(precision='16-mixed')."
                )
                break
