"""Trainer strategy: an unmodified LightningModule on several devices, one stage after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.pipeline.marks import SplitPoint, annotate_split_points
from lightning_unitscale.pipeline.ownership import Ownership
from lightning_unitscale.pipeline.policy import balanced_split
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.shadowing import shadowed
from lightning_unitscale.strategies import batches
from lightning_unitscale.strategies.captured_steps import not_one_graph, refuse_steps
from lightning_unitscale.strategies.grid import GridStrategy
from lightning_unitscale.strategies.owners import Owners
from lightning_unitscale.strategies.pipelined_forward import PipelinedForward
from lightning_unitscale.strategies.pipelined_method import NotOneGraphError, Pipelining, Policy
from lightning_unitscale.strategies.pipelined_step import PipelinedStep

_CAPTURES = ("auto", "step", "forward")


class PipelineStrategy(GridStrategy):
    """Cuts the module's ``training_step`` into stages and trains them on the Trainer's devices.

    Nothing of the module is rewritten: the step is captured with its loss, balanced over the ranks
    and run by microbatches. A step gives the gradients of the mean of the microbatches' losses,
    which is the batch's own loss where that is a mean over samples. ``self.log`` works on all
    ranks; single numbers are averaged over the microbatches. Checkpoints have the layout and the
    names of a single device. Validation, test and prediction run the whole module on every rank.

    Args:
        schedule: One of ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ``LoopedBFS``,
            ``InterleavedZeroBubble``, ``ZBVZeroBubble``, ``DualPipeV``.
        num_microbatches: Equal parts of every batch.
        data_parallel: Pipelines side by side, each with batches of its own, whose gradients are
            averaged as in DDP; the devices are divided among them.
        stages_per_rank: Stages on each device; ``"auto"`` for as few as the schedule has use for.
        split: ``"auto"`` balances the stages by the profiler's costs, unless the code calls
            ``pipe_split()``; paths of submodules to the edge that is a cut; or a split policy.
        capture: ``"step"`` runs ``training_step`` as a pipeline, with its loss; ``"forward"`` only
            ``forward``, and the step around it on the rank of the last stage; ``"auto"`` the step,
            and where that is not one graph ``forward``, with the reason in a warning.
        free_unowned: Whether a rank frees, after the first step, the parameters that stages of
            other ranks have, with their gradients and optimizer state. Validation brings them back
            for as long as it runs, a checkpoint on the first rank, the end of the training for
            good. Reading a freed parameter raises; with ``False`` it has old values.
        check_batches: In so many first steps the ranks compare their batches.
        process_group_backend: As in DDP.
        timeout: Seconds after which a rank that waits for another gives up.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> PipelineStrategy("1F1B", num_microbatches=8).schedule.name
        '1F1B'
    """

    def __init__(
        self,
        schedule: str = "1F1B",
        *,
        num_microbatches: int,
        data_parallel: int = 1,
        stages_per_rank: int | str = "auto",
        split: str | Mapping[str, SplitPoint] | Policy = "auto",
        capture: str = "auto",
        free_unowned: bool = True,
        check_batches: int = 2,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise ValueError(
                f"num_microbatches={num_microbatches!r}: expected a whole number of at least 1."
            )
        if not isinstance(data_parallel, int) or data_parallel < 1:
            raise ValueError(
                f"data_parallel={data_parallel!r}: expected a whole number of at least 1."
            )
        if stages_per_rank != "auto" and (
            not isinstance(stages_per_rank, int) or stages_per_rank < 1
        ):
            raise ValueError(
                f"stages_per_rank={stages_per_rank!r}: expected 'auto' or a whole number of at "
                "least 1."
            )
        if isinstance(split, str) and split != "auto":
            raise ValueError(
                f"split={split!r}: expected 'auto', a dict of paths of submodules to a SplitPoint, "
                "or a split policy."
            )
        if capture not in _CAPTURES:
            raise ValueError(f"capture={capture!r}: expected one of {', '.join(_CAPTURES)}.")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected seconds above 0.")
        super().__init__(
            process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout)
        )
        self.schedule = find_schedule(schedule)
        self.num_microbatches = num_microbatches
        self.data_parallel = data_parallel
        self.stages_per_rank = stages_per_rank
        self.split = split
        self.capture = capture
        self.free_unowned = free_unowned
        self.check_batches = check_batches
        self._step: PipelinedStep | PipelinedForward | None = None
        self._how: Pipelining
        self._owners: Owners | None = None
        self._marks: Any = ()
        self._changes = contextlib.ExitStack()
        self._steps_done = 0
        self._is_training = False
        self._stash: dict[nn.Parameter, Tensor] = {}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Gives all ranks the same weights, and makes the optimizers."""
        module = self.lightning_module
        assert module is not None and self.model is not None and self.accelerator is not None
        self._refuse(trainer, module)
        self._owners = None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        with torch.no_grad():
            for one in (*module.parameters(), *module.buffers()):
                dist.broadcast(one.data, src=0)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._prepare_step(module)
        self.setup_precision_plugin()
        # The norm of a rank's own gradients is not the norm of all.
        self._changes.close()
        clipping = shadowed(self.precision_plugin, clip_grad_by_norm=self._clip_by_norm)
        self._changes.enter_context(clipping)
        self._changes.enter_context(self.metrics_over_pipelines(module))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of all microbatches; the gradients wait for ``backward``."""
        assert self._step is not None and self.lightning_module is not None
        if self._steps_done < self.check_batches:
            batches.check_equal(args[0], self.grid.pipeline)
        parameters = list(self.lightning_module.parameters())
        earlier = [one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        try:
            with self.precision_plugin.train_step_context():
                result = self._run_step(*args, **kwargs)
            self._stash = {one: one.grad for one in parameters if one.grad is not None}
        finally:
            # Lightning clears the gradients between here and backward.
            for one, gradient in zip(parameters, earlier, strict=True):
                one.grad = gradient
        self._own(self._how.ownership.names)
        self._steps_done += 1
        return result

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Adds the gradients that the step has made."""
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._stash.items():
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient
        self._stash = {}
        if not self._is_accumulating and self._owners is not None:
            self._owners.average_gradients(self.grid.replicas)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        return closure_loss

    def num_gradient_elements(self, parameters: Iterable[Tensor]) -> int:
        """Elements with a gradient among these parameters, on all ranks together."""
        assert self._owners is not None
        return self._owners.num_gradient_elements(parameters)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict that one device would have, on the first rank; ``{}`` on the others."""
        if self._owners is None or self._is_interrupted:
            return super().lightning_module_state_dict()
        if self.grid.replicas.rank:
            return {}
        return self._owners.state_on_first(super().lightning_module_state_dict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state that one device would have, on the first rank alone."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        if self._owners is None or self._is_interrupted:
            state: dict[str, Any] = inner.state_dict()
            return state
        return {} if self.grid.replicas.rank else self._owners.optimizer_state(inner)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Saves a checkpoint; none of a run that an exception has ended."""
        if self._is_interrupted:
            rank_zero_warn(
                f"PipelineStrategy: {filepath} is not saved: the run was interrupted, and the "
                "weights of the other ranks may be gone; go on from an earlier checkpoint."
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, but for a run that an exception has ended."""
        if self.lightning_module is None or not self._is_interrupted:
            super().barrier(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        """Brings the weights together: every rank validates with all of them."""
        self._synchronize()

    @override
    def on_validation_end(self) -> None:
        """Frees the memory that only the validation needed."""
        if self._is_training and self._owners is not None and not self._is_interrupted:
            self._owners.free(self.optimizers)

    @override
    def on_train_end(self) -> None:
        """Leaves the trained weights on all ranks."""
        self._synchronize()
        self._is_training = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Gives the module its own step back."""
        self._release()

    @override
    def teardown(self) -> None:
        """Gives the module its own step back."""
        self._release()
        super().teardown()

    def _prepare_step(self, module: pl.LightningModule) -> None:
        group = self.grid.pipeline
        num_ranks = dist.get_world_size(group)
        per_rank = self.stages_per_rank
        if per_rank == "auto":
            per_rank = 1 if self.schedule.placement == "single" else 2
        num_stages = int(per_rank) * num_ranks
        self.schedule.check(num_stages, num_ranks, self.num_microbatches)
        policy: Policy = balanced_split(num_stages)
        if isinstance(self.split, Mapping):
            self._marks = annotate_split_points(module, self.split)
        elif not isinstance(self.split, str):
            policy = self.split
        ownership = Ownership(
            module, num_ranks, lambda stage: self.schedule.rank_of(stage, num_ranks)
        )
        self._how = Pipelining(
            schedule=self.schedule.name,
            num_microbatches=self.num_microbatches,
            policy=policy,
            device=self.root_device,
            group=group,
            ownership=ownership,
            replicas=self.grid.replicas,
            num_accumulated=lambda: int(module.trainer.accumulate_grad_batches),
        )
        if self.capture == "forward":
            self._step = PipelinedForward(module, self._how, self._plain_parameters)
        else:
            self._step = PipelinedStep(module, self._how)
            self._step.attach()
        self._steps_done, self._is_training = 0, True

    def _refuse(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not module.automatic_optimization:
            raise MisconfigurationException(
                "PipelineStrategy: automatic_optimization=False; expected automatic optimization: "
                "the strategy runs forward and backward together."
            )
        steps = steps_of(module)
        if steps is not None and trainer.state.fn == TrainerFn.FITTING:
            refuse_steps(steps, self.capture)
        if isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler:
            raise MisconfigurationException(
                "PipelineStrategy: precision='16-mixed' scales the loss outside of the step, where "
                "the pipeline's backward has run already; expected '32-true' or 'bf16-mixed'."
            )
        normalized = [
            name
            for name, one in module.named_modules()
            if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.track_running_stats
        ]
        if normalized and trainer.state.fn == TrainerFn.FITTING:
            raise MisconfigurationException(
                f"PipelineStrategy: {normalized[0]} takes its statistics over each microbatch, not "
                "over the batch; expected normalization of single samples; use GroupNorm or "
                "LayerNorm."
            )

    @property
    def _is_interrupted(self) -> bool:
        module = self.lightning_module
        assert module is not None
        trainer = module._trainer
        return trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED

    def _synchronize(self) -> None:
        # After an exception the other ranks may wait for something else, or be gone.
        if self._owners is not None and not self._is_interrupted:
            self._owners.synchronize()

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._step, PipelinedStep):
            try:
                with self._plain_parameters():
                    return self._step(*args, **kwargs)
            except NotOneGraphError as error:
                if self.capture == "step":
                    raise
                reason = error
            # All ranks come here: they have captured the same step for the same batch.
            module = self.lightning_module
            assert module is not None
            self._step.detach()
            steps = steps_of(module)
            if steps is not None:
                raise not_one_graph(steps, reason) from reason
            rank_zero_warn(
                f"PipelineStrategy: only forward runs as a pipeline from here on, and the step "
                f"around it on the rank of the last stage: {reason}"
            )
            self._step = PipelinedForward(module, self._how, self._plain_parameters)
        assert self._step is not None
        return self._step(*args, **kwargs)

    def _own(self, names: list[set[str]]) -> None:
        """After a step: who has what; a step that was captured anew may use more parameters."""
        module = self.lightning_module
        assert module is not None
        if self._owners is None or names != self._owners.names:
            if self._owners is not None:
                self._owners.freed.take()
            self._owners = Owners(module, names, self.grid.pipeline, frees=self.free_unowned)
        self._owners.free(self.optimizers)

    def _plain_parameters(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._owners is None else self._owners.freed.plain()

    def _release(self) -> None:
        self._is_training = False
        if self._owners is not None:
            self._owners.freed.lose()
        self._changes.close()
        for one in self._marks:
            one.remove()
        self._marks = ()
        if isinstance(self._step, PipelinedStep):
            self._step.detach()
        self._step = None

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if self._owners is not None:
            parameters = self.precision_plugin.main_params(optimizer)
            self._owners.clip_norm(parameters, float(clip_val))
