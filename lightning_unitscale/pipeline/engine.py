"""Run the stages of a rank with the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

from lightning_unitscale.patching import nothing
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.program import split_batch
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.pipeline.stage import StageModule
from lightning_unitscale.pipeline.stage_owners import SharedGradients
from lightning_unitscale.pipeline.torch_engine import BreadthFirst, EngineStage

# Returns the loss of a microbatch, given its index and the outputs of the last stage.
Finish = Callable[[int, tuple[Any, ...]], Tensor]
Replaced = Mapping[int, Callable[..., Any]]  # functions that replace stages, by stage index


class PipelineRunner:
    """This rank's part of a pipeline.

    Every rank makes one for the same pipeline and calls :meth:`step` with the same batch. A step
    adds the gradients of the mean of the microbatches' losses to ``.grad``. If a loss is a mean
    over the valid targets, the losses are weighted by the numbers of these targets. Their mean is
    then the loss of the batch. A warning reports any other loss whose mean is not that of the
    batch.

    Args:
        pipe: The pipeline; training needs a loss.
        schedule: Name of the schedule: ``GPipe``, ``1F1B``, ``Interleaved1F1B``, ``LoopedBFS``,
            ``InterleavedZeroBubble``, ``ZBVZeroBubble`` or ``DualPipeV``.
        num_microbatches: Microbatches of a step.
        device: The device of this rank's stages.
        group: Process group with one rank per device of the pipeline; all ranks by default.

    Attributes:
        stage_indices: This rank's stages, in ascending order.
        stages: The modules of these stages.
        num_accumulated: Number of accumulated batches; each loss is divided by it.
        last_rank: The rank of the last stage, which has the results.
        is_last: Whether this rank has the last stage.
        before_stage: Called with the index of a microbatch before a stage runs it.

    Raises:
        ValueError: If the schedule cannot run the pipeline's stages on the group's ranks.
        RuntimeError: If there is no process group.
    """

    def __init__(
        self,
        pipe: Pipe,
        schedule: str = "1F1B",
        *,
        num_microbatches: int,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "PipelineRunner: there is no process group. Expected one rank per device. Call "
                "torch.distributed.init_process_group first, or Pipe(...) for one process."
            )
        self.pipe = pipe
        self.schedule = find_schedule(schedule)
        self.num_microbatches = num_microbatches
        self.num_accumulated = 1
        self.device = torch.device(device)
        self.group = group
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.schedule.check(pipe.num_stages, num_ranks, num_microbatches)
        self.stage_indices = self.schedule.stages_of(rank, num_ranks, pipe.num_stages)
        self.stages = tuple(
            pipe.get_stage_module(index).on_device(self.device) for index in self.stage_indices
        )
        self.last_rank = self.schedule.rank_of(pipe.num_stages - 1, num_ranks)
        self.is_last = self.last_rank == rank
        self.before_stage: Callable[[int], None] = nothing
        owners = {
            name: tuple(sorted({self.schedule.rank_of(stage, num_ranks) for stage in stages}))
            for name, stages in pipe.shared_parameters().items()
        }
        self.shared = SharedGradients(self.named_parameters(), owners, group)
        # The microbatches of the current step, and the results of the last stage.
        self._microbatches: list[list[Any]] = []
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._finish: Finish | None = None
        self._replaced: Replaced = {}
        self._weigh: Callable[[int, Tensor], Tensor] | None = None
        self._has_warned = False
        self._training: Any = None
        self._trained: list[EngineStage] = []
        self._forward: dict[int, Any] = {}

    def step(self, *args: Any, **kwargs: Any) -> list[Any] | None:
        """Run forward and backward of one batch.

        Args:
            *args: The module's arguments for the whole batch.
            **kwargs: Its keyword arguments.

        Returns:
            The module's results for each microbatch on the rank of the last stage. ``None`` on
            the other ranks.

        Raises:
            ValueError: If the batch is not ``num_microbatches`` times what was captured, or the
                pipeline has no loss.
        """
        reason = self.pipe.batch_loss.reason
        if reason and self.is_last and self.num_microbatches > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"PipelineRunner: training uses the mean of the losses of {self.num_microbatches} "
                f"microbatches, which is not the loss of the batch: {reason}. Reduce the loss by "
                "a mean over samples or over targets that count, or train with PipelineStrategy.",
                stacklevel=2,
            )
        return self.step_flat(split_batch(self.pipe.program, args, kwargs, self.num_microbatches))

    def eval(self, *args: Any, **kwargs: Any) -> list[Any] | None:
        """Run forward of one batch without gradients, called like :meth:`step`."""
        return self.eval_flat(split_batch(self.pipe.program, args, kwargs, self.num_microbatches))

    def step_flat(
        self,
        microbatches: list[list[Any]],
        finish: Finish | None = None,
        replaced: Replaced | None = None,
    ) -> list[Any] | None:
        """Run :meth:`step` for the flat inputs of each microbatch.

        ``finish`` makes the loss if the graph has none. All steps pass it, or none does. It is
        called for all microbatches before the first backward pass, under any schedule.
        ``replaced`` has functions that run instead of stages of this rank, unsplit.
        """
        if self.pipe.program.loss is None and finish is None:
            raise ValueError(
                "PipelineRunner.step: the pipeline has no loss to differentiate. Wrap the module "
                "in TrivialLossWrapper, or name the output with loss_spec."
            )
        if self._training is None:
            self._trained = self._engine_stages(True)
            if finish is not None or self.schedule.name == "LoopedBFS":
                self._training = BreadthFirst(
                    self.schedule, self._trained, self.num_microbatches, self._mean_part
                )
            else:
                engine: Any = get_schedule_class(self.schedule.name)
                self._training = engine(
                    self._trained[0] if self.schedule.placement == "single" else self._trained,
                    self.num_microbatches,
                    loss_fn=self._mean_part,
                    scale_grads=False,
                )
        self._finish, self._replaced = finish, replaced or {}
        for index, stage in zip(self.stage_indices, self._trained, strict=True):
            stage.whole = index in self._replaced
        with self.shared.summed(), torch.enable_grad():
            return self._run(self._training, microbatches)

    def eval_flat(self, microbatches: list[list[Any]]) -> list[Any] | None:
        """Run :meth:`eval` for the flat inputs of any number of microbatches."""
        count = len(microbatches)
        if count not in self._forward:
            self._forward[count] = BreadthFirst(self.schedule, self._engine_stages(False), count)
        with torch.no_grad():
            return self._run(self._forward[count], microbatches)

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of this rank's stages, by name."""
        return {name: param for stage in self.stages for name, param in stage.named_parameters()}

    def _run(self, schedule: Any, microbatches: list[list[Any]]) -> list[Any] | None:
        count = len(microbatches)
        self._microbatches, self._outputs = microbatches, {}
        # The engine passes only the index of a microbatch to a stage.
        indices = torch.arange(count)
        if self.is_last and count > 1:
            self._weigh = self.pipe.batch_loss.weighted(microbatches)
        try:
            schedule.step(microbatch=indices, target=indices, return_outputs=False)
            outputs = [self._outputs[index] for index in range(count) if self.is_last]
        finally:
            self._microbatches, self._outputs = [], {}
            self._finish, self._replaced, self._weigh = None, {}, None
        if not self.is_last:
            return None
        return [self.pipe.program.unflatten(list(values)) for values in outputs]

    def _engine_stages(self, has_backward: bool) -> list[EngineStage]:
        return [
            EngineStage(stage, self._run_stage, self.device, self.group, has_backward=has_backward)
            for stage in self.stages
        ]

    def _run_stage(self, stage: StageModule, *received: Tensor, microbatch: Tensor) -> Any:
        """Run a stage for one microbatch. The last stage returns the loss, if it is known."""
        info, index = stage.info, int(microbatch)
        inputs = self._microbatches[index]
        self.before_stage(index)
        run = self._replaced.get(info.index, stage)
        outputs = run(*received, *(inputs[position] for position in info.inputs))
        if not info.is_last:
            return outputs
        loss = self.pipe.program.loss
        if loss is not None and self._weigh is not None:
            outputs = (*outputs[:loss], self._weigh(index, outputs[loss]), *outputs[loss + 1 :])
        self._outputs[index] = tuple(
            value.detach() if isinstance(value, Tensor) else value for value in outputs
        )
        if self._finish is not None:
            return self._finish(index, outputs)
        if loss is not None:
            return outputs[loss]
        return next(value for value in outputs if isinstance(value, Tensor))

    def _mean_part(self, loss: Tensor, microbatch: Tensor) -> Tensor:
        # Dividing the gradients afterwards would also divide the accumulated ones.
        return loss / (self.num_microbatches * self.num_accumulated)
