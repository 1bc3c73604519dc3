"""Run a pipeline on several ranks: this rank's stages, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_unitscale.pipeline.microbatches import split_batch
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.runtime import (
    EngineSchedule,
    EngineStage,
    ForwardOnly,
    make_schedule,
)
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.pipeline.shared import SharedGradients
from lightning_unitscale.pipeline.stage import StageInfo, StageModule, stage_info

Finish = Callable[[int, tuple[Any, ...]], Tensor]
# What runs in the place of some stages, by their indices.
Replaced = Mapping[int, Callable[..., Any]]


class PipelineRunner:
    """This rank's part of a pipeline.

    Every rank makes one for the same pipeline and calls :meth:`step` with the same batch. A step is
    microbatch accumulation: the gradients are those of the mean of the microbatches' losses, and
    are added to what is in ``.grad``.

    Args:
        pipe: The pipeline; with a loss, if it shall be trained.
        schedule: Name of the schedule: one of ``GPipe``, ``1F1B``, ``Interleaved1F1B``,
            ``LoopedBFS``, ``InterleavedZeroBubble``, ``ZBVZeroBubble``, ``DualPipeV``.
        num_microbatches: Microbatches of a step.
        device: Where this rank's stages run.
        group: Process group with one rank for each device of the pipeline; all by default.

    Attributes:
        stage_indices: This rank's stages, in ascending order.
        stages: Their modules.
        num_accumulated: Batches whose gradients are added up: each has so much less of a share.
        last_rank: The rank of the last stage, and so of every result.
        is_last: Whether that is this rank.

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
                "PipelineRunner: there is no process group; expected one rank per device; call "
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
        owners = {
            name: tuple(sorted({self.schedule.rank_of(one, num_ranks) for one in stages}))
            for name, stages in pipe.shared_parameters().items()
        }
        own = {name: one for stage in self.stages for name, one in stage.named_parameters()}
        self.shared = SharedGradients(own, owners, group)
        self._batch = _Batch()
        self._training: EngineSchedule = None
        self._trained: list[EngineStage] = []
        self._forward: dict[int, EngineSchedule] = {}

    def step(self, *args: Any, **kwargs: Any) -> list[Any] | None:
        """Forward and backward of one batch.

        Args:
            *args: The module's arguments for the whole batch.
            **kwargs: Its keyword arguments.

        Returns:
            On the rank of the last stage the module's results, one for each microbatch; ``None`` on
            the others.

        Raises:
            ValueError: If the batch is not ``num_microbatches`` times what was captured, or the
                pipeline has no loss.
        """
        return self.step_flat(split_batch(self.pipe.program, args, kwargs, self.num_microbatches))

    def eval(self, *args: Any, **kwargs: Any) -> list[Any] | None:
        """Forward of one batch, without gradients; arguments and result as in :meth:`step`."""
        return self.eval_flat(split_batch(self.pipe.program, args, kwargs, self.num_microbatches))

    def step_flat(
        self,
        microbatches: list[list[Any]],
        finish: Finish | None = None,
        replaced: Replaced | None = None,
    ) -> list[Any] | None:
        """:meth:`step` for the flat inputs of each microbatch.

        Args:
            microbatches: The inputs.
            finish: Makes the loss of a microbatch from its place and the flat outputs of the last
                stage, where that runs; given to all steps of a pipeline or to none.
            replaced: What runs in the place of some of this rank's stages, with their arguments and
                results; its backward passes are not taken apart.
        """
        if self.pipe.program.loss is None and finish is None:
            raise ValueError(
                "PipelineRunner.step: the pipeline has no loss to differentiate; expected a module "
                "that returns one; wrap it in TrivialLossWrapper, or name the output with "
                "loss_spec."
            )
        if len(microbatches) != self.num_microbatches:
            raise ValueError(
                f"microbatches: {len(microbatches)} of them; expected "
                f"num_microbatches={self.num_microbatches}."
            )
        if self._training is None:
            self._trained = self._engine_stages(True)
            self._training = make_schedule(
                self.schedule, self._trained, self.num_microbatches, self._mean_part
            )
        self._batch.finish, self._batch.replaced = finish, replaced or {}
        for index, one in zip(self.stage_indices, self._trained, strict=True):
            one.at_once = index in self._batch.replaced
        self.shared.put_aside()
        with torch.enable_grad():
            result = self._run(self._training, microbatches)
        self.shared.combine()
        return result

    def eval_flat(self, microbatches: list[list[Any]]) -> list[Any] | None:
        """:meth:`eval` for the flat inputs of each microbatch, of which there may be any number."""
        count = len(microbatches)
        if count not in self._forward:
            self._forward[count] = ForwardOnly(self.schedule, self._engine_stages(False), count)
        with torch.no_grad():
            return self._run(self._forward[count], microbatches)

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Parameters of this rank's stages, by name."""
        return {name: one for stage in self.stages for name, one in stage.named_parameters()}

    def _run(self, schedule: EngineSchedule, microbatches: list[list[Any]]) -> list[Any] | None:
        count = len(microbatches)
        self._batch.inputs, self._batch.outputs = microbatches, {}
        # All that the engine hands to a stage is which microbatch it is.
        places = torch.arange(count)
        try:
            schedule.step(microbatch=places, target=places, return_outputs=False)
            outputs = [self._batch.outputs[place] for place in range(count) if self.is_last]
        finally:
            self._batch.inputs, self._batch.outputs, self._batch.finish = [], {}, None
            self._batch.replaced = {}
        if not self.is_last:
            return None
        return [self.pipe.program.unflatten(list(one)) for one in outputs]

    def _engine_stages(self, has_backward: bool) -> list[EngineStage]:
        return [
            EngineStage(
                _Fed(stage, self._batch, self.pipe.program.loss),
                self._engine_info(stage),
                self.device,
                self.group,
                has_backward=has_backward,
            )
            for stage in self.stages
        ]

    def _engine_info(self, stage: StageModule) -> StageInfo:
        info = stage_info(stage)
        # What a loss outside of the graph does with the stage's parameters is not known.
        return replace(info, separable=info.separable and self.pipe.program.loss is not None)

    def _mean_part(self, loss: Tensor, microbatch: Tensor) -> Tensor:
        # Dividing here rather than the gradients afterwards leaves alone what was accumulated.
        return loss / (self.num_microbatches * self.num_accumulated)


