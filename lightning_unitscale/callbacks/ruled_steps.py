"""The captured steps of a LightningModule that is scaled by rules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lightning_unitscale.callbacks.captured_run import capture_run
from lightning_unitscale.callbacks.distributed import refuse_sharded_parameters, rehearsed
from lightning_unitscale.callbacks.options import Rules
from lightning_unitscale.callbacks.packages import is_lightning, misconfigured
from lightning_unitscale.callbacks.remat import RematCallback, step_partitioner
from lightning_unitscale.callbacks.rules import RuleScaling
from lightning_unitscale.callbacks.steps import all_callbacks, starting_batch, step_arguments
from lightning_unitscale.capture.gathering import GatherParameters
from lightning_unitscale.capture.sharded import ShardedModule
from lightning_unitscale.capture.steps import ModuleSteps
from lightning_unitscale.dynamo.executors import CompileMode
from lightning_unitscale.graph.passes import GraphPass

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RuledSteps:
    """Captures the steps of a module and has them scaled by rules, each before its first batch.

    Units and formats of the matmuls are the session's, as those of any captured step.
    """

    def __init__(
        self,
        method: Rules,
        rules: RuleScaling,
        *,
        remat: str | int | float | None,
        compile: bool | CompileMode,
    ) -> None:
        self.rules = rules
        self._method = method
        self._remat = remat
        self._compile = compile
        self._trainer: pl.Trainer | None = None
        self._steps: ModuleSteps | None = None

    def capture(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        owner: pl.Callback,
        *,
        is_other: bool,
        leaving: ExitStack,
    ) -> ModuleSteps:
        """Let the steps run as graphs that the rules rewrite, until ``leaving`` is closed."""
        is_sharded = is_lightning(trainer.strategy, "ModelParallelStrategy")
        self._check_sharding(trainer, is_sharded=is_sharded)
        passes: list[GraphPass] = [self.rules.rules, self.rules.gradients]
        remat = self._remat
        self.rules.attach(trainer, module, is_other=is_other)
        steps = capture_run(
            trainer,
            module,
            owner,
            None if remat is None else step_partitioner(trainer, module, remat),
            compile=self._compile,
            passes=passes,
            leaving=leaving,
        )
        leaving.callback(self.rules.restore)
        if is_sharded:
            steps.sharded = ShardedModule(module)
            leaving.callback(setattr, steps, "sharded", None)
            passes.append(GatherParameters(steps.sharded))
        for graph_pass in passes:
            steps.add_pass(graph_pass)
        leaving.callback(self._leave)
        self._trainer, self._steps = trainer, steps
        return steps

    def _leave(self) -> None:
        self._trainer = self._steps = None

    def _check_sharding(self, trainer: pl.Trainer, *, is_sharded: bool) -> None:
        """Refuse to scale by rules what the steps of a sharded module cannot have."""
        if not is_sharded:
            refuse_sharded_parameters(
                trainer,
                f"method={self._method!r}",
                "sets whole parameters to RMS 1",
                "ModelParallelStrategy with fully_shard, DDP, or method='lossless'",
            )
        elif self._compile:
            raise misconfigured(
                f"compile=True with method={self._method!r}: FSDP gathers parameters in the middle "
                "of the graph, which Inductor does not compile; expected compile=False with "
                "ModelParallelStrategy; leave it out, or use DDP."
            )
        elif any(isinstance(callback, RematCallback) for callback in all_callbacks(trainer)):
            raise misconfigured(
                f"method={self._method!r} with RematCallback: by rules FSDP gathers parameters in "
                "the middle of the graph, of which nothing can run again then; expected only one "
                "of them with ModelParallelStrategy; checkpoint the blocks yourself, or use DDP."
            )

    def begin_batch(self, name: str, batch: Any, *indices: int) -> None:
        """Have the rules decide on a step, if they have not seen it."""
        trainer, steps = self._trainer, self._steps
        assert trainer is not None and steps is not None
        step, module = steps.steps[name], trainer.lightning_module
        is_training = name == "training_step"
        if is_training and step.fallback.is_due(steps.executor):
            return
        with starting_batch(module, step, *indices):
            seen = rehearsed(trainer, batch) if is_training else batch
            arguments = step_arguments(module, name, seen, *indices)
            self.rules.plan_step(trainer, step, arguments, train=is_training)
