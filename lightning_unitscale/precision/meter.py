"""Measure a step in some formats, and predict the damage of each computation."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from lightning_unitscale.arguments import check_instance, shown
from lightning_unitscale.capture.module_steps import matmuls_of, steps_of
from lightning_unitscale.capture.name_patterns import NamePatterns
from lightning_unitscale.capture.side_effects import optimizes_itself
from lightning_unitscale.matmuls.computations import COMPUTATIONS, Exemption, Exemptions
from lightning_unitscale.matmuls.fp8_linear import numerics_of
from lightning_unitscale.matmuls.matmul_formats import FP8Linears, Grid, SimulateFormat, format_pair
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.rounding import Numerics, SimulatedMatmuls
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.patching import nothing, shadowed
from lightning_unitscale.precision.ledger import (
    BasePass,
    Key,
    MatmulCall,
    Numbers,
    TogetherPass,
    energy,
    relative,
)
from lightning_unitscale.precision.measured_step import (
    FEWEST_PAIRS,
    Effort,
    MeasuredStep,
    gradient_products,
    large_estimates,
    loss_damage,
    num_places,
    read,
)
from lightning_unitscale.precision.report import LedgerRow, PrecisionReport, Together

DEFAULT_FORMATS = ("E4M3FN",)
_TRAINING_STEP = "training_step"
_FORWARD = COMPUTATIONS[0]


def precision_report(
    module: nn.Module,
    *batch: Any,
    formats: Sequence[Any] = DEFAULT_FORMATS,
    method: str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    exempt: Sequence[Exemption] = (),
    directions: int = Effort.directions,
    pairs: int = Effort.pairs,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    **kwargs: Any,
) -> PrecisionReport:
    """Report what low precision costs in a step, matmul by matmul.

    For each matmul and each of its three computations (forward, input gradient, weight gradient),
    the report has the relative error that rounding it adds, the error that its operands arrive with
    when everything is rounded, and the predicted damage of rounding it alone. The damage of a
    forward computation is the change of the step's loss. That of a backward one is the error of the
    whole gradient, relative to its norm. Operands are divided by a power of two near their RMS
    before they are rounded, as by :class:`UnitScaleCallback`. Predictions add up to first order:
    changes of the loss as numbers, errors of the gradient as independent vectors. ``together`` has
    the damage measured with all computations rounded at once.

    The step runs several times on the module itself (``cost_steps`` of the report), with the
    same random numbers. Parameters, gradients, buffers, attributes and random states stay as they
    are. It needs memory for up to four more copies of the matmuls' operands in BF16.

    Args:
        module: A module on any device whose step returns a scalar loss. A LightningModule runs its
            ``training_step``, any other module its ``forward``.
        *batch: Positional arguments of the step. A missing ``batch_idx`` is 0.
        formats: Formats to report on, each with rows of its own: a name, ``"fp8"``, or a pair of
            formats, of operands and of gradients.
        method: Name of the method to run.
        loss: Function from the step's output to its loss, if the step does not return it.
        exempt: Computations that are exempt when all are rounded together, as for :class:`FP8`.
        directions: Directions over which errors of the gradient are averaged. The relative standard
            error of one prediction is at most ``sqrt(1 / (2 * directions))``. For every 8
            directions (64 on a moving grid), one of the largest errors is measured instead.
        pairs: Pairs of steps over which the loss's second order is averaged. On a moving grid, each
            pair has its own position of the grid, and errors of the gradient are averaged over up
            to 8 positions.
        context: Context of the forward pass, such as an autocast.
        **kwargs: Keyword arguments of the step.

    Returns:
        The report. ``print(report)`` shows a table, and ``report.as_json()`` the dictionary that
        ``lightning-unitscale precision --json`` prints.

    Raises:
        ValueError: If a format is unknown, or the step returns no loss.

    Examples:
        >>> import torch
        >>> from lightning_unitscale import precision_report
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 1))
        >>> x = torch.randn(8, 32)
        >>> report = precision_report(model, x, loss=lambda y: y.square().mean())
        >>> report.rows[0].name, report.rows[0].computation
        ('0.linear', 'forward')
    """
    with metering(module, batch, kwargs, formats, method, loss, context) as meter:
        return meter.report(Effort(directions, pairs), exempt)


@contextlib.contextmanager
def metering(
    module: nn.Module,
    batch: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    formats: Sequence[Any],
    method: str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    own: SimulateFormat | FP8Linears | None = None,
) -> Iterator[Meter]:
    """Yield a meter of a module's step. Within it the module has its own session."""
    check_instance("module", module, nn.Module, "a torch.nn.Module", "pass the model itself")
    method = method or (_TRAINING_STEP if hasattr(module, _TRAINING_STEP) else "forward")
    batch = _with_index(getattr(module, method), batch)
    refuse_steps(module)
    attached = matmuls_of(module) if method == "forward" else None
    found = () if attached is None else attached.formats
    found = found if own is None else (own,)
    with ExitStack() as stack:
        if attached is None:
            attached = AttachedSession(module, [method])
            stack.callback(attached.detach)
        else:
            # The counts of a transformed module stay as they are.
            stack.enter_context(shadowed(attached, before_call=nothing, after_call=nothing))
        step = MeasuredStep(
            module, lambda: getattr(module, method)(*batch, **kwargs), attached, context, loss
        )
        yield Meter(step, formats, found)


