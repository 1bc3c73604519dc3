"""Choose and measure the training steps of ``ScaleMonitor``: watch them run, or probe their graphs.

If another callback or the strategy runs captured graphs, a pass adds probes to them, so the
rewritten graph is shown. Otherwise, and if no graph can be captured, the step runs as you wrote it.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.optim import Optimizer

from lightning_unitscale.arguments import check_count
from lightning_unitscale.callbacks.lightning_steps import attach_steps
from lightning_unitscale.callbacks.packages import trainer_packages
from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import is_whole_view, requires_grad
from lightning_unitscale.capture.name_patterns import NamePatterns
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.monitor.probes import ScaleProbes
from lightning_unitscale.monitor.watcher import StepWatcher
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import RowLayout

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass(frozen=True)
class Sampling:
    """A schedule of samples."""

    every_n_steps: int
    first_step: int = 0
    last_step: int | None = None

    def __post_init__(self) -> None:
        check_count("every_n_steps", self.every_n_steps)
        check_count("first_step", self.first_step, least=0)
        if self.last_step is not None:
            check_count("last_step", self.last_step, least=self.first_step)

    def covers(self, step: int) -> bool:
        """Check whether a step is within the window."""
        return self.first_step <= step and (self.last_step is None or step <= self.last_step)

    def wants(self, step: int, start: int, *, is_last: bool) -> bool:
        """Check whether a step is sampled."""
        # Every n-th step, both ends of the window or of the training, and the second step, which is
        # the first one that runs in measured units.
        if not self.covers(step):
            return False
        is_second = step - max(start, self.first_step) in (0, 1)
        return step % self.every_n_steps == 0 or is_second or is_last or step == self.last_step


def _ignored() -> frozenset[CodeType]:
    """Return the code of functions that a step calls outside its model."""
    # All optimizer classes share the wrapper of their step.
    functions: list[Any] = [Optimizer.profile_hook_step(nothing)]
    for package in trainer_packages():
        module = package.LightningModule
        functions += [module.log, module.log_dict, module.clip_gradients]
        functions.append(package.core.optimizer.LightningOptimizer.step)
    return frozenset(function.__code__ for function in functions)


class WatchedSteps(StepWatcher):
    """Training steps that run as the user wrote them. Sampled ones are watched."""

    shows_nothing = False

    def __init__(self, loop: Loop, layout: RowLayout, patterns: NamePatterns) -> None:
        super().__init__(layout, patterns.match_names, _ignored())
        self._loop = loop
        self._sampled = contextlib.ExitStack()

    def begin_batch(self, is_sampled: bool) -> None:
        """Watch the next batch if it is sampled."""
        self.end_batch()
        if is_sampled:
            watched = functools.partial(self.run, self._loop.module)
            self._sampled.enter_context(self._loop.running_steps_by(watched))

    def end_batch(self) -> None:
        """Stop watching a sampled batch."""
        self._sampled.close()
        self.close()

    def detach(self) -> None:
        """Restore the module."""
        self.end_batch()
        self.clear()


class ProbedSteps(ScaleProbes):
    """Training steps whose captured graphs have a variant with probes."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        owner: pl.Callback,
        layout: RowLayout,
        patterns: NamePatterns,
    ) -> None:
        super().__init__(layout, self._watches)
        self._owner = type(owner).__name__
        self._patterns = patterns
        self._steps = attach_steps(trainer, module, owner)
        self._steps.add_pass(self)

    @property
    def shows_nothing(self) -> bool:
        """Check whether training steps run uncaptured."""
        step = self._steps.steps.get("training_step")
        return step is not None and step.fallback.runs_plain

    def begin_batch(self, is_sampled: bool) -> None:
        """Run the variant with probes if the next batch is sampled."""
        self._steps.observe(self._owner, is_sampled)

    end_batch = nothing

    def detach(self) -> None:
        """Restore the module."""
        self.forget()
        self._steps.detach(self._owner, self)

    def _watches(self, node: fx.Node) -> bool:
        """Exclude views, which have their tensor's scale, and masks and tables of constants."""
        is_constant = node.op != "placeholder" and not requires_grad(node)
        if is_whole_view(node) or (is_constant and not any(map(matmul_of, node.users))):
            return False
        return self._patterns.match(node)
