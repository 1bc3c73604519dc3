"""Run a module's own step, with its loss, as a pipeline.

Once the pipeline has run, the step is called once more with the pipeline's results in the graph's
place, and what it logs and returns is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_unitscale.pipeline.microbatches import split_evenly
from lightning_unitscale.pipeline.runner import PipelineRunner
from lightning_unitscale.pipeline.step_program import static_shapes
from lightning_unitscale.remat.step_partitioner import Granted, StepPartitioner
from lightning_unitscale.strategies.pipelined_method import (
    PipelinedMethod,
    Pipelining,
    Rehearsal,
    Replay,
)
from lightning_unitscale.strategies.stage_remat import RematStage, remat_stages

_NAME = "training_step"


class PipelinedStep(PipelinedMethod):
    """A ``training_step`` whose graph runs on several ranks.

    Args:
        module: The module.
        how: The schedule, and the rest.
        cut: Entered from where a step is cut, if it had to be, until it has run.
    """

    def __init__(
        self,
        module: nn.Module,
        how: Pipelining,
        cut: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(module, _NAME, how, defer=("log", "log_dict"))
        self._is_cut = cut
        self._remat: dict[int, dict[int, RematStage]] = {}
        self._granted: dict[int, Granted] = {}

    def attach(self) -> None:
        """Capture the module's step from now on."""
        self.steps.attach(type(self).__name__)

    def detach(self) -> None:
        """Give the module its own step back. Idempotent."""
        self.steps.detach(type(self).__name__)

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch; the result of the step for it.

        Raises:
            NotOneGraphError: If the step is not one graph; nothing has been run then.
            RuntimeError: If it returns no loss.
        """
        step = self.steps.steps[_NAME]
        parts = split_evenly(batch, self.how.num_microbatches)
        with static_shapes():
            rehearsal = self.rehearse([((part, *args), kwargs) for part in parts])
            examples = rehearsal.calls[0][2]
            runner = self.runner_for(rehearsal, self._loss(rehearsal.results[0], examples))
            for one in self.steps.passes:
                one.before_step(self.module)
            inputs = self.inputs_of(rehearsal)
            # A budget that is refused leaves the module as it is.
            planned = self._planned(runner, inputs[0])
            with self._is_cut():
                outputs = self._run(runner, rehearsal, inputs, planned)
                values = self.shared_results(runner, examples, outputs, self.how.num_microbatches)
                step.interpreter = Replay(_NAME, rehearsal.graph, values)
                try:
                    return step(parts[0], *args, **kwargs)
                finally:
                    step.interpreter = None

    def _run(
        self,
        runner: PipelineRunner,
        rehearsal: Rehearsal,
        inputs: list[list[Any]],
        planned: Mapping[int, RematStage],
    ) -> list[Any] | None:
        if not self.steps.observed:
            return runner.step_flat(inputs, replaced=planned)
        observed = self.observed_stages(rehearsal)
        observed.begin()
        outputs = runner.step_flat(inputs, replaced=observed.run)
        observed.finish()
        return outputs

    def _planned(self, runner: PipelineRunner, microbatch: list[Any]) -> Mapping[int, RematStage]:
        """The stages within a memory budget, if there is one."""
        partitioner = self.steps.partition_fn
        if not isinstance(partitioner, StepPartitioner):
            return {}
        if id(runner) not in self._remat:
            elsewhere = self.how.names_elsewhere if self.how.free_unowned else ()
            self._remat[id(runner)] = remat_stages(
                runner, microbatch, partitioner, self.module, elsewhere, self._granted
            )
        return self._remat[id(runner)]

    def _loss(self, result: Any, examples: list[Any]) -> int:
        loss = result["loss"] if isinstance(result, dict) else result
        found = [place for place, one in enumerate(examples) if one is loss]
        if not found:
            raise RuntimeError(
                f"{type(self.module).__name__}.{_NAME} returned {type(loss).__name__}, which is no "
                "result of its captured graph; expected the loss, or a dict with the key 'loss'."
            )
        return found[0]
