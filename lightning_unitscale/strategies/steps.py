"""Run a module's own steps as pipelines: training with its loss, validation, test, prediction.

Once the pipeline has run, the step is called once more with the pipeline's results in the graph's
place, and what it logs and returns is made of them.

In an evaluation a batch is one microbatch by default, so that the step computes what it computes on
one device, and nothing is averaged. The stages then run one after the other, which takes as long as
every rank running all of them, and needs no more weights.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn
from typing_extensions import override

from lightning_unitscale.capture.compiled_graph import CompiledGraph
from lightning_unitscale.capture.graph_call import GraphCall
from lightning_unitscale.capture.steps import ModuleSteps, steps_of
from lightning_unitscale.pipeline.capture import example_outputs, loss_position, static_shapes
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.pipeline.runner import PipelineRunner
from lightning_unitscale.remat.api import Granted, StepPartitioner
from lightning_unitscale.strategies.capture import (
    NotOneGraphError,
    PipelinedMethod,
    Pipelining,
    Replay,
)
from lightning_unitscale.strategies.grid import GridStrategy
from lightning_unitscale.strategies.remat import StageRun, remat_stages

_NAME = "training_step"


class PipelinedStep(PipelinedMethod):
    """A ``training_step`` whose graph runs on several ranks.

    Args:
        module: The module.
        pipelining: Settings of the module's pipelines.
        cut_context: Entered from where the step is cut (when it first runs) until it has run.
    """

    def __init__(
        self,
        module: nn.Module,
        pipelining: Pipelining,
        cut_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(module, _NAME, pipelining, defer=("log", "log_dict"))
        self._cut_context = cut_context
        self._remat: dict[int, dict[int, StageRun]] = {}
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
        parts = split_evenly(batch, self.pipelining.num_microbatches)
        with static_shapes():
            calls = self.graph_calls([((part, *args), kwargs) for part in parts])
            examples = example_outputs(calls[0].graph.base)
            loss = functools.partial(self._loss, calls[0], (parts[0], *args), kwargs)
            runner = self.runner_for(calls[0], loss)
            for graph_pass in self.steps.passes:
                graph_pass.before_step(self.module)
            inputs = self.inputs_of(calls)
            # A budget that is refused leaves the module as it is.
            planned = self._planned(runner, inputs[0])
            with self._cut_context():
                outputs = self._run(runner, calls[0], inputs, planned)
                values = self.shared_results(
                    runner, examples, outputs, self.pipelining.num_microbatches
                )
                step.interpreter = Replay(_NAME, calls[0].graph, values)
                try:
                    return step(parts[0], *args, **kwargs)
                finally:
                    step.interpreter = None

    def _run(
        self,
        runner: PipelineRunner,
        call: GraphCall,
        inputs: list[list[Any]],
        planned: Mapping[int, StageRun],
    ) -> list[Any] | None:
        if not self.steps.observed:
            return runner.step_flat(inputs, replaced=planned)
        observed = self.observed_stages(call)
        observed.begin()
        outputs = runner.step_flat(inputs, replaced=observed.run)
        observed.finish()
        return outputs

    def _planned(self, runner: PipelineRunner, microbatch: list[Any]) -> Mapping[int, StageRun]:
        """The stages within a memory budget, if there is one."""
        partitioner = self.steps.partition_fn
        if not isinstance(partitioner, StepPartitioner):
            return {}
        if id(runner) not in self._remat:
            elsewhere = self.pipelining.names_elsewhere if self.pipelining.free_unowned else ()
            self._remat[id(runner)] = remat_stages(
                runner, microbatch, partitioner, self.module, elsewhere, self._granted
            )
        return self._remat[id(runner)]

    def _loss(self, call: GraphCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        position = loss_position(self.steps.steps[_NAME], call, args, kwargs)
        if position is None:
            raise RuntimeError(
                f"{type(self.module).__name__}.{_NAME} returns no result of its captured graph; "
                "expected the loss, or a dict with the key 'loss'."
            )
        return position


# Graphs for batches of one size, each of which has to be captured and cut.
_MAX_ALIKE = 4


class NotPipelinedError(RuntimeError):
    """A step cannot run as a pipeline; nothing of it has run."""


class PipelinedEvaluation(PipelinedMethod):
    """A step without a backward pass, whose graph runs on several ranks.

    Args:
        module: The module.
        name: The method.
        pipelining: Settings of the module's pipelines.
        num_microbatches: Equal parts of a batch.
    """

    def __init__(
        self, module: nn.Module, name: str, pipelining: Pipelining, num_microbatches: int
    ) -> None:
        # What callbacks make of it runs whole, where it is something else.
        super().__init__(module, name, pipelining, defer=("log", "log_dict"), plain=True)
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
                calls = self.graph_calls([((part, *args), kwargs) for part in parts])
            except NotOneGraphError as error:
                raise NotPipelinedError(str(error)) from error
            self._refuse_another_for_every_batch(calls[0])
            try:
                runner = self.runner_for(calls[0])
            except (RuntimeError, ValueError) as error:
                # It uses parameters in another order than the training, or has too few places.
                raise NotPipelinedError(
                    f"{type(self.module).__name__}.{self.name} cannot be cut as the training is: "
                    f"{error}"
                ) from error
            outputs = runner.eval_flat(self.inputs_of(calls))
            examples = example_outputs(calls[0].graph.base)
            values = self.shared_results(runner, examples, outputs, count)
            replay = Replay(self.name, calls[0].graph, values)
            return self.steps.steps[self.name].replay(replay, parts[0], *args, **kwargs)

    def _refuse_another_for_every_batch(self, call: GraphCall) -> None:
        sizes = tuple(value.shape for value in call.inputs if isinstance(value, Tensor))
        graphs = self._graphs_for.setdefault(sizes, {})
        graphs[id(call.graph)] = call.graph
        if len(graphs) > _MAX_ALIKE:
            raise NotPipelinedError(
                f"{type(self.module).__name__}.{self.name} was {len(graphs)} graphs for batches of "
                "one size; expected a step whose course does not depend on how often it is called; "
                "keep counters of calls out of it"
            )


EVALUATIONS = ("auto", "pipeline", "whole")


class EvaluatingStrategy(GridStrategy):
    """Runs the steps without a backward pass.

    Attributes:
        evaluation: ``"pipeline"``, ``"whole"``, or ``"auto"`` for the first as long as it can be.
        num_eval_microbatches: Equal parts of a batch of theirs.
    """

    evaluation: str = "auto"
    num_eval_microbatches: int = 1
    _pipelining: Pipelining
    _is_training = False

    @abstractmethod
    def bring_weights(self) -> None:
        """Give every rank all weights, unless it has them."""

    @abstractmethod
    def free_weights(self) -> None:
        """Free what only an evaluation needed."""

    @abstractmethod
    def plain_parameters(self) -> AbstractContextManager[Any]:
        """Entered where freed parameters may be captured."""

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own step."""
        context = self.precision_plugin.val_step_context
        return self._evaluate("validation_step", super().validation_step, context, args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own step."""
        context = self.precision_plugin.test_step_context
        return self._evaluate("test_step", super().test_step, context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own step."""
        context = self.precision_plugin.predict_step_context
        return self._evaluate("predict_step", super().predict_step, context, args, kwargs)

    @override
    def on_validation_start(self) -> None:
        """Brings the weights together, if every rank validates with all of them."""
        if not self._is_pipelined("validation_step"):
            self.bring_weights()

    @override
    def on_validation_end(self) -> None:
        """Frees the memory that only the validation needed."""
        self.free_weights()

    def prepare_evaluation(self, pipelining: Pipelining) -> None:
        """Start over, with nothing captured."""
        self._pipelining = pipelining
        self.forget_evaluations()

    def forget_evaluations(self) -> None:
        """Forget what was captured."""
        self._evaluations: dict[str, PipelinedEvaluation] = {}
        # Steps that have turned out not to be pipelines.
        self._whole: set[str] = set()

    def _is_pipelined(self, name: str) -> bool:
        if self.evaluation == "whole" or name in self._whole:
            return False
        module = self.lightning_module
        assert module is not None
        steps = steps_of(module)
        if steps is not None and name in steps.steps and self._needs_passes(steps, name):
            return False
        # Before the first step of a training all weights are everywhere, and that step is to
        # be the one by whose costs the stages are balanced.
        return not self._is_training or self._pipelining.ownership.is_settled

    def _needs_passes(self, steps: ModuleSteps, name: str) -> bool:
        """Whether an evaluation has to run with the passes of callbacks.

        Within a training lossless passes make nothing else of it, and nothing of an evaluation is
        observed: its stages are cut from the user's own step. On its own it measures units.
        """
        return not self._is_training or steps.changes_numbers(name)

    def _evaluate(
        self,
        name: str,
        run_whole: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_pipelined(name):
            module = self.lightning_module
            assert module is not None
            if name not in self._evaluations:
                self._evaluations[name] = PipelinedEvaluation(
                    module, name, self._pipelining, self.num_eval_microbatches
                )
            try:
                with context(), self.plain_parameters():
                    return self._evaluations[name](*args, **kwargs)
            except NotPipelinedError as error:
                if self.evaluation == "pipeline":
                    raise MisconfigurationException(
                        f"PipelineStrategy(evaluation='pipeline'): {error}"
                    ) from error
                rank_zero_warn(
                    f"PipelineStrategy: {name} runs whole on every rank, with all weights, from "
                    f"here on: {error}"
                )
            # All ranks of the pipeline come here: they have captured the same step.
            self._whole.add(name)
        self.bring_weights()
        return run_whole(*args, **kwargs)
