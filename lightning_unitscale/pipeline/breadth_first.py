"""Schedules that run all forward passes of a stage before its backward passes.

Checked on torch 2.13 and 2.11: ``_PipelineScheduleRuntime`` with its ``pipeline_order_with_comms``,
``_add_send_recv``, ``_calculate_single_rank_operations``, ``_Action`` and ``_ComputationType``.

What is worked around here:

- ``LoopedBFS`` adds gradients up from the last microbatch to the first, unlike all other schedules.
  Here it begins with the first, which takes as long.
- Multi-stage schedules fail, or run empty backward passes, where there are forward passes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.pipelining import ScheduleLoopedBFS
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from typing_extensions import override

from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.pipeline.torch_2_11 import Stage


class BreadthFirst(_PipelineScheduleRuntime):
    """All forward passes, then all backward passes if there is a loss."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        num_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False)
        # The engine's own preparation asks for as many backward passes as forward ones.
        self.stage_index_to_group_rank = {
            stage: schedule.rank_of(stage, self.pp_group_size) for stage in range(self._num_stages)
        }
        for stage in self._stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        kinds = [_ComputationType.FORWARD]
        if loss_fn is not None:
            kinds.append(_ComputationType.FULL_BACKWARD)
        actions: dict[int, list[_Action]] = {}
        for rank in range(self.pp_group_size):
            own = schedule.stages_of(rank, self.pp_group_size, self._num_stages)
            actions[rank] = [
                _Action(stage, kind, microbatch)
                for kind in kinds
                for stage in (own if kind is _ComputationType.FORWARD else reversed(own))
                for microbatch in range(num_microbatches)
            ]
        self.pipeline_order_with_comms = _add_send_recv(
            actions,
            stage_to_rank=self.stage_index_to_group_rank.__getitem__,
            num_stages=self._num_stages,
        )


class AscendingBFS(ScheduleLoopedBFS):
    """Breadth first, with the backward passes in the order of the microbatches."""

    @override
    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        last = self._n_microbatches - 1
        return [
            action._replace(microbatch_index=last - action.microbatch_index)
            if action is not None and action.computation_type is _ComputationType.FULL_BACKWARD
            else action
            for action in super()._calculate_single_rank_operations(rank)
        ]
