"""Run a step repeatedly under a ledger, undo each run, and predict each computation's damage."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.arguments import check_count, shown
from lightning_unitscale.capture.rollback import undoers
from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.module_matmuls import find_loss
from lightning_unitscale.matmuls.rounding import SimulatedMatmuls
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.patching import nothing, shadowed
from lightning_unitscale.precision import ledger
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
            name = f"module={type(self._module).__name__}: its step"
            what = name if self._loss is None else f"loss={shown(self._loss)}: it"
            raise ValueError(
                f"{what} returns no scalar loss with a gradient. Expected a loss of trained "
                "parameters. Pass a function of the step's output, such as "
                "loss=lambda output: output.square().mean(), or train a parameter."
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


_DIRECTIONS_AT_ONCE = 4  # directions whose tangents are in memory at the same time
FEWEST_PAIRS = 4  # pairs from which lasting parts are estimated
# Every pair of this number is at the step's own place of a moving grid, for its second order there.
_PAIRS_PER_STEPS_OWN = 4
# Places of a moving grid that errors of the gradient are averaged over. On a single one, errors of
# different matmuls are not independent.
_MOST_PLACES = 8
# Share of the sum of squares from which an estimate is replaced by a measurement, and the number of
# directions for each step of such measurements: they take half as many steps as tangents do.
_LARGE_SHARE, _DIRECTIONS_PER_MEASUREMENT = 0.05, 2 * _DIRECTIONS_AT_ONCE


def loss_damage(
    step: MeasuredStep, format: SimulatedMatmuls, effort: Effort, move_grids: Callable[[int], bool]
) -> dict[str, tuple[float, float]]:
    """Return the second order of each forward matmul, and the part of its damage that lasts."""
    # The two steps of a pair have opposite signs: their sum has the second order, and their
    # difference the first. If the grid moves, the second order is that of the step's own place,
    # where each fourth pair is, and the part that lasts is a mean over this place and those of
    # other pairs.
    orders: dict[str, dict[int, list[tuple[float, float]]]] = {}
    is_moving = False
    for pair in range(effort.pairs):
        place = pair if pair % _PAIRS_PER_STEPS_OWN else 0
        is_moving = move_grids(place)
        passes = [ledger.SignedPass(format, index) for index in (2 * pair, 2 * pair + 1)]
        for each in passes:
            step.run(each)
        one, other = (read(each.products) for each in passes)
        for name in one.keys() & other.keys():
            first = ledger.sign_of(name, 2 * pair) * (one[name] - other[name]) / 2
            second = (one[name] + other[name]) / 4
            by_place = orders.setdefault(name, {})
            by_place.setdefault(place if is_moving else 0, []).append((first, second))
    found = {}
    for name, by_place in orders.items():
        means = [map(statistics.mean, zip(*pairs, strict=True)) for pairs in by_place.values()]
        firsts, seconds = zip(*means, strict=True)
        # On a grid that does not move, the first order is that of a single draw.
        lasting = _lasting_part(firsts) if is_moving else 0.0
        found[name] = seconds[0], statistics.mean(seconds) + lasting
    return found


def _lasting_part(first_orders: Sequence[float]) -> float:
    """Return the mean of a matmul's first orders on several grids, without what may be chance.

    Rounding to nearest errs to both sides, but small numbers that become zero do not. So a part of
    the first order has the same sign on each grid. The mean is shrunk by its squared standard
    error, so that it is zero where only the noise of few grids is seen.

    References:
        James and Stein, "Estimation with Quadratic Loss" (1961), the estimator for one mean, with
        a factor that is not negative.
    """
    if len(first_orders) < FEWEST_PAIRS:
        return 0.0
    mean = statistics.mean(first_orders)
    noise = statistics.variance(first_orders) / len(first_orders)
    return mean * max(1.0 - noise / mean**2, 0.0) if mean else 0.0


def num_places(effort: Effort, *, is_moving: bool) -> int:
    """Return over how many places of the grid errors of the gradient are averaged."""
    steps = math.ceil(effort.directions / _DIRECTIONS_AT_ONCE)
    return min(effort.pairs, steps, _MOST_PLACES) if is_moving else 1


def gradient_products(
    step: MeasuredStep,
    named: Mapping[str, SimulatedMatmuls],
    eps: float,
    effort: Effort,
    move_grids: Callable[[int], bool],
) -> dict[str, tuple[dict[ledger.Key, float], dict[ledger.Key, float]]]:
    """Return the mean square of ``<d, J r>`` of each computation whose operand has tangents."""
    # If the grid moves, errors are averaged over several places. In a second dictionary are the
    # squares of the errors of all computations, as they arise, averaged over the same places.
    sums: dict[str, dict[ledger.Key, float]] = {word: {} for word in named}
    others: dict[str, dict[ledger.Key, float]] = {word: {} for word in named}
    distance = step.rms * math.sqrt(eps)
    places = num_places(effort, is_moving=move_grids(0))
    for number, first in enumerate(range(0, effort.directions, _DIRECTIONS_AT_ONCE)):
        move_grids(number % places)
        moved = []
        for index in range(first, min(first + _DIRECTIONS_AT_ONCE, effort.directions)):
            moved.append(ledger.MovedPass())
            with step.moved(index, distance):
                step.run(moved[-1], is_forward=True)
        operands, is_new_place = [each.operands for each in moved], 1 < places > number
        tangents = ledger.TangentPass(named, operands, distance, measures_added=is_new_place)
        step.run(tangents)
        for (_, word, key), product in read(tangents.products).items():
            mean = product**2 / effort.directions
            sums[word][key] = sums[word].get(key, 0.0) + mean
        for (word, key), square in read(tangents.added).items():
            others[word][key] = others[word].get(key, 0.0) + square / places
    move_grids(0)
    return {word: (sums[word], others[word]) for word in named}


def large_estimates(
    estimates: Mapping[ledger.Key, float], total: float, effort: Effort, places: int
) -> list[ledger.Key]:
    """Return the computations whose estimated squares make up much of the sum of all, ``total``."""
    # An estimate is uncertain by ``sqrt(2 / directions)`` of itself. A large one makes the sum as
    # uncertain, and with it the shares of all others. So it is worth a measurement, which needs a
    # step for each place of the grid.
    large = [key for key, square in estimates.items() if square > _LARGE_SHARE * total]
    most = effort.directions // (_DIRECTIONS_PER_MEASUREMENT * places)
    return sorted(large, key=lambda key: -estimates[key])[:most]


def read(numbers: ledger.Numbers) -> dict[Any, float]:
    """Return numbers from their device, in one transfer."""
    if not numbers:
        return {}
    values = torch.stack([value.double() for value in numbers.values()]).tolist()
    return dict(zip(numbers, values, strict=True))
