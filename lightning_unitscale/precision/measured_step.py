"""Run a step of a module again and again under a ledger, and undo it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.arguments import check_count, shown
from lightning_unitscale.capture.rollback import undoers
from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.module_matmuls import find_loss
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.patching import nothing, shadowed
from lightning_unitscale.precision.ledger import Ledger, MatmulCall, energy


@dataclass(frozen=True)
class Effort:
    """The number of steps that estimates are averaged over."""

    directions: int = 16  # random directions of the parameters, for errors of the gradient
    pairs: int = 2  # pairs of steps with random signs, for the second order of the loss

    def __post_init__(self) -> None:
        check_count("directions", self.directions)
        check_count("pairs", self.pairs)


class MeasuredStep:
    """A step of a module that a ledger watches, with the same random numbers in each run."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[], Any],
        attached: AttachedSession,
        context: Callable[[], AbstractContextManager[Any]],
        loss: Callable[[Any], Tensor] | None,
    ) -> None:
        self._module, self._run, self._attached = module, run, attached
        self._session = attached.session
        self._context, self._loss = context, loss
        self.ledger = Ledger()
        self.parameters = [each for each in module.parameters() if each.requires_grad]

    def calibrate(self) -> None:
        """Measure the units of the matmuls, if there are none."""
        units = self._session.units
        if units.gauge or not units.is_used:
            return
        units.is_looking = True
        with self._undoing():
            self._gradients(self._forward())
        units.adopt(units.send()())
        units.is_looking = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[CoverageCounter]:
        """Let the ledger see all matmuls in this context, in place of the module's formats."""
        session, counter = self._session, CoverageCounter()
        before = session.numerics, session.counter, self._attached.trains
        for site in session.units.sites.values():
            site.matmul = None  # or a prepared backward matmul would run without the session
        session.numerics, session.counter = (self.ledger,), counter
        self._attached.trains = False  # the steps of a training are counted
        try:
            yield counter
        finally:
            session.numerics, session.counter, self._attached.trains = before

    def run(
        self, run_pass: Callable[[MatmulCall], Any], *, is_forward: bool = False
    ) -> tuple[float, list[Tensor | None]]:
        """Run the step in a pass, and return its loss and the gradients of the parameters."""
        self.ledger.run_pass = run_pass
        with self._undoing():
            loss = self._forward()
            gradients = [] if is_forward else self._gradients(loss)
            return float(loss.detach()), gradients

    @contextlib.contextmanager
    def moved(self, index: int, step: float) -> Iterator[None]:
        """Move all parameters by random signs times a step, in this context."""
        generator = torch.Generator().manual_seed(index)
        before = [parameter.data for parameter in self.parameters]
        try:
            for parameter in self.parameters:
                # Of bits, since a draw takes longer than the sum.
                bits = torch.randint(
                    0, 2, parameter.shape, generator=generator, dtype=torch.int8
                ).to(parameter.device)
                signs = bits.to(parameter.dtype).mul_(2.0 * step).sub_(step)
                parameter.data = parameter.data + signs
            yield
        finally:
            for parameter, data in zip(self.parameters, before, strict=True):
                parameter.data = data

    @property
    def has_units(self) -> bool:
        """Check whether operands have units. Otherwise they are rounded as they are."""
        return self._session.units.is_used

    @property
    def rms(self) -> float:
        """Return the RMS of all parameters."""
        count = sum(parameter.numel() for parameter in self.parameters)
        return math.sqrt(float(energy([each.detach() for each in self.parameters])) / max(count, 1))

    def _forward(self) -> Tensor:
        with self._context(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            output = self._run()
            loss = find_loss(output) if self._loss is None else self._loss(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"loss={shown(self._loss)}: the step of {type(self._module).__name__} returns no "
                "scalar loss with a gradient. Expected a loss. Pass a function of the "
                "step's output, such as loss=lambda output: output.square().mean()."
            )
        return loss

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        # Unlike ``backward``, this calls no hooks of a wrapper that averages over ranks.
        with torch.compiler.set_stance("force_eager"):
            return list(
                torch.autograd.grad(loss, self.parameters, torch.ones_like(loss), allow_unused=True)
            )

    @contextlib.contextmanager
    def _undoing(self) -> Iterator[None]:
        with ExitStack() as undo:
            for restore in undoers(self._module):
                undo.callback(restore)
            # Outside the Trainer's loop there is no place for logs. Other modules have other logs.
            if hasattr(self._module, "log_dict"):
                undo.enter_context(shadowed(self._module, log=nothing, log_dict=nothing))
            yield
