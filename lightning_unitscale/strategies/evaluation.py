"""Validation, test and prediction as pipelines, and the weights of those that run whole.

A batch is one microbatch by default, so that the step computes what it computes on one device, and
nothing is averaged. The stages then run one after the other, which takes as long as every rank
running all of them, and needs no more weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn
from typing_extensions import override

from lightning_unitscale.capture.compiled_graph import CompiledGraph, GraphCall
from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.dispatch.attach import run_in_session
from lightning_unitscale.pipeline.capture import static_shapes
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.ranks import gathered
from lightning_unitscale.strategies.grid import GridStrategy
from lightning_unitscale.strategies.method import NotPipelinedError, PipelinedMethod, Pipelining
from lightning_unitscale.strategies.ownership import Owners
from lightning_unitscale.strategies.validation_hooks import Watch, has_validation_hooks

# Graphs for batches of one size, each of which has to be captured and cut.
_MAX_ALIKE = 4


class PipelinedEvaluation(PipelinedMethod):
    """A step without a backward pass, whose graph runs on several ranks."""

    def __init__(
        self, module: nn.Module, name: str, pipelining: Pipelining, num_microbatches: int
    ) -> None:
        # What callbacks make of it runs whole, where it is something else.
        super().__init__(module, name, pipelining, defer=("log", "log_dict"), plain=True)
        self._num_microbatches = num_microbatches
        # By the sizes of what goes in.
        self._graphs_for: dict[tuple[torch.Size, ...], dict[int, CompiledGraph]] = {}

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The result of the step for a batch, on all ranks."""
        count = self._num_microbatches
        parts = [batch] if count == 1 else split_evenly(batch, count)
        if count > 1:
            (batch,) = split_evenly(batch, 1)
        with static_shapes():
            calls = self.graph_calls([((part, *args), kwargs) for part in parts])
            whole = self.whole_call(((batch, *args), kwargs), calls)
            self._refuse_another_for_every_batch(calls[0])
            try:
                graph = self.pipelined(calls, whole, is_exact=False)
            except (RuntimeError, ValueError) as error:
                # It uses parameters in another order than the training, or has too few places.
                raise NotPipelinedError(
                    f"{type(self.module).__name__}.{self.name} cannot be cut as the training is: "
                    f"{error}"
                ) from error
            values = graph.shared_results(graph.runner.eval_flat(graph.inputs(calls)), count)
            replay = graph.replaying(values)
            return self.steps.steps[self.name].replay(replay, batch, *args, **kwargs)

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
    _owners: Owners | None = None
    # Whether this rank's weights are those of all owners.
    _has_weights = True
    # By the name of the step; ``None`` for one that has turned out not to be a pipeline.
    _evaluations: dict[str, PipelinedEvaluation | None]
    # Whether hooks of the validation read weights; ``None`` until the first has shown it.
    _hooks_read: bool | None = None
    _watch: Watch | None = None

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's own step."""
        self._end_watch()
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

    def before_validation(self) -> None:
        """Bring the weights together if every rank needs all of them; called before all hooks."""
        module = self.lightning_module
        assert module is not None
        reads = self._hooks_read
        if self._is_training and reads is None:
            callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
            reads = has_validation_hooks(module, callbacks)
        if reads or not self._is_pipelined("validation_step"):
            self._bring_weights()
        if self._is_training and self._hooks_read is None:
            self._watch = Watch(module)

    def _end_watch(self) -> None:
        """Note whether hooks have read weights, and free them if none has."""
        if self._watch is None:
            return
        reads, self._watch = self._watch.end(), None
        # A hook may read on the first rank alone.
        self._hooks_read = any(gathered(reads))
        if not self._hooks_read and self._is_pipelined("validation_step"):
            self._free_again()

    def _free_again(self) -> None:
        if self._is_training and self._owners is not None and not self._is_interrupted:
            self._owners.free(self.optimizers)
            self._has_weights = False

    @override
    def on_validation_end(self) -> None:
        """Frees again, within a training, the weights that only the validation needed."""
        self._end_watch()
        self._free_again()

    @override
    def on_train_end(self) -> None:
        """Leaves the trained weights on all ranks."""
        self._synchronize()
        self._is_training = False

    @property
    def _is_interrupted(self) -> bool:
        module = self.lightning_module
        assert module is not None
        trainer = module._trainer
        return trainer is not None and trainer.state.status is TrainerStatus.INTERRUPTED

    def _bring_weights(self) -> None:
        """Give every rank the owners' weights, unless it has got them since the last step."""
        if not self._has_weights:
            self._synchronize()

    def _synchronize(self) -> None:
        # After an exception the other ranks may wait for something else, or be gone.
        if self._owners is not None and not self._is_interrupted:
            self._owners.synchronize()
            self._has_weights = True

    def _plain_parameters(self) -> AbstractContextManager[Any]:
        """Entered where freed parameters may be captured: they are of the usual class."""
        return contextlib.nullcontext() if self._owners is None else self._owners.freed.plain()

    def _is_pipelined(self, name: str) -> bool:
        if self.evaluation == "whole":
            return False
        if name in self._evaluations and self._evaluations[name] is None:
            return False
        module = self.lightning_module
        assert module is not None
        steps = steps_of(module)
        if steps is not None and name in steps.steps:
            # Within a training lossless passes make nothing else of an evaluation, and nothing of
            # it is observed: its stages are cut from the user's own step. Else it measures units.
            is_own_step = self._is_training and not steps.changes_function
            if not is_own_step:
                return False
        # Before the first step of a training all weights are everywhere, and that step is to
        # be the one by whose costs the stages are balanced.
        return not self._is_training or self._pipelining.ownership.is_settled

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
            step = self._evaluations.get(name) or PipelinedEvaluation(
                module, name, self._pipelining, self.num_eval_microbatches
            )
            self._evaluations[name] = step
            try:
                with context(), self._plain_parameters():
                    return run_in_session(module, name, step, *args, **kwargs)
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
            self._evaluations[name] = None
        self._bring_weights()
        return run_whole(*args, **kwargs)
