"""Keep, report and act on the alerts of ``ScaleMonitor``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_unitscale.arguments import check_count, shown
from lightning_unitscale.callbacks.packages import rank_zero_warn
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.loops.ranks import is_distributed
from lightning_unitscale.scales import violations
from lightning_unitscale.scales.alerts import ScaleAlert, alerts_text
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.transfer import HostCopy
from lightning_unitscale.scales.trends import AmaxTrends


class LossWatch:
    """A check of the loss of every step."""

    # A loss on the CPU is checked immediately. A loss on a CUDA device is copied to pinned memory
    # without waiting. It is checked when the copy has arrived, mostly one step later. Only one copy
    # runs at a time. Losses on other devices are not checked.

    def __init__(self) -> None:
        self._sent: tuple[int, HostCopy] | None = None
        self._is_bad = False

    def see(self, step: int, loss: Tensor) -> int | None:
        """Record the loss of a step, and return the step of a non-finite loss, if any."""
        loss = loss.detach()
        if loss.device.type == "cpu":
            return self._judge(step, loss)
        if loss.device.type != "cuda":
            return None
        bad_step = None
        if self._sent is not None:
            sent_step, copy = self._sent
            if not copy.has_arrived:
                return None
            bad_step = self._judge(sent_step, copy.numbers())
        self._sent = step, HostCopy(loss if loss.numel() == 1 else loss.double().sum())
        return bad_step

    def _judge(self, step: int, loss: Tensor) -> int | None:
        was_bad, self._is_bad = self._is_bad, not bool(torch.isfinite(loss).all())
        return step if self._is_bad and not was_bad else None


_Reaction = Literal["warn", "raise", "stop"]
# Reactions to a violation. A function gets the new alerts of a step.
OnViolation: TypeAlias = _Reaction | Callable[[tuple[ScaleAlert, ...]], object]
# Limit on the alerts in memory, and on those that the console shows per step.
_KEPT: Final = 10_000
_SHOWN: Final = 8
# A violation is reported again if it returns after this many clean samples.
_REARMED_AFTER: Final = 10
_NONFINITE: Final = ("nonfinite",)


class ScaleViolation(RuntimeError):
    """The error of ``ScaleMonitor(on_violation="raise")``, raised on all ranks.

    Attributes:
        alerts: All alerts of the step, in the order of computation.
        alert: The first of the alerts.
        step: Its optimizer step.
        tensor: Its tensor.
        module: Path of the module that computes the tensor.
        direction: Whether the alert is about the value or its gradient.
    """

    def __init__(self, alerts: Sequence[ScaleAlert]) -> None:
        self.alerts = tuple(alerts)
        self.alert = first = self.alerts[0]
        self.step, self.tensor = first.step, first.tensor
        self.module, self.direction = first.module, first.direction
        super().__init__(alerts_text(self.alerts, _SHOWN))

    def __reduce__(self) -> tuple[type[ScaleViolation], tuple[tuple[ScaleAlert, ...]]]:
        # Lightning's launchers pickle exceptions to send them between processes.
        return type(self), (self.alerts,)


class ScaleAlerts:
    """The alerts of snapshots, and the reactions to them."""

    def __init__(
        self,
        on_violation: OnViolation | None,
        thresholds: Mapping[str | NumberFormat, violations.Limits] | None,
        trend_steps: int | None,
        formats: tuple[NumberFormat, ...],
    ) -> None:
        _check_reaction(on_violation)
        if trend_steps is not None:
            check_count("trend_steps", trend_steps)
        self._on_violation = on_violation
        if thresholds is None:
            self._thresholds = violations.default_thresholds(formats)
        else:
            self._thresholds = violations.parse_thresholds(thresholds)
        limited = tuple(dict.fromkeys(threshold.format for threshold in self._thresholds))
        self.formats = tuple(dict.fromkeys((*formats, *limited)))  # the formats to count
        # At most 10,000, newest last.
        self.alerts: list[ScaleAlert] = []
        self._horizon = trend_steps
        self._limited = limited
        self.start()

    def start(self) -> None:
        """Begin a fit. The alerts of an earlier one stay in ``alerts``."""
        horizon = self._horizon
        self._trends = None if horizon is None else AmaxTrends(self._limited, horizon)
        self._told: dict[tuple[str, ...], int] = {}
        self._known_infinite: set[str] = set()
        self._loss_watch = LossWatch()
        # The loss of a step that was not sampled. The next one should be, whatever the schedule.
        self.bad_losses: list[ScaleAlert] = []
        # Number of violations in the last snapshot, reported or not. Trends do not count.
        self.num_violations = 0
        # The alerts of this fit, for the summary of its run.
        self.of_fit: list[ScaleAlert] = []

    def see_loss(self, step: int, loss: Tensor) -> None:
        """Check the loss of an unsampled step, if that costs nothing."""
        # With several ranks only sampled steps are checked, because sampling needs all ranks.
        if self._on_violation is None or is_distributed():
            return
        bad = self._loss_watch.see(step, loss)
        if _NONFINITE in self._told:
            return  # its origin is known
        if bad is not None:
            text = "NaN or infinite (this step was not sampled, the next one is)"
            self.bad_losses = [ScaleAlert("loss", bad, "loss", "", "forward", text)]

    def judge(
        self, snapshot: ScaleSnapshot, *, has_loss_scaler: bool, num_merged: int = 1
    ) -> tuple[ScaleAlert, ...]:
        """Return the new alerts of a snapshot, the same on all ranks."""
        nonfinite = violations.first_nonfinite(
            snapshot, known_infinite=self._known_infinite, gradients=not has_loss_scaler
        )
        if nonfinite is None:
            self._known_infinite.update(violations.infinite_names(snapshot))
        alerts = [] if nonfinite is None else [nonfinite]
        fits = violations.format_violations(snapshot, self._thresholds, num_merged)
        if self._trends is not None:
            fits += self._trends.add(snapshot, num_merged)
        alerts += [fit for fit in fits if not (has_loss_scaler and _is_too_large(fit))]
        self.num_violations = sum(alert.kind != "trend" for alert in alerts)
        news = [alert for alert in alerts if self._key(alert) not in self._told]
        new, self.bad_losses = [*self.bad_losses, *news], []
        told = {key: age + 1 for key, age in self._told.items() if age + 1 < _REARMED_AFTER}
        self._told = told | dict.fromkeys(map(self._key, alerts), 0)
        self._keep(new)
        return tuple(new)

    def finish(self) -> tuple[ScaleAlert, ...]:
        """Return the alerts for losses after the last sampled step, at the end of a fit."""
        new, self.bad_losses = tuple(self.bad_losses), []
        self._keep(new)
        return new

    def _keep(self, new: Sequence[ScaleAlert]) -> None:
        self.alerts, self.of_fit = ([*kept, *new][-_KEPT:] for kept in (self.alerts, self.of_fit))

    def act(self, loop: Loop, alerts: Sequence[ScaleAlert]) -> None:
        """Warn, stop the loop, raise or call the user's function."""
        if not alerts or self._on_violation is None:
            return
        if callable(self._on_violation):
            self._on_violation(tuple(alerts))
            return
        # A trend is a forecast: nothing has happened yet.
        is_violated = any(alert.kind != "trend" for alert in alerts)
        if is_violated and self._on_violation == "raise":
            raise ScaleViolation(alerts)
        rank_zero_warn(f"ScaleMonitor: {alerts_text(alerts, _SHOWN)}", category=ScaleWarning)
        if is_violated and self._on_violation == "stop":
            loop.stop()

    def _key(self, alert: ScaleAlert) -> tuple[str, ...]:
        if alert.kind == "nonfinite":
            # One NaN causes all others: the next step reads it from the parameters.
            return _NONFINITE
        return alert.kind, alert.tensor, alert.direction, alert.format


def _check_reaction(on_violation: object) -> None:
    choices = get_args(_Reaction)
    if on_violation is None or (isinstance(on_violation, str) and on_violation in choices):
        return
    # Calling a class would only make an instance.
    if not callable(on_violation) or isinstance(on_violation, type):
        raise ValueError(
            f"on_violation={shown(on_violation)}: unknown. Expected one of "
            f"{', '.join(map(repr, choices))}, a function of a tuple of alerts, or None to only "
            "record alerts. Pass on_violation='warn'."
        )
    try:
        inspect.signature(on_violation).bind(())
    except TypeError as error:
        raise TypeError(
            f"on_violation={shown(on_violation)}: it cannot be called with one argument ({error}). "
            "Expected a function of a tuple of alerts. Write def f(alerts): ..."
        ) from None
    except ValueError:  # a builtin without a signature
        return


def _is_too_large(alert: ScaleAlert) -> bool:
    return alert.direction == "backward" and alert.kind in ("overflow", "trend")


class ScaleWarning(UserWarning):
    """The category of the warnings that ``ScaleMonitor`` raises."""
