"""Define alerts of the scale monitor: their fields, their text, and their form in event files.

Standard library only: the dashboard's server reads alerts too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

AlertKind = Literal["loss", "nonfinite", "overflow", "subnormal", "flushed", "trend"]
# The first inputs are enough for a tensor made from many.
_MOST_INPUTS = 6
_ORDINAL = re.compile(r"(@\d+)?$|_\d+(@\d+)?$")


@dataclass(frozen=True)
class TensorScale:
    """The scale of a tensor at one step.

    Attributes:
        tensor: Its name.
        log2_rms: log2 of the RMS of its finite elements, as stored; ``-inf`` for a tensor of zeros.
        log2_amax: log2 of its largest finite magnitude, as stored.
    """

    tensor: str
    log2_rms: float
    log2_amax: float

    def __str__(self) -> str:
        if not math.isfinite(self.log2_rms):
            return f"{self.tensor} ({'zero' if self.log2_rms < 0 else 'no finite element'})"
        return f"{self.tensor} (RMS 2^{self.log2_rms:z.1f}, max 2^{self.log2_amax:z.1f})"


@dataclass(frozen=True)
class ScaleAlert:
    """One problem of one tensor at one step.

    Attributes:
        kind: ``"nonfinite"``: the first NaN or infinity of the step. ``"overflow"``,
            ``"subnormal"`` or ``"flushed"``: more elements than the threshold allows are out of a
            format's range. ``"trend"``: the tensor's largest magnitude will leave a format soon.
            ``"loss"``: the loss of a step that was not sampled was NaN or infinite.
        step: The optimizer step.
        tensor: Name of the tensor.
        module: Path of the module that computes it.
        direction: ``"forward"`` for the value, ``"backward"`` for its gradient.
        text: The problem, without the name of the tensor.
        format: Name of the number format, empty for NaN and infinities.
        value: The fraction of the elements; for ``"nonfinite"`` their number; for ``"trend"`` the
            number of steps that are left.
        threshold: The limit, in the units of ``value``.
        inputs: The scales of the tensors that it was computed from.
    """

    kind: AlertKind
    step: int
    tensor: str
    module: str
    direction: Literal["forward", "backward"]
    text: str
    format: str = ""
    value: float = math.nan
    threshold: float = math.nan
    inputs: tuple[TensorScale, ...] = ()

    @property
    def op(self) -> str:
        """Return the name of the operation that computes the tensor, or the name of a parameter."""
        return op_of(self.tensor, self.module)

    def __str__(self) -> str:
        what = "gradient of " if self.direction == "backward" else ""
        text = f"step {self.step}: {what}{self.tensor}: {self.text}"
        if self.inputs:
            shown = ", ".join(map(str, self.inputs[:_MOST_INPUTS]))
            more = len(self.inputs) - _MOST_INPUTS
            text += f"; inputs: {shown}" + (f" and {more} more" if more > 0 else "")
        return text


@functools.lru_cache(maxsize=4096)
def op_of(tensor: str, module: str) -> str:
    """Return the operation in a tensor's name: without its module and its ordinal."""
    own = tensor.removeprefix(f"{module}.") if module else tensor
    return _ORDINAL.sub("", own)


def alerts_to_json(alerts: Iterable[ScaleAlert]) -> str:
    """Return alerts as a JSON list, with NaN and infinities as in Python's ``json``."""
    return json.dumps([dataclasses.asdict(alert) for alert in alerts])


def alerts_from_json(text: str | bytes) -> tuple[ScaleAlert, ...]:
    """Undo ``alerts_to_json``."""
    alerts = []
    for fields in json.loads(text):
        try:
            inputs = tuple(TensorScale(**scale) for scale in fields.pop("inputs"))
            alerts.append(ScaleAlert(**fields, inputs=inputs))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"text={str(text)[:60]!r}: not a list of alerts. Expected what alerts_to_json "
                f"writes; {error}"
            ) from error
    return tuple(alerts)


def alerts_text(alerts: Sequence[ScaleAlert], most: int | None = None) -> str:
    """Return at most ``most`` alerts as lines, and a line with the number of the others."""
    shown = alerts if most is None else alerts[:most]
    lines = [str(alert) for alert in shown]
    if len(shown) < len(alerts):
        lines.append(f"and {len(alerts) - len(shown)} more")
    return "\n".join(lines)
