"""Train an unmodified LightningModule as a pipeline over several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_instance,
    check_positive,
)
from lightning_unitscale.capture.dynamo_capture import unmarked
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.loops.loop import leaving_after
from lightning_unitscale.matmuls.scaled_methods import run_in_session
from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.pipeline.balance import balanced_split
from lightning_unitscale.pipeline.called_module import PipelinedForward
from lightning_unitscale.pipeline.checks import (
    check_equal,
    needs_whole_step,
    not_one_graph,
    refuse_optimizers,
    refuse_unsupported,
)
from lightning_unitscale.pipeline.cuts import SplitPolicy, marked
from lightning_unitscale.pipeline.evaluation import SavingStrategy
from lightning_unitscale.pipeline.pipelined_method import NotPipelinedError, PipelinedStep
from lightning_unitscale.pipeline.rank_parameters import Owners, give_first_weights
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.pipeline.stage_owners import Ownership

_SPLITS: Any = (str, Mapping, Callable)


class PipelineStrategy(SavingStrategy):
    """A Trainer strategy that cuts ``training_step`` into stages, one or more per device.

    The module is not rewritten. The step is captured with its loss, balanced over the ranks, and
    run by microbatches. Loss and gradients are those of the whole batch, also if the loss is a mean
    over tokens and some tokens are ignored. ``self.log`` works on all ranks. Checkpoints have the
    layout and the names of a single device.

    Args:
        schedule: One of ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ``LoopedBFS``,
            ``InterleavedZeroBubble``, ``ZBVZeroBubble``, ``DualPipeV``.
        num_microbatches: Number of equal parts of every batch.
        data_parallel: Number of parallel pipelines. They divide the devices and the data, and
            average their gradients as in DDP.
        stages_per_rank: Stages on each device. ``"auto"`` uses the fewest that the schedule needs.
        split: ``"auto"`` balances the stages by the profiler's costs, unless the code calls
            ``pipe_split()``. Or a dict from submodule paths to the edge to cut, or a split policy.
        capture: ``"step"`` runs ``training_step`` with its loss as a pipeline. ``"forward"`` runs
            the module that it calls (``self(...)``, or a submodule with most parameters). The rank
            of the last stage then runs the step once on the outputs of all microbatches. ``"auto"``
            tries ``"step"``, and otherwise uses ``"forward"`` with the reason in a warning. Rules
            and memory budgets need ``"step"``.
        free_unowned: Whether a rank frees parameters of other ranks' stages, with their gradients
            and optimizer state, after the first step is cut. They return for a checkpoint (on the
            first rank), while an evaluation runs the whole module, and at the end of the
            training. They also return for a validation whose hooks read weights before its batches.
            Reading a freed parameter raises an error. With ``False``, unowned parameters have
            outdated values.
        evaluation: ``"pipeline"`` runs validation, test and prediction through the stages.
            ``"whole"`` runs the whole module on every rank, with all weights. ``"auto"`` uses the
            pipeline, or the whole module with a warning if a step is not one graph.
        num_eval_microbatches: Number of equal parts of an evaluation batch. With one, results are
            those of one device. With more, several stages work at once, and numbers that a step
            logs or returns are averaged as in training.
        check_batches: Number of first steps in which the ranks compare their batches.
        process_group_backend: As in DDP.
        timeout: Seconds after which a waiting rank gives up.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> PipelineStrategy("1F1B", num_microbatches=8).schedule.name
        '1F1B'
    """

    _step: PipelinedStep | PipelinedForward | None = None

    def __init__(
        self,
        schedule: str = "1F1B",
        *,
        num_microbatches: int,
        data_parallel: int = 1,
        stages_per_rank: int | str = "auto",
        split: str | Mapping[str, SplitPoint] | SplitPolicy = "auto",
        capture: str = "auto",
        free_unowned: bool = True,
        evaluation: str = "auto",
        num_eval_microbatches: int = 1,
        check_batches: int = 2,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        check_count("num_microbatches", num_microbatches)
        check_count("data_parallel", data_parallel)
        check_count("num_eval_microbatches", num_eval_microbatches)
        check_count("check_batches", check_batches, least=0)
        check_flag("free_unowned", free_unowned)
        check_positive("timeout", timeout, "seconds")
        if not (isinstance(stages_per_rank, str) and stages_per_rank == "auto"):
            check_count("stages_per_rank", stages_per_rank)
        expected = "'auto', a dict of paths of submodules to a SplitPoint, or a split policy"
        if isinstance(split, str) and split != "auto":
            raise ValueError(
                f"split={split!r}: unknown. Expected {expected}. Leave it out for 'auto'."
            )
        check_instance("split", split, _SPLITS, expected, "leave it out for 'auto'")
        if process_group_backend is not None:
            name, expected = "process_group_backend", "the name of a backend, such as 'gloo'"
            check_instance(name, process_group_backend, str, expected, "leave it out")
        captures, advice = ("auto", "step", "forward"), "leave it out for 'auto'"
        check_choice("capture", capture, captures, "nothing that can be captured", advice)
        _check_evaluation(evaluation, num_eval_microbatches)
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
        self.evaluation = evaluation
        self.num_eval_microbatches = num_eval_microbatches
        self.check_batches = check_batches
        self._changes = contextlib.ExitStack()
        self._stash: dict[nn.Parameter, Tensor] = {}

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Give all ranks the same weights, and create the optimizers."""
        module = self.own_module
        assert self.model is not None and self.accelerator is not None
        refuse_unsupported(trainer, module, self.precision_plugin, self.capture, self.schedule)
        self._owners, self._has_weights = None, True
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        give_first_weights(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        self._changes.close()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        self._changes.enter_context(leaving_after(callbacks, self._release, always=False))
        # Evaluations and ``forward`` are captured without replacing methods of the module.
        self._changes.enter_context(unmarked(module))
        self._prepare_step(module, trains=trainer.state.fn == TrainerFn.FITTING)
        self.setup_precision_plugin()
        # ``clip_gradients`` calls this method (Lightning 2.6). A rank has a part of the gradients.
        plugin = self.precision_plugin
        clip = Replacement(plugin.clip_grad_by_norm, self._clip_by_norm)
        self._changes.enter_context(shadowed(plugin, clip_grad_by_norm=clip))
        first_hook = module.on_validation_model_eval

        def begin_validation() -> None:
            self.before_validation()
            first_hook()

        begin = Replacement(first_hook, begin_validation)
        self._changes.enter_context(shadowed(module, on_validation_model_eval=begin))
        self._hooks_read = None
        self._changes.enter_context(self.metrics_over_pipelines(module))
        self._changes.enter_context(self.order_of_loaders(trainer))

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of all microbatches. ``backward`` adds the gradients later."""
        module = self.own_module
        if not self._steps_done:
            # Hooks such as on_train_start may have drawn different weights on each rank.
            give_first_weights(module)
        if self._steps_done < self.check_batches:
            check_equal(args[0], self.grid.pipeline)
        parameters = list(module.parameters())
        earlier = [param.grad for param in parameters]
        for param in parameters:
            param.grad = None
        try:
            with self.precision_plugin.train_step_context():
                result = run_in_session(
                    module, "training_step", self._run_pipelined, *args, **kwargs
                )
            self._stash = {param: param.grad for param in parameters if param.grad is not None}
        finally:
            # Lightning clears the gradients between here and backward.
            for param, gradient in zip(parameters, earlier, strict=True):
                param.grad = gradient
        self._own()
        self._steps_done += 1
        return result

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Add the gradients of the step."""
        module = self.own_module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in self._stash.items():
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient
        self._stash = {}
        if self._owners is not None and not self._is_accumulating:
            self._owners.average_gradients()
        return self.precision_plugin.post_backward(closure_loss, module)

    def num_gradient_elements(self, parameters: Iterable[Tensor]) -> int:
        """Return the number of elements with a gradient, for parameters of all ranks."""
        assert self._owners is not None
        return self._owners.num_gradient_elements(parameters)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._release()

    @override
    def teardown(self) -> None:
        self._release()
        super().teardown()

    def _prepare_step(self, module: pl.LightningModule, *, trains: bool) -> None:
        num_ranks = dist.get_world_size(self.grid.pipeline)
        per_rank = self.stages_per_rank
        if per_rank == "auto":
            per_rank = 1 if self.schedule.placement == "single" else 2
        num_stages = int(per_rank) * num_ranks
        self.schedule.check(num_stages, num_ranks, self.num_microbatches)
        rank_of = partial(self.schedule.rank_of, num_ranks=num_ranks)
        policy: SplitPolicy = balanced_split(
            num_stages, rank_of=rank_of, num_microbatches=self.num_microbatches
        )
        if isinstance(self.split, Mapping):
            self._changes.enter_context(marked(module, self.split))
        elif not isinstance(self.split, str):
            policy = self.split
        self.ownership = Ownership(module, num_ranks, rank_of, policy)
        self._evaluations = {}
        self._steps_done, self._is_training = 0, trains
        if not trains:
            return
        if self.capture == "forward":
            self._step = PipelinedForward(self, self._plain_parameters)
        else:
            self._step = PipelinedStep(self, self._own_first)

    def _run_pipelined(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._step, PipelinedStep):
            try:
                with self._plain_parameters():
                    return self._step(*args, **kwargs)
            except NotPipelinedError as error:
                reason = error
            if self._step.set_up(*args, **kwargs):
                return self._run_pipelined(*args, **kwargs)
            if self.capture == "step":
                raise reason
            # All ranks reach this line, since they captured the same step for the same batch.
            module = self.own_module
            self._step.detach()
            steps = steps_of(module)
            if steps is not None and needs_whole_step(steps):
                raise not_one_graph(steps, reason) from reason
            rank_zero_warn(
                "PipelineStrategy: from here on, only the module that the step calls runs as a "
                "pipeline, with all forward passes before the backward passes. The rank of the "
                f"last stage runs the step around it: {reason}"
            )
            self._step = PipelinedForward(self, self._plain_parameters, reason)
        assert self._step is not None
        return self._step(*args, **kwargs)

    def _own_first(self) -> contextlib.AbstractContextManager[Any]:
        """Free the parameters of other ranks before the first step, to make room for it."""
        if self._owners is not None:
            return contextlib.nullcontext()
        self._own()
        return self._plain_parameters()

    def _own(self) -> None:
        """Note the owners after a step. A recaptured step may use more parameters."""
        ownership, grid = self.ownership, self.grid
        if self._owners is None or ownership.names != self._owners.names:
            if self._owners is not None:
                self._owners.freed.take()
            self._owners = Owners(
                self.own_module, ownership, grid.pipeline, grid.replicas, frees=self.free_unowned
            )
        self._owners.free(self.optimizers)
        self._has_weights = False

    def _release(self) -> None:
        self._is_training = False
        step, self._step, self._evaluations = self._step, None, {}
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        with contextlib.ExitStack() as leaving:  # runs all callbacks, even if one raises
            if isinstance(step, PipelinedStep):
                leaving.callback(step.detach)
            leaving.callback(self._changes.close)
            if self._owners is not None:
                leaving.callback(self._owners.freed.lose)

    def _clip_by_norm(self, optimizer: Optimizer, limit: float) -> None:
        if self._owners is not None:
            parameters = self.precision_plugin.main_params(optimizer)
            self._owners.clip_norm(parameters, float(limit))


def _check_evaluation(evaluation: str, num_microbatches: int) -> None:
    ways = ("auto", "pipeline", "whole")
    check_choice("evaluation", evaluation, ways, "no way to evaluate", "leave it out for 'auto'")
    if evaluation == "whole" and num_microbatches != 1:
        raise ValueError(
            f"num_eval_microbatches={num_microbatches} with evaluation='whole': the module is "
            "evaluated whole, on every rank. Expected evaluation='pipeline' or 'auto' with "
            "microbatches. Change it, or leave num_eval_microbatches out."
        )
