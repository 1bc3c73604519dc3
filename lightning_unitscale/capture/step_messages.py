"""Report why parts of a step are not captured, and how long the capture took."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

from lightning_unitscale.capture.breaks import Reason, is_watched, joined_reasons, reason_of
from lightning_unitscale.capture.graph_variants import StepState

# Blocks within which autograd does not save tensors as usual.
_SAVING = ("saved_tensors_hooks", "save_on_cpu")
NO_REASON = (
    "it has no tensor operation, or a loop breaks the graph, so Dynamo skips the whole function"
)


class CaptureError(RuntimeError):
    """Error about a step, or a forward, that must be captured as a graph and cannot be."""

    # Its text is three sentences: what breaks the graph and where, why, and what to do.

    def __init__(self, text: str, reason: str) -> None:
        # Its arguments are set before, since Dynamo does not trace the base class's ``__init__``.
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])

    @classmethod
    def of(cls, title: str, reasons: Sequence[str], *, manner: str = "") -> CaptureError:
        """Return the error about a graph break."""
        first, *others = dict.fromkeys(reasons) or (NO_REASON,)
        more = f" (and {len(others)} more)" if others else ""
        place = first.where if isinstance(first, Reason) else ""
        why = first.why if isinstance(first, Reason) else first
        culprit = f"{place} breaks the graph" if place else "its graph breaks"
        return cls(
            f"{title} cannot be captured{manner}: {culprit}{more}. {why[:1].upper()}{why[1:]}. "
            f"Keep it out of {title.rpartition('.')[2]}. TORCH_LOGS=graph_breaks shows more of it.",
            f"{culprit}{more} ({why})",
        )

    @classmethod
    def by_rules(cls, title: str, reason: str, need: str, advice: str) -> CaptureError:
        """Return the error about a step that rules cannot scale in this call."""
        return cls(f"{title} cannot be unit-scaled by rules: {reason}. {need}. {advice}.", reason)


def warn_once(step: StepState, text: str) -> None:
    """Warn of a step, if no earlier warning was given."""
    if not step.has_warned:
        step.has_warned = True
        warnings.warn(text, stacklevel=6)


def _uncaptured(step: StepState) -> str:
    """Say that a step runs uncaptured, and what it loses."""
    code = " and uncompiled" if step.owner.executor == "inductor" else ""
    plan: str = getattr(step.owner.partition_fn, "loss_without_plan", "")
    rules = ""
    if step.owner.changes_function:
        rules = ": it is the unscaled model, at the given learning rates"
    return f"it runs uncaptured{code}{plan}{rules}"


def not_captured(step: StepState, error: BaseException) -> CaptureError:
    """Return our error for one of Dynamo's."""
    is_sharded = step.owner.sharded is not None
    manner = " in one graph, as rules with ModelParallelStrategy ask" if is_sharded else ""
    return CaptureError.of(step.title, [reason_of(error)], manner=manner)


def capture_ended(step: StepState, reason: str) -> CaptureError:
    """Return the error about a step whose capture was ended."""
    return CaptureError(
        f"{step.title} cannot be captured: {reason}. Expected a step of few graphs. "
        "TORCH_LOGS=graph_breaks shows what breaks it.",
        reason,
    )


def warn_of_staying_plain(step: StepState, reason: str) -> None:
    """Warn that the step runs uncaptured from now on."""
    warn_once(
        step,
        f"{step.title} cannot run captured: {reason}. So {_uncaptured(step)}. Take that out of the "
        "step, or leave out what captures it.",
    )


def warn_if_nothing_ran(step: StepState) -> None:
    """Warn that no graph ran in a call."""
    if step.num_graph_calls:
        return
    reasons = joined_reasons(step.owner.graph_breaks) or NO_REASON
    if step.refused is not None:
        warn_once(
            step,
            f"{step.title}: called with a {step.refused}, whose operations Dynamo does not "
            f"follow. So {_uncaptured(step)}. Pass an ordinary tensor: "
            "image.as_subclass(torch.Tensor).",
        )
        return
    if is_watched():
        reasons = "a mode such as FlopCounterMode observes every operation of this call"
    warn_once(
        step,
        f"{step.title}: no graph could be captured ({reasons}). So {_uncaptured(step)}. Keep what "
        "breaks the graph out of the step, or leave out what captures it.",
    )


def warn_of_saving(step: StepState, graph_breaks: Sequence[str]) -> None:
    """Warn that Dynamo skips the whole function that enters a block with saved-tensor hooks."""
    for graph_break in graph_breaks:
        if any(name in graph_break for name in _SAVING):
            warn_once(
                step,
                f"{step.title}: a function saves tensors in its own way ({graph_break}), so "
                f"{_uncaptured(step)}. Expected a step without such a block. Enter it around the "
                "step, in a callback's hooks.",
            )


def warn_of_captures(step: StepState, reason: str) -> None:
    """Warn that the step is recaptured again and again."""
    warn_once(
        step,
        f"{step.title}: {reason}, which takes time and memory. Expected a step that "
        "depends on tensors, numbers and the sizes of a few kinds of batches. "
        "TORCH_LOGS=recompiles shows what changes.",
    )


# Seconds after which a user is notified that the first step is still being captured.
PATIENCE_SECONDS = 5.0


class CaptureProgress:
    """Total time in which a step is captured, with its report."""

    def __init__(self, title: str, say: Callable[[str], None]) -> None:
        self.seconds = 0.0
        self._title = title
        self._say = say
        self._is_reported = False
        self._has_waited = False

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Time the capture of a function, with compiling and planning its graph."""
        started = time.perf_counter()
        left = max(0.0, PATIENCE_SECONDS - self.seconds)
        timer = threading.Timer(left, self._say_that_it_takes_long)
        timer.daemon = True
        if not self._has_waited:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if timer.is_alive():
                timer.join()  # until then it keeps the module alive
            self.seconds += time.perf_counter() - started

    def report(self, num_graphs: int, planning_seconds: float) -> None:
        """Log once how long the first step was captured and planned."""
        if self._is_reported or not num_graphs:
            return
        self._is_reported = True
        graphs = "1 graph" if num_graphs == 1 else f"{num_graphs} graphs"
        planned = f" and planned in {planning_seconds:.1f} s" if planning_seconds else ""
        captured = max(0.0, self.seconds - planning_seconds)
        self._say(f"{self._title}: captured in {captured:.1f} s{planned} ({graphs})")

    def _say_that_it_takes_long(self) -> None:
        self._has_waited = True
        self._say(
            f"{self._title}: capture and planning take more than {PATIENCE_SECONDS:.0f} s. "
            "The first step begins afterwards"
        )
