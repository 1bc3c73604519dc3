"""How ``ScaleMonitor`` looks at a training step: it watches it run, or probes its graphs.

Where another callback, or the strategy, runs captured graphs, probes are a pass over these, so that
what they rewrite is what is shown. Otherwise the step runs as it is written.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.callbacks.packages import trainer_packages
from lightning_unitscale.callbacks.steps import attach_steps
from lightning_unitscale.graph.matmuls import product_of
from lightning_unitscale.graph.name_patterns import NamePatterns
from lightning_unitscale.graph.nodes import is_whole_view, requires_grad
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.watching.probes import ScaleProbes
from lightning_unitscale.watching.watcher import StepWatcher

if TYPE_CHECKING:
    import lightning.pytorch as pl


def _ignored() -> frozenset[CodeType]:
    """Code of what a step calls beside its model."""
    # All classes of optimizers have the same wrapper around theirs.
    functions: list[Any] = [Optimizer.profile_hook_step(nothing)]
    for package in trainer_packages():
        module = package.LightningModule
        functions += [module.log, module.log_dict, module.clip_gradients]
        functions.append(package.core.optimizer.LightningOptimizer.step)
    return frozenset(function.__code__ for function in functions)


class MonitoredSteps(abc.ABC):
    """A module's training steps while a monitor looks at some of them."""

    @abc.abstractmethod
    def begin_batch(self, is_sampled: bool) -> None:
        """Called before a batch."""

    def begin_backward(self) -> None:  # noqa: B027
        """Called before the backward pass of a sampled batch, by a loop that knows when it is."""

    def end_backward(self) -> None:  # noqa: B027
        """Called after it."""

    def end_batch(self) -> None:  # noqa: B027
        """Called after a sampled batch."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Forget what was measured and not taken."""

    @abc.abstractmethod
    def take(self, step: int, *, grad_scale: float) -> Callable[[], ScaleSnapshot] | None:
        """Send for what was measured since the last call; what is returned waits for it."""

    @abc.abstractmethod
    def detach(self) -> None:
        """Leave the module as it was."""


class WatchedSteps(MonitoredSteps):
    """Training steps that run as they are written; sampled ones are watched."""

    def __init__(self, loop: Loop, layout: RowLayout, patterns: NamePatterns) -> None:
        self._loop = loop
        self._watcher = StepWatcher(layout, patterns.match_names, _ignored())
        self._shadow = contextlib.ExitStack()
        self._backward = contextlib.ExitStack()

    @override
    def begin_batch(self, is_sampled: bool) -> None:
        self.end_batch()
        if is_sampled:
            self._shadow.enter_context(self._loop.running_steps_by(self._watched))

    @override
    def begin_backward(self) -> None:
        # Checkpoints compute again what they did not keep.
        self._backward.enter_context(self._watcher.during_backward())

    @override
    def end_backward(self) -> None:
        self._backward.close()

    @override
    def end_batch(self) -> None:
        self._backward.close()
        self._shadow.close()
        self._watcher.close()

    @override
    def clear(self) -> None:
        self._watcher.clear()

    @override
    def take(self, step: int, *, grad_scale: float) -> Callable[[], ScaleSnapshot] | None:
        return self._watcher.take(step, grad_scale=grad_scale)

    @override
    def detach(self) -> None:
        self.end_batch()
        self._watcher.clear()

    def _watched(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        return self._watcher.run(self._loop.module, step, args, kwargs)


class ProbedSteps(MonitoredSteps):
    """Training steps whose captured graphs carry probes in a variant of their own."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        owner: pl.Callback,
        layout: RowLayout,
        patterns: NamePatterns,
    ) -> None:
        self._owner = type(owner).__name__
        self._patterns = patterns
        self._probes = ScaleProbes(layout, self._watches)
        self._steps = attach_steps(trainer, module, owner)
        self._steps.add_pass(self._probes)

    @override
    def begin_batch(self, is_sampled: bool) -> None:
        self._steps.observe(self._owner, is_sampled)

    @override
    def clear(self) -> None:
        # Another callback may have wanted to observe this step.
        self._probes.clear()

    @override
    def take(self, step: int, *, grad_scale: float) -> Callable[[], ScaleSnapshot] | None:
        return self._probes.take(step, grad_scale=grad_scale)

    @override
    def detach(self) -> None:
        self._probes.forget()
        self._steps.detach(self._owner, self._probes)

    def _watches(self, node: fx.Node) -> bool:
        """Left out: views, which have their tensor's scale, and masks and tables of constants."""
        is_constant = node.op != "placeholder" and not requires_grad(node)
        if is_whole_view(node) or (is_constant and not any(map(product_of, node.users))):
            return False
        return self._patterns.match(node)
