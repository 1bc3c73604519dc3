"""What the units of a module have in common, at the dispatcher and in captured graphs."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_unitscale.arguments import shown
from lightning_unitscale.callbacks.distributed import joint_reasons
from lightning_unitscale.callbacks.explanation import CountedSteps, Explanation
from lightning_unitscale.callbacks.packages import rank_zero_info
from lightning_unitscale.dispatch.coverage import Coverage, listed
from lightning_unitscale.loops.loop import Loop, LoopCallback
from lightning_unitscale.lossless.fp8_range import Unrepresentable
from lightning_unitscale.lossless.gauge import Gauge, GaugePair
from lightning_unitscale.lossless.measured import is_late_look
from lightning_unitscale.precision.fp8 import WIDE_GRADIENT, FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat
from lightning_unitscale.ranks import is_distributed

# Of what :meth:`MeasuredUnits.state_dict` returns. Without one, a tensor of zeros had unit 1.
STATE_VERSION = 1
# Steps at which "auto" looks: often while the scales of a fresh model move, then rarely.
_EARLY_LOOKS = frozenset({8, 16, 32, 64})
_LOOK_EVERY = 128


class RecalibrationSchedule:
    """The optimizer steps at which units are looked at."""

    def __init__(self, recalibrate: Literal["auto"] | int | None) -> None:
        is_number = isinstance(recalibrate, int) and not isinstance(recalibrate, bool)
        is_word = recalibrate is None or (isinstance(recalibrate, str) and recalibrate == "auto")
        if not (is_word or (is_number and recalibrate > 0)):  # type: ignore[operator]
            raise ValueError(
                f"recalibrate={shown(recalibrate)}: no such interval; expected 'auto', None or a "
                "positive number of optimizer steps; pass recalibrate='auto'."
            )
        self._recalibrate = recalibrate

    @property
    def is_automatic(self) -> bool:
        """Whether units change only where they no longer fit."""
        return self._recalibrate == "auto"

    @property
    def is_empty(self) -> bool:
        """Whether units are never looked at."""
        return self._recalibrate is None

    def looks_at(self, step: int) -> bool:
        """Whether to look at this step."""
        if self._recalibrate is None or step <= 0:
            return False
        if self._recalibrate == "auto":
            return step in _EARLY_LOOKS or step % _LOOK_EVERY == 0
        return step % int(self._recalibrate) == 0


class LateAgreement:
    """The optimizer steps at which ranks agree on the units of tensors that were zero at first.

    Each rank counts the same steps. They meet at the steps 1, 2, 4, 8 and every 8th, while any rank
    lacks a unit, and all of them learn that when they meet. Between, a rank waits for no other.
    Ranks begin to meet when a training begins, and again after each look at all units.

    Attributes:
        is_open: Whether they go on to meet.
    """

    def __init__(self) -> None:
        self._num_steps: int | None = None
        self.is_open = False

    def start(self) -> None:
        """Begin to meet, if ranks have never met."""
        if self._num_steps is None:
            self.begin()

    def begin(self) -> None:
        """Begin to meet."""
        self._num_steps, self.is_open = 0, True

    def meets(self) -> bool:
        """Count an optimizer step, and return whether ranks meet after it."""
        self._num_steps = (self._num_steps or 0) + 1
        return self.is_open and is_late_look(self._num_steps)


class MeasuredUnits(LoopCallback, abc.ABC):
    """Measures the units of one module and follows their drift over fits and restarts.

    ``begin_batch`` says whether units are looked at, ``end_batch`` takes those of what was
    measured, and new ones where they have drifted; after ``leave`` they stay.

    Attributes:
        is_calibrated: Whether a training step has been measured, in this fit or before.
        events: When new units were taken, and why, one line each.
    """

    def __init__(
        self,
        schedule: RecalibrationSchedule,
        simulation: SimulateFormat | None,
        fp8: FP8Linears | None,
    ) -> None:
        self.is_calibrated = False
        self.events: list[str] = []
        self._schedule = schedule
        self._simulation = simulation
        self._fp8 = fp8
        self._counted = self._new_counts()
        # Whether results depend on the units, as those of rounded products do.
        self._changes_numbers = simulation is not None or fp8 is not None
        self._step_index = 0
        # Ends the last look, whose numbers may be on their way.
        self._pending: Callable[[], None] | None = None

    @property
    @abc.abstractmethod
    def gauge(self) -> Gauge:
        """The units in force; empty before the first batch."""

    @property
    def coverage(self) -> Coverage:
        """What became of the products of a training step, or of an evaluation on its own."""
        return self._counted.main

    @abc.abstractmethod
    def explain(self) -> Explanation:
        """What became of every product, when units were taken, and which."""

    def _new_counts(self) -> CountedSteps:
        return CountedSteps("simulate" if self._fp8 is None else "precision='fp8'")

    @property
    def _now(self) -> str:
        return f"step {self._step_index}"

    def _begin(self, loop: Loop) -> bool:
        """Note where a batch begins; returns whether units are looked at in it."""
        self._step_index = loop.step_index
        return self._schedule.looks_at(self._step_index)

    def _begin_look(
        self, judge: Callable[[str], None], device: torch.device, *, is_frequent: bool = False
    ) -> None:
        """Look at what the step has measured, on a CUDA device after the next one.

        Units change no result, so they can be late; formats do, and ranks wait for each other.
        """
        self._pending = functools.partial(judge, self._now)
        waits = self._changes_numbers and not is_frequent
        if is_distributed() or device.type != "cuda" or waits:
            self._end_look()

    def _end_look(self) -> None:
        if self._pending is not None:
            judge, self._pending = self._pending, None
            judge()

    def _tell_new_units(self, num_changed: int, when: str, outside: Mapping[str, float]) -> None:
        """Record that units have changed."""
        worst = sorted(outside.items(), key=lambda item: -abs(math.log2(item[1])))[:3]
        reason = ", ".join(f"{name} at RMS {rms:.3g}" for name, rms in worst)
        event = f"New units for {num_changed} tensors at {when}"
        self.events.append(f"{event}: {reason}" if reason else event)
        if outside:
            rank_zero_info(f"UnitScaleCallback: {self.events[-1]}")

    def _tell_late_units(self, names: Sequence[str], when: str) -> None:
        """Record that tensors that gave no unit before have one."""
        if names:
            self.events.append(f"First units for {len(names)} tensors at {when}: {listed(names)}")

    def _tell_unrepresentable(self, new: Unrepresentable, when: str) -> None:
        """Record what left FP8, or its finer format."""
        for what, reasons in (
            ("Out of FP8", new.products),
            (f"Gradients in {WIDE_GRADIENT}", new.gradients),
        ):
            if reasons:
                listed = "; ".join(f"{name}, since {why}" for name, why in reasons.items())
                self.events.append(f"{what} from {when} on: {listed}")
                rank_zero_info(f"UnitScaleCallback: {self.events[-1]}")

    def _fp8_state(self) -> dict[str, dict[str, str]]:
        if self._fp8 is None:
            return {}
        unfit = self._fp8.unfit
        return {"fp8_unfit": dict(unfit.products), "fp8_wide": dict(unfit.gradients)}


def joint_unrepresentable(unrepresentable: Unrepresentable) -> Unrepresentable:
    """What any rank has found not to fit."""
    return Unrepresentable(*joint_reasons(unrepresentable.products, unrepresentable.gradients))


def gauge_from_state(state: Mapping[str, Any]) -> Gauge:
    """The units of matmuls in a saved state, without those that may be of a tensor of zeros."""
    gauge = Gauge.from_state(state["gauge"])
    if "version" in state:
        return gauge
    return Gauge({name: pair for name, pair in gauge.items() if pair != GaugePair()})


def unrepresentable_from_state(state: Mapping[str, Any]) -> Unrepresentable:
    """What a checkpoint says of layers that do not fit."""
    return Unrepresentable(state.get("fp8_unfit", {}), state.get("fp8_wide", {}))