class _Batch:
    """The microbatches of the step that is running, and the results of the last stage."""

    def __init__(self) -> None:
        self.inputs: list[list[Any]] = []
        self.outputs: dict[int, tuple[Any, ...]] = {}
        self.finish: Finish | None = None
        self.replaced: Replaced = {}


class _Fed(nn.Module):
    """A stage that takes its share of the call's arguments by itself."""

    def __init__(self, stage: StageModule, batch: _Batch, loss: int | None) -> None:
        super().__init__()
        self.stage = stage
        self._info = stage_info(stage)
        self._batch = batch
        self._loss = loss

    @override
    def forward(self, *received: Tensor, microbatch: Tensor) -> Any:
        place = int(microbatch)
        given = self._batch.inputs[place]
        run = self._batch.replaced.get(self._info.index, self.stage)
        outputs = run(*received, *(given[one] for one in self._info.inputs))
        if not self._info.is_last:
            # A gradient of zeros would reach parameters that get none on one device.
            return tuple(
                value if passed.feeds_loss else value.detach()
                for value, passed in zip(outputs, self._info.sent, strict=True)
            )
        self._batch.outputs[place] = tuple(
            one.detach() if isinstance(one, Tensor) else one for one in outputs
        )
        if self._batch.finish is not None:
            return self._batch.finish(place, outputs)
        if self._loss is not None:
            return outputs[self._loss]
        return next(one for one in outputs if isinstance(one, Tensor))
