"""Run the stages of a rank by a schedule, with gradients of shared parameters added up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_unitscale.pipeline.engine import (
    EngineSchedule,
    EngineStage,
    ForwardOnly,
    make_schedule,
)
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.program import split_batch
from lightning_unitscale.pipeline.schedules import find_schedule
from lightning_unitscale.pipeline.stage import StageModule, stage_info


class SharedGradients:
    """Sums the gradients of replicated parameters over the ranks that have them.

    Args:
        parameters: This rank's parameters that others have too, by name.
        owners: For every replicated parameter, of this rank or not, the ranks in ``group`` that
            have it, in ascending order.
        group: The pipeline's process group.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, tuple[int, ...]],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.owners = {name: ranks for name, ranks in sorted(owners.items()) if len(ranks) > 1}
        self.parameters = {name: parameters[name] for name in self.owners if name in parameters}
        self._group = group
        self._rank = dist.get_rank(group)
        self._aside: dict[str, Tensor | None] = {}

    def put_aside(self) -> None:
        """Before a step: keep the gradients accumulated so far, which are summed already."""
        self._aside = {name: param.grad for name, param in self.parameters.items()}
        for param in self.parameters.values():
            param.grad = None

    def combine(self) -> None:
        """After a step: sum the new gradients over their ranks and add the earlier ones."""
        # All ranks go through the names in one order, so that no two wait for each other.
        for name, parameter in self.parameters.items():
            parameter.grad = self._sum(parameter, self.owners[name])
        for name, earlier in self._aside.items():
            parameter = self.parameters[name]
            if earlier is not None:
                new = parameter.grad
                parameter.grad = earlier if new is None else earlier + new
        self._aside = {}

    def _sum(self, parameter: nn.Parameter, ranks: tuple[int, ...]) -> Tensor | None:
        """The sum over the owners, in the order of their ranks: the same bits on all of them."""
        first, *others = ranks
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        # A parameter that no rank has a gradient of keeps none, as on one device.
        present = torch.tensor([parameter.grad is not None], device=own.device).int()
        for rank in others:
            for total in (present, own):
                if self._rank == rank:
                    dist.send(total, group=self._group, group_dst=first)
                elif self._rank == first:
                    part = torch.empty_like(total)
                    dist.recv(part, group=self._group, group_src=rank)
                    total += part
        for total in (present, own):
            hand_out(total, ranks, self._group)
        return own if present.item() else None


def hand_out(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None) -> None:
    """Give ranks the tensor of the first of them; each of them calls it.

    Args:
        tensor: Contiguous; overwritten on all ranks but the first.
        ranks: The ranks in ``group``, this one among them.
        group: The pipeline's process group.
    """
    first, *others = ranks
    if dist.get_rank(group) != first:
        dist.recv(tensor, group=group, group_src=first)
        return
    for rank in others:
        dist.send(tensor, group=group, group_dst=rank)


Finish = Callable[[int, tuple[Any, ...]], Tensor]
# What runs in the place of some stages, by their indices.
Replaced = Mapping[int, Callable[..., Any]]


class PipelineRunner:
    """This rank's part of a pipeline.

    Every rank makes one for the same pipeline and calls :meth:`step` with the same batch. A step is
    microbatch accumulation: the gradients are those of the mean of the microbatches' losses, and
    are added to what is in ``.grad``.

    Args:
        pipe: The pipeline; with a loss, if it is to be trained.
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
            name: tuple(sorted({self.schedule.rank_of(stage, num_ranks) for stage in stages}))
            for name, stages in pipe.shared_parameters().items()
        }
        own = {name: param for stage in self.stages for name, param in stage.named_parameters()}
        self.shared = SharedGradients(own, owners, group)
        # The microbatches of the step that is running, and the results of the last stage.
        self._microbatches: list[list[Any]] = []
        self._outputs: dict[int, tuple[Any, ...]] = {}
        self._finish: Finish | None = None
        self._replaced: Replaced = {}
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
        self._finish, self._replaced = finish, replaced or {}
        for index, stage in zip(self.stage_indices, self._trained, strict=True):
            # What follows the last stage's graph may hang hooks on its results.
            is_followed = self.pipe.program.loss is None and index == self.pipe.num_stages - 1
            stage.whole = index in self._replaced or is_followed
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
        return {name: param for stage in self.stages for name, param in stage.named_parameters()}

    def _run(self, schedule: EngineSchedule, microbatches: list[list[Any]]) -> list[Any] | None:
        count = len(microbatches)
        self._microbatches, self._outputs = microbatches, {}
        # All that the engine hands to a stage is which microbatch it is.
        indices = torch.arange(count)
        try:
            schedule.step(microbatch=indices, target=indices, return_outputs=False)
            outputs = [self._outputs[index] for index in range(count) if self.is_last]
        finally:
            self._microbatches, self._outputs = [], {}
            self._finish, self._replaced = None, {}
        if not self.is_last:
            return None
        return [self.pipe.program.unflatten(list(values)) for values in outputs]

    def _engine_stages(self, has_backward: bool) -> list[EngineStage]:
        return [
            EngineStage(
                stage,
                partial(self._run_stage, stage),
                self.device,
                self.group,
                has_backward=has_backward,
            )
            for stage in self.stages
        ]

    def _run_stage(self, stage: StageModule, *received: Tensor, microbatch: Tensor) -> Any:
        """The outputs of a stage for one microbatch; of the last one the loss, if it is known."""
        info, index = stage_info(stage), int(microbatch)
        inputs = self._microbatches[index]
        run = self._replaced.get(info.index, stage)
        outputs = run(*received, *(inputs[position] for position in info.inputs))
        if not info.is_last:
            return outputs
        self._outputs[index] = tuple(
            value.detach() if isinstance(value, Tensor) else value for value in outputs
        )
        if self._finish is not None:
            return self._finish(index, outputs)
        loss = self.pipe.program.loss
        if loss is not None:
            return outputs[loss]
        return next(value for value in outputs if isinstance(value, Tensor))

    def _mean_part(self, loss: Tensor, microbatch: Tensor) -> Tensor:
        # Dividing here rather than the gradients afterwards leaves alone what was accumulated.
        return loss / (self.num_microbatches * self.num_accumulated)
