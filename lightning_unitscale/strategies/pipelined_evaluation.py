"""Run a module's own validation, test and prediction steps forward through the pipeline.

A batch is one microbatch, unless the strategy is told otherwise, so that the step computes what it
computes on one device, whatever it makes of its batch: nothing is averaged. The stages then run one
after the other, which takes as long as every rank running all of them, and needs no more weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.graph.compiled_graph import CompiledGraph
from lightning_unitscale.pipeline.microbatches import split_evenly
from lightning_unitscale.pipeline.step_program import static_shapes
from lightning_unitscale.strategies.pipelined_method import (
    NotOneGraphError,
    PipelinedMethod,
    Pipelining,
    Rehearsal,
    Replay,
)

# Graphs for batches of one size, each of which has to be captured and cut.
_MAX_ALIKE = 4


class NotPipelinedError(RuntimeError):
    """A step cannot run as a pipeline; nothing of it has run."""


class PipelinedEvaluation(PipelinedMethod):
    """A step without a backward pass, whose graph runs on several ranks.

    Args:
        module: The module.
        name: The method.
        how: The schedule, and the rest.
        num_microbatches: Equal parts of a batch.
    """

    def __init__(
        self, module: nn.Module, name: str, how: Pipelining, num_microbatches: int
    ) -> None:
        # What callbacks make of it runs whole, where it is something else.
        super().__init__(module, name, how, defer=("log", "log_dict"), plain=True)
        self._num_microbatches = num_microbatches
        # By the sizes of what goes in.
        self._graphs_for: dict[tuple[torch.Size, ...], dict[int, CompiledGraph]] = {}

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of the step for a batch, on all ranks.

        Raises:
            NotPipelinedError: If the step cannot run as a pipeline.
            ValueError: If the batch cannot be divided.
        """
        count = self._num_microbatches
        parts = [batch] if count == 1 else split_evenly(batch, count)
        with static_shapes():
            try:
                rehearsal = self.rehearse([((part, *args), kwargs) for part in parts])
            except NotOneGraphError as error:
                raise NotPipelinedError(str(error)) from error
            self._refuse_another_for_every_batch(rehearsal)
            try:
                runner = self.runner_for(rehearsal, None)
            except (RuntimeError, ValueError) as error:
                # It uses parameters in another order than the training, or has too few places.
                raise NotPipelinedError(
                    f"{type(self.module).__name__}.{self.name} cannot be cut as the training is: "
                    f"{error}"
                ) from error
            outputs = runner.eval_flat(self.inputs_of(rehearsal))
            examples = rehearsal.calls[0][2]
            values = self.shared_results(runner, examples, outputs, count)
            replay = Replay(self.name, rehearsal.graph, values)
            return self.steps.steps[self.name].replay(replay, parts[0], *args, **kwargs)

    def _refuse_another_for_every_batch(self, rehearsal: Rehearsal) -> None:
        sizes = tuple(one.shape for one in rehearsal.calls[0][1] if isinstance(one, Tensor))
        graphs = self._graphs_for.setdefault(sizes, {})
        graphs[id(rehearsal.graph)] = rehearsal.graph
        if len(graphs) > _MAX_ALIKE:
            raise NotPipelinedError(
                f"{type(self.module).__name__}.{self.name} was {len(graphs)} graphs for batches of "
                "one size; expected a step whose course does not depend on how often it is called; "
                "keep counters of calls out of it"
            )
