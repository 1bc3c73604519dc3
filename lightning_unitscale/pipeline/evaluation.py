"""Validate, test, predict and save checkpoints with the pipeline strategy.

By default an evaluation batch is one microbatch, so the results are those of one device and nothing
is averaged. The stages then run one after the other. That takes as long as running all of them on
every rank, but needs fewer weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.loops.ranks import any_rank
from lightning_unitscale.matmuls.scaled_methods import run_in_session
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.pipeline.pipelined_method import NotPipelinedError, PipelinedEvaluation
from lightning_unitscale.pipeline.rank_parameters import Owners, Watch

# The hooks that run before the batches of a validation.
_HOOKS = (
    "on_validation_model_eval", "on_validation_start", "on_validation_epoch_start",
    "on_validation_batch_start",
)  # fmt: skip
# The callbacks of these packages read no weights in these hooks.
_KNOWN = ("lightning.", "pytorch_lightning.", "lightning_unitscale.")


def has_validation_hooks(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> bool:
    """Check whether user code has a hook that runs before the batches of a validation."""
    owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    owners += [(callback, pl.Callback) for callback in callbacks]
    return any(
        getattr(type(owner), name, None) is not getattr(base, name, None)
        and not type(owner).__module__.startswith(_KNOWN)
        for owner, base in owners
        for name in _HOOKS
    )


class EvaluatingStrategy(GridStrategy):
    """A strategy that runs steps without a backward pass."""

    evaluation: str = "auto"
    num_eval_microbatches: int = 1
    _is_training = False
    _owners: Owners | None = None
    # True if this rank has the current weights of all owners.
    _has_weights = True
    # By the name of the step. ``None`` if the step cannot run as a pipeline.
    _evaluations: dict[str, PipelinedEvaluation | None]
    # True if validation hooks read weights. ``None`` before the first validation.
    _hooks_read: bool | None = None
    _watch: Watch | None = None

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._end_watch()
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def before_validation(self) -> None:
        """Gather the weights if every rank needs all of them. Runs before all hooks."""
        module, reads = self.own_module, self._hooks_read
        if self._is_training and reads is None:
            callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
            reads = has_validation_hooks(module, callbacks)
        if reads or not self._is_pipelined("validation_step"):
            self._bring_weights()
        if self._is_training and self._hooks_read is None:
            self._watch = Watch(module)

    def _end_watch(self) -> None:
        """Note whether hooks have read weights, and free the weights if not."""
        if self._watch is None:
            return
        reads, self._watch = self._watch.end(), None
        # A hook may read weights only on the first rank.
        self._hooks_read = any_rank(reads)
        if not self._hooks_read and self._is_pipelined("validation_step"):
            self._free_again()

    def _free_again(self) -> None:
        if self._is_training and self._owners is not None and not self._is_interrupted:
            self._owners.free(self.optimizers)
            self._has_weights = False

    @override
    def on_validation_end(self) -> None:
        """Free the weights that only the validation of a training needed."""
        self._end_watch()
        self._free_again()

    @override
    def on_train_end(self) -> None:
        """Leave the trained weights on all ranks."""
        self._bring_weights()
        self._is_training = False

    @property
    def _is_interrupted(self) -> bool:
        trainer = self.own_module._trainer
        return trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED

    def _bring_weights(self) -> None:
        """Give every rank the owners' weights, unless it has the current ones."""
        # After an exception the other ranks may be blocked elsewhere or gone.
        if not self._has_weights and self._owners is not None and not self._is_interrupted:
            self._owners.synchronize()
            self._has_weights = True

    def _plain_parameters(self) -> AbstractContextManager[Any]:
        """Return a context for captures, in which freed parameters have their usual class."""
        return contextlib.nullcontext() if self._owners is None else self._owners.freed.plain()

    def _is_pipelined(self, name: str) -> bool:
        has_failed = name in self._evaluations and self._evaluations[name] is None
        if self.evaluation == "whole" or has_failed:
            return False
        steps = steps_of(self.own_module)
        # During a training, lossless passes neither change nor observe an evaluation. So its stages
        # are cut from the user's own step. Otherwise the passes measure it.
        is_own_step = self._is_training and not (steps and steps.changes_function)
        if steps is not None and name in steps.steps and not is_own_step:
            return False
        # Before the first training step all weights are on all ranks. The costs of that step have
        # to balance the stages.
        return not self._is_training or self.ownership.is_settled

    def _evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step through the stages, or whole by the method of the base class."""
        if self._is_pipelined(name):
            step = self._evaluations.get(name) or PipelinedEvaluation(
                name, self, self.num_eval_microbatches
            )
            self._evaluations[name] = step
            try:
                context = f"{name.replace('validation', 'val')}_context"
                with getattr(self.precision_plugin, context)(), self._plain_parameters():
                    return run_in_session(self.own_module, name, step, *args, **kwargs)
            except NotPipelinedError as error:
                if self.evaluation == "pipeline":
                    raise MisconfigurationException(
                        f"PipelineStrategy(evaluation='pipeline'): {error}"
                    ) from error
                rank_zero_warn(
                    f"PipelineStrategy: from here on, {name} runs whole on every rank, with all "
                    f"weights: {error}"
                )
            # All ranks of the pipeline reach this line, since they captured the same step.
            self._evaluations[name] = None
        self._bring_weights()
        return getattr(super(), name)(*args, **kwargs)


class SavingStrategy(EvaluatingStrategy):
    """A strategy that collects state on the first rank and saves nothing after an exception."""

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of a single device on the first rank, and ``{}`` on the others."""
        if self._owners is None or self._is_interrupted:
            return super().lightning_module_state_dict()
        if self.grid.replicas.rank:
            return {}
        return self._owners.state_on_first(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer state of a single device on the first rank only."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        if self._owners is None or self._is_interrupted:
            return cast(dict[str, Any], inner.state_dict())
        if self.grid.replicas.rank:
            return {}
        return self._owners.optimizer_state(inner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint, unless an exception has ended the run."""
        if self._is_interrupted:
            rank_zero_warn(
                f"PipelineStrategy: {filepath} is not saved. The run was interrupted, and the "
                "weights of the other ranks may be gone. Resume from an earlier checkpoint."
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, unless an exception has ended the run."""
        if self.lightning_module is None or not self._is_interrupted:
            super().barrier(*args, **kwargs)
