"""Validation, test and prediction on several devices: as a pipeline, or whole on every rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from typing_extensions import override

from lightning_unitscale.graph.steps import ModuleSteps, steps_of
from lightning_unitscale.strategies.grid import GridStrategy
from lightning_unitscale.strategies.pipelined_evaluation import (
    NotPipelinedError,
    PipelinedEvaluation,
)
from lightning_unitscale.strategies.pipelined_method import Pipelining

EVALUATIONS = ("auto", "pipeline", "whole")


class EvaluatingStrategy(GridStrategy):
    """Runs the steps without a backward pass.

    Attributes:
        evaluation: ``"pipeline"``, ``"whole"``, or ``"auto"`` for the first as long as it can be.
        num_eval_microbatches: Equal parts of a batch of theirs.
    """

    evaluation: str = "auto"
    num_eval_microbatches: int = 1
    _how: Pipelining
    _is_training = False

    @abstractmethod
    def bring_weights(self) -> None:
        """Give every rank all weights, if it has not got them."""

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

    def prepare_evaluation(self, how: Pipelining) -> None:
        """Start anew, with nothing captured."""
        self._how = how
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
        # Before the first step of a training all weights are everywhere, and that step shall be
        # the one by whose costs the stages are balanced.
        return not self._is_training or self._how.ownership.is_settled

    def _needs_passes(self, steps: ModuleSteps, name: str) -> bool:
        """Whether an evaluation has to be what callbacks make of its step.

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
                    module, name, self._how, self.num_eval_microbatches
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