def refuse_steps(module: nn.Module) -> None:
    """Refuse steps that cannot run several times, or whose matmuls are not seen."""
    what = f"module={type(module).__name__}"
    if steps_of(module) is not None:
        raise ValueError(
            f"{what}: its step is captured, and a report needs each matmul as it runs. Expected "
            "method='lossless' without remat or compile. Report on the module itself."
        )
    if optimizes_itself(module):
        raise ValueError(
            f"{what}: its step calls the optimizer, so it cannot run again. Expected automatic "
            "optimization. Pass a module that only computes the loss."
        )


def _with_index(step: Any, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(batch) == 1 and "batch_idx" in inspect.signature(step).parameters:
        return (*batch, 0)
    return batch


def _named(
    formats: Sequence[Any], own: Sequence[SimulateFormat | FP8Linears]
) -> dict[str, SimulateFormat]:
    """Return formats by name, on the same kind of grid as the module's own formats."""
    if isinstance(formats, str) or not formats:
        raise ValueError(
            f"formats={shown(formats)}: not a list of formats. Expected names such as "
            "('E4M3FN',). Pass a tuple of them."
        )
    grid: Grid = "moving" if any(each.moving_grid is not None for each in own) else "fixed"
    named = {}
    for each in formats:
        if isinstance(each, SimulateFormat):  # with the options of its rounding
            rounding = copy.deepcopy(each)
            rounding.patterns, rounding.exempt = NamePatterns(), Exemptions()
        else:
            rounding = SimulateFormat(*format_pair(each, argument="formats"), grid=grid)
        names = dict.fromkeys(
            str(one) for one in (rounding.operand_format, rounding.gradient_format)
        )
        named["/".join(names)] = rounding
    return named


class Meter:
    """The measurements of one step, in named formats."""

    def __init__(
        self,
        step: MeasuredStep,
        formats: Sequence[Any],
        own: Sequence[SimulateFormat | FP8Linears] = (),
    ) -> None:
        named = _named(formats, own)
        self._step, self._roundings = step, tuple(named.values())
        self.formats = {
            word: SimulatedMatmuls(each, has_units=step.has_units) for word, each in named.items()
        }
        self.move_grids(0)
        step.calibrate()
        self.base = BasePass(self.formats, _reasons(own))
        with step.watched() as counter:
            self.loss, self._gradients = step.run(self.base)
        self.plain = [each for each in counter.result().counts if each.kind == "plain"]
        self.step_flops = counter.result().flops
        self.gradient_energy = float(energy([each for each in self._gradients if each is not None]))

    @property
    def cost_steps(self) -> float:
        """Return the FLOPs of all measurements so far, in those of the step."""
        return self._step.ledger.flops / max(self.step_flops, 1)

    def move_grids(self, place: int) -> bool:
        """Move the numbers of the formats, and return whether any of them move."""
        moving = [each.moving_grid for each in self._roundings if each.moving_grid is not None]
        for grid in moving:
            grid.follow(place)
        return bool(moving)

    def loss_change(
        self, format: str, is_rounded: Callable[[Key], bool], inherited: Numbers | None = None
    ) -> float:
        """Measure the change of the loss with some forward computations rounded at once."""
        # With ``inherited``, backward computations are rounded as well, and it gets the energies of
        # the errors that operands arrive with.
        rounded = TogetherPass(self.formats[format], is_rounded)
        if inherited is not None:
            rounded.sketches = self.base.sketches
        with self._step.watched():
            loss, _ = self._step.run(rounded, is_forward=inherited is None)
        if inherited is not None:
            inherited.update(rounded.inherited)
        return loss - self.loss

    def lasting_change(
        self, format: str, is_rounded: Callable[[Key], bool], first: float, places: int
    ) -> float | None:
        """Measure the mean of ``loss_change`` over places of a moving grid, if there are enough."""
        # ``first`` is the change at the first place, which is not measured again.
        if places < FEWEST_PAIRS or not self.move_grids(0):
            return None
        changes = [first]
        for place in range(1, places):
            self.move_grids(place)
            changes.append(self.loss_change(format, is_rounded))
        self.move_grids(0)
        return statistics.mean(changes)

    def gradient_errors(
        self, format: str, is_rounded: Callable[[Key], bool], places: Iterable[int] = (0,)
    ) -> list[float]:
        """Measure the gradient's error with some backward computations rounded at once."""
        # There is one error for each place of the grid.
        rounded = TogetherPass(
            self.formats[format], lambda key: key[1] != _FORWARD and is_rounded(key)
        )
        errors = []
        for place in places:
            self.move_grids(place)
            with self._step.watched():
                _, gradients = self._step.run(rounded)
            apart = [
                one.float() - other.float()
                for one, other in zip(gradients, self._gradients, strict=True)
                if one is not None and other is not None
            ]
            errors.append(relative(float(energy(apart)), self.gradient_energy))
        self.move_grids(0)
        return errors

    def gradient_error(
        self, format: str, is_rounded: Callable[[Key], bool], places: int = 1
    ) -> float:
        """Measure the root of the mean square of ``gradient_errors`` over the first places."""
        errors = self.gradient_errors(format, is_rounded, range(places))
        return math.hypot(*errors) / math.sqrt(places)

    def report(self, effort: Effort, exempt: Sequence[Exemption] = ()) -> PrecisionReport:
        """Predict the damage of each computation, and measure that of all of them."""
        exemptions = Exemptions(exempt)

        def is_rounded(key: Key) -> bool:
            one = self.base.computed[key]
            is_exempt = exemptions.covers(Site(one.name, one.module, ()), one.computation)
            return one.reason is None and not is_exempt

        together: dict[str, Together] = {}
        rows: list[LedgerRow] = []
        with self._step.watched():
            gradients = gradient_products(
                self._step, self.formats, self.base.eps, effort, self.move_grids
            )
            places = num_places(effort, is_moving=self.move_grids(0))
            for word, format in self.formats.items():
                loss = loss_damage(self._step, format, effort, self.move_grids)
                self.move_grids(0)
                inherited: Numbers = {}
                change = self.loss_change(word, is_rounded, inherited)
                error = self.gradient_error(word, is_rounded, places)
                lasting = self.lasting_change(word, is_rounded, change, effort.pairs)
                together[word] = Together(change, error, lasting)
                squares = self._squares(word, *gradients[word], effort, places)
                rows += self._rows(word, loss, squares, read(inherited))
        return PrecisionReport(self.loss, tuple(rows), together, tuple(exempt), self.cost_steps)

    def _squares(
        self,
        format: str,
        estimates: Mapping[Key, float],
        averages: Mapping[Key, float],
        effort: Effort,
        places: int,
    ) -> dict[Key, float]:
        """Return squared errors of the gradient by computation, with large estimates measured."""
        exact = {
            key: error
            for (word, key), error in read(self.base.added).items()
            if word == format and key[1] != _FORWARD
        }
        squares = {**exact, **averages, **estimates}
        for key in large_estimates(estimates, sum(squares.values()), effort, places):
            error = self.gradient_error(format, functools.partial(operator.eq, key), places)
            squares[key] = error**2 * self.gradient_energy
        return squares

    def _rows(
        self,
        format: str,
        loss_damage: Mapping[str, tuple[float, float]],
        squares: Mapping[Key, float],
        inherited: Mapping[Key, float],
    ) -> Iterator[LedgerRow]:
        added, first = read(self.base.added), read(self.base.first_order)
        energies = read(self.base.energies)
        for key, one in self.base.computed.items():
            size, error = energies[key], added[format, key]
            damage: float | None
            if key[1] == _FORWARD:
                second, lasting = loss_damage.get(one.name, (0.0, 0.0))
                # Without a gradient that arrives nothing can be predicted.
                damage = first.get((format, one.name))
                damage = None if damage is None else damage + second
            else:
                damage = lasting = relative(squares[key], self.gradient_energy)
            yield LedgerRow(
                one.name,
                one.module,
                one.computation,
                format,
                added=relative(error, size),
                inherited=relative(inherited.get(key, 0.0), size),
                loss_change=damage,
                lasting=lasting,
                flops=one.flops,
                reason=one.reason,
            )
        for count in self.plain:
            yield LedgerRow(
                count.module, count.module, _FORWARD, format, flops=count.flops, reason=count.reason
            )


def _reasons(own: Sequence[SimulateFormat | FP8Linears]) -> Callable[[MatmulCall], str | None]:
    judges: list[Numerics] = numerics_of(copy.deepcopy(own), measures_range=False)

    def why_not(call: MatmulCall) -> str | None:
        reasons = [each.why_not(call.matmul, call.args, call.kwargs) for each in judges]
        return None if None in reasons or not reasons else reasons[0]

    return why_not
