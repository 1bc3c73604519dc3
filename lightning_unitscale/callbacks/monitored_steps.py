"""The two ways of ``ScaleMonitor`` to a training step: to watch it run, or to probe its graphs.

Where another callback, or the strategy, runs captured graphs, probes are a pass over these, so that
what they rewrite is what is shown. Otherwise the step runs as it is written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import fx
from torch.optim import Optimizer

from lightning_unitscale.callbacks.module_steps import attach_steps, check_module
from lightning_unitscale.graph.nodes import is_whole_view, requires_grad
from lightning_unitscale.graph.patterns import NamePatterns
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.shadowing import nothing, shadowed
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.tracking.watcher import StepWatcher
from lightning_unitscale.transforms.probes import ScaleProbes

# What a step calls beside its model. All classes of optimizers have the same wrapper around theirs.
_IGNORED = frozenset(
    function.__code__
    for function in (
        pl.LightningModule.log,
        pl.LightningModule.log_dict,
        pl.LightningModule.clip_gradients,
        LightningOptimizer.step,
        Optimizer.profile_hook_step(nothing),
    )
)


class MonitoredSteps(Protocol):
    """A module's training steps while a monitor looks at some of them.

    Attributes:
        is_before_units: Whether units were measured in the sampled step, and come after it.
    """

    is_before_units: bool

    def begin_batch(self, is_sampled: bool) -> None:
        """Called before a batch."""

    def begin_backward(self) -> None:
        """Called before Lightning's own backward pass of a sampled batch."""

    def end_backward(self) -> None:
        """Called after it."""

    def end_batch(self) -> None:
        """Called after a sampled batch."""

    def clear(self) -> None:
        """Forget what was measured and not taken."""

    def take(self, step: int, *, grad_scale: float) -> ScaleSnapshot | None:
        """What was measured since the last call; ``None`` when it was nothing."""

    def detach(self) -> None:
        """Leave the module as it was."""


class WatchedSteps:
    """Training steps that run as they are written, the sampled ones with somebody looking on.

    Args:
        trainer: The Trainer.
        module: Its module.
        owner: The monitor.
        layout: Columns of a row.
        patterns: Which tensors to watch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        owner: pl.Callback,
        layout: RowLayout,
        patterns: NamePatterns,
    ) -> None:
        check_module(trainer, module, owner)
        self._module = module
        self._watcher = StepWatcher(layout, patterns.match_names, _IGNORED)
        self._shadow = contextlib.ExitStack()
        self._backward = contextlib.ExitStack()
        self.is_before_units = False

    def begin_batch(self, is_sampled: bool) -> None:
        """Put a watched step in place of the module's own, for a sampled batch."""
        self.end_batch()
        if is_sampled:
            watched = _watched(self._module.training_step, self._module, self._watcher)
            self._shadow.enter_context(shadowed(self._module, training_step=watched))

    def begin_backward(self) -> None:
        """Look at what checkpoints compute again."""
        self._backward.enter_context(self._watcher.during_backward())

    def end_backward(self) -> None:
        """Look at no more of it."""
        self._backward.close()
        self.is_before_units = self._watcher.is_before_units

    def end_batch(self) -> None:
        """Put the module's own step back."""
        self._backward.close()
        self._shadow.close()
        self._watcher.close()

    def clear(self) -> None:
        """Forget what was watched and not taken."""
        self._watcher.clear()
        self.is_before_units = False

    def take(self, step: int, *, grad_scale: float) -> ScaleSnapshot | None:
        """The snapshot of the watched batches."""
        return self._watcher.take(step, grad_scale=grad_scale)

    def detach(self) -> None:
        """Forget the module."""
        self.end_batch()
        self._watcher.clear()


def _watched(
    step: Callable[..., Any], module: pl.LightningModule, watcher: StepWatcher
) -> Callable[..., Any]:
    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        return watcher.run(module, step, args, kwargs)

    # Lightning reads parameters one wrapping down, where the step may be wrapped already.
    training_step.__wrapped__ = getattr(step, "__wrapped__", step)
    return training_step


class ProbedSteps:
    """Training steps whose captured graphs carry probes in a variant of their own.

    Args:
        trainer: The Trainer.
        module: Its module.
        owner: The monitor.
        layout: Columns of a row.
        patterns: Which tensors to probe.
    """

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
        self.is_before_units = False

    def begin_batch(self, is_sampled: bool) -> None:
        """Ask for the variant with probes, or for the plain one."""
        self._steps.observe(self._owner, is_sampled)

    def begin_backward(self) -> None:
        """Nothing: probes are in the graphs."""

    def end_backward(self) -> None:
        """See whether units were measured."""
        self.is_before_units |= self._steps.steps["training_step"].interpreter is not None

    def end_batch(self) -> None:
        """Nothing: the next batch begins with what it wants."""

    def clear(self) -> None:
        """Forget what was recorded, which only somebody else may have wanted to observe."""
        self._probes.clear()
        self.is_before_units = False

    def take(self, step: int, *, grad_scale: float) -> ScaleSnapshot | None:
        """The snapshot of what was recorded."""
        return self._probes.take(step, grad_scale=grad_scale)

    def detach(self) -> None:
        """Take the probes out of the steps."""
        self._probes.forget()
        self._steps.detach(self._owner, self._probes)

    def _watches(self, node: fx.Node) -> bool:
        """Left out: views, which have their tensor's scale, and masks and tables of constants."""
        is_constant = node.op != "placeholder" and not requires_grad(node)
        if is_whole_view(node) or (is_constant and not any(map(product_of, node.users))):
            return False
        return self._patterns.match(node)
