"""Find violations in a snapshot: NaN, infinities, and formats that lose elements.

Violations concern the stored (scaled) tensor, since formats apply to it. Without unit scaling, this
is the tensor itself.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_unitscale.arguments import shown
from lightning_unitscale.formats import NumberFormat, get_number_format
from lightning_unitscale.scales.alerts import AlertKind, ScaleAlert, TensorScale, op_of
from lightning_unitscale.scales.layout import DIRECTIONS, FORMAT_KINDS, Direction, FloatArray, Kind
from lightning_unitscale.scales.snapshot import ScaleSnapshot

Limits: TypeAlias = float | Mapping[str, float]
# One infinity ruins a training. In a saturating format, one of a thousand elements may saturate.
_DEFAULT_OVERFLOW: Final = {True: 0.0, False: 1e-3}
# Operations that fill a tensor with a value from the user, such as the -inf of a mask.
_FILLING: Final = frozenset({"masked_fill", "where", "full", "full_like", "fill"})
# The largest numbers of FP32 and BF16, which some masks use instead of an infinity.
_STAND_INS: Final = (float(np.finfo(np.float32).max), float.fromhex("0x1.fep127"))
# Torch's names of losses that do not end in "loss".
_LOSSES: Final = ("cross_entropy", "kl_div", "with_logits")
_VERBS: Final[dict[Kind, str]] = {
    "overflow": "overflow",
    "subnormal": "are subnormal in",
    "flushed": "become zero in",
}


@dataclass(frozen=True)
class Threshold:
    """The fraction of a tensor's elements that may be lost to one format in one way."""

    format: NumberFormat
    kind: Kind
    fraction: float


def default_thresholds(formats: Sequence[NumberFormat]) -> tuple[Threshold, ...]:
    """Return the default: no overflow in a format with infinities, 0.1 % in a saturating format."""
    return tuple(
        Threshold(item, "overflow", _DEFAULT_OVERFLOW[item.has_infinity]) for item in formats
    )


def parse_thresholds(thresholds: Mapping[str | NumberFormat, Limits]) -> tuple[Threshold, ...]:
    """Parse thresholds that a user has written."""
    if not isinstance(thresholds, Mapping):
        raise TypeError(
            f"thresholds={shown(thresholds)}: not a mapping. Expected a fraction of the "
            "elements for each format. Pass for example {'E4M3FN': 0.01}."
        )
    parsed: list[Threshold] = []
    for name, allowed in thresholds.items():
        item = get_number_format(name, given=f"thresholds={shown(dict(thresholds))}: {shown(name)}")
        if any(threshold.format == item for threshold in parsed):
            raise ValueError(
                f"thresholds={dict(thresholds)!r}: {item.name} is given twice. Expected every "
                "format once. Drop one."
            )
        limits = (
            allowed if isinstance(allowed, Mapping) else {"overflow": allowed, "flushed": allowed}
        )
        for kind, fraction in limits.items():
            if kind not in FORMAT_KINDS:
                raise ValueError(
                    f"thresholds={dict(thresholds)!r}: {kind!r} is unknown. Expected "
                    f"{', '.join(FORMAT_KINDS)}. Pass one of them."
                )
            is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
            if not is_number or not 0 <= fraction <= 1:
                raise ValueError(
                    f"thresholds={dict(thresholds)!r}: {fraction!r} is not a fraction of the "
                    "elements. Expected a number from 0 to 1. Pass for example 0.01."
                )
            parsed.append(Threshold(item, kind, float(fraction)))
    return tuple(parsed)


class AlertMaker:
    """A factory of alerts, which contain the stored scales of the tensor's inputs."""

    def __init__(self, snapshot: ScaleSnapshot, direction: Direction) -> None:
        self._snapshot = snapshot
        self._direction = direction

    def alert(
        self,
        index: int,
        kind: AlertKind,
        text: str,
        *,
        value: float,
        threshold: float,
        format: str = "",
    ) -> ScaleAlert:
        """Return an alert about the tensor at a position in ``snapshot.names``."""
        snapshot = self._snapshot
        return ScaleAlert(
            kind=kind,
            step=snapshot.step,
            tensor=snapshot.names[index],
            module=snapshot.modules[index],
            direction=self._direction,
            text=text,
            format=format,
            value=value,
            threshold=threshold,
            inputs=tuple(
                self._scales[name] for name in self._inputs[index] if name in self._scales
            ),
        )

    @functools.cached_property
    def _inputs(self) -> Sequence[Sequence[str]]:
        snapshot = self._snapshot
        if self._direction == "forward":
            return snapshot.inputs
        users: dict[str, list[str]] = {name: [] for name in snapshot.names}
        for user, inputs in zip(snapshot.names, snapshot.inputs, strict=True):
            for name in inputs:
                users.get(name, []).append(user)
        return tuple(users.values())

    @functools.cached_property
    def _scales(self) -> dict[str, TensorScale]:
        snapshot, direction = self._snapshot, self._direction
        rms = snapshot.log2_rms(direction, stored=True).tolist()
        amax = snapshot.log2_amax(direction).tolist()
        return {
            name: TensorScale(name, *scales)
            for name, *scales in zip(snapshot.names, rms, amax, strict=True)
        }


def first_nonfinite(
    snapshot: ScaleSnapshot, *, known_infinite: Collection[str] = (), gradients: bool = True
) -> ScaleAlert | None:
    """Return the first tensor of a step that contains a NaN or an infinity."""
    # Values come before gradients. Values are in graph order. Gradients are in reverse order, as in
    # the backward pass. Infinities without consequences (no NaN, no infinite gradient, no infinite
    # result) are not a violation, because masks contain them.
    if not len(snapshot):
        return None
    nans, infs = _nonfinite(snapshot, "forward")
    grad_nans, grad_infs = _nonfinite(snapshot, "backward")
    if not gradients:
        grad_nans, grad_infs = np.zeros_like(grad_nans), np.zeros_like(grad_infs)
    matters = nans.any() or grad_nans.any() or grad_infs.any() or infs[-1] > 0
    if not matters:
        return None
    intended = np.array(
        [name in known_infinite or _fills(snapshot, k) for k, name in enumerate(snapshot.names)]
    )
    bad = np.flatnonzero((nans > 0) | (infs > 0) & ~intended)
    bad_gradients = np.flatnonzero((grad_nans > 0) | (grad_infs > 0))
    if bad.size:
        return _nonfinite_alert(snapshot, int(bad[0]), "forward", bad.size, bad_gradients.size)
    if bad_gradients.size:
        index = int(bad_gradients[-1])
        return _nonfinite_alert(snapshot, index, "backward", 0, bad_gradients.size)
    return None


def infinite_names(snapshot: ScaleSnapshot) -> tuple[str, ...]:
    """Return the tensors with infinite values and no NaN."""
    nans, infs = _nonfinite(snapshot, "forward")
    return tuple(snapshot.names[k] for k in np.flatnonzero((infs > 0) & (nans == 0)))


def judged_by_format(
    snapshot: ScaleSnapshot, direction: Direction, num_merged: int = 1
) -> npt.NDArray[Any]:
    """Mark the tensors that are checked against formats: those that matmuls read."""
    # If no matmul is known, these are all tensors except scalars and losses, which stay in full
    # precision, as under autocast. NaN and infinities count as violations in all tensors.
    read = snapshot.read_by_matmuls(direction)
    if read.any():
        return read
    scalars = snapshot.column("numel", "forward") <= num_merged
    operations = map(op_of, snapshot.names, snapshot.modules)
    losses = [operation.endswith(("loss", *_LOSSES)) for operation in operations]
    return ~scalars & ~np.array(losses, dtype=bool)


def judged_now(
    snapshot: ScaleSnapshot, direction: Direction, num_merged: int = 1
) -> npt.NDArray[Any]:
    """Mark the tensors of :func:`judged_by_format` that have a measured unit."""
    # A tensor that a matmul reads for the first time, or that was zero until now, has a unit from
    # the next step on. Its losses before that occur only once, so they are ignored.
    lacking = np.array(snapshot.lacking_units, dtype=bool).reshape(-1, len(DIRECTIONS))
    judged: npt.NDArray[Any] = judged_by_format(snapshot, direction, num_merged)
    return judged & ~lacking[:, DIRECTIONS.index(direction)]


def format_violations(
    snapshot: ScaleSnapshot, thresholds: Sequence[Threshold], num_merged: int = 1
) -> tuple[ScaleAlert, ...]:
    """Return the tensors of :func:`judged_now` that lose too much, in the order of computation."""
    # Filled-in values do not count as overflow. The tensor before the fill has already been
    # checked, and values equal to the largest number of their type come from a mask.
    masks = np.isin(snapshot.column("abs_max", "forward"), _STAND_INS)
    masks |= np.array([_fills(snapshot, index) for index in range(len(snapshot))], dtype=bool)
    violations: list[ScaleAlert] = []
    for direction in DIRECTIONS:
        fractions = snapshot.fractions(direction)
        # The backward pass computes the last tensor's gradient first.
        order = range(len(snapshot)) if direction == "forward" else reversed(range(len(snapshot)))
        judged = judged_now(snapshot, direction, num_merged)
        may = dict.fromkeys(FORMAT_KINDS, judged)
        if direction == "forward":  # gradients of masked tensors are like any others
            may["overflow"] = judged & ~masks
        limits = [
            (
                threshold,
                fractions[
                    :,
                    snapshot.layout.formats.index(threshold.format),
                    FORMAT_KINDS.index(threshold.kind),
                ],
            )
            for threshold in thresholds
        ]
        beyond = np.array(
            [may[threshold.kind] & (column > threshold.fraction) for threshold, column in limits]
        )
        if not beyond.any():
            continue
        maker = AlertMaker(snapshot, direction)
        for index in order:
            for row in np.flatnonzero(beyond[:, index]):
                threshold, column = limits[int(row)]
                value = float(column[index])
                item, allowed = threshold.format.name, threshold.fraction
                text = f"{percent(value)} of the elements {_VERBS[threshold.kind]} {item}"
                violations.append(
                    maker.alert(
                        index,
                        threshold.kind,
                        f"{text} (allowed: {percent(allowed)})",
                        format=item,
                        value=value,
                        threshold=allowed,
                    )
                )
    return tuple(violations)


def percent(fraction: float) -> str:
    """Return a fraction as text, without rounding small ones to 0 %."""
    if fraction == 0.0:
        return "0 %"
    return "less than 0.001 %" if fraction < 1e-5 else f"{100 * fraction:.3g} %"


def _nonfinite(snapshot: ScaleSnapshot, direction: Direction) -> tuple[FloatArray, FloatArray]:
    """Return the numbers of NaN and of infinities, 0 where nothing was measured."""
    return (
        np.nan_to_num(snapshot.column("nans", direction)),
        np.nan_to_num(snapshot.column("infs", direction)),
    )


def _nonfinite_alert(
    snapshot: ScaleSnapshot, index: int, direction: Direction, values: int, gradients: int
) -> ScaleAlert:
    nans, infs = (int(counts[index]) for counts in _nonfinite(snapshot, direction))
    numel = int(snapshot.column("numel", direction)[index])
    parts = [f"{nans:,} NaN"] * bool(nans) + [f"{infs:,} infinite"] * bool(infs)
    found = " and ".join(parts)
    text = f"{found} among {numel:,} elements, the first of the step"
    others = values + gradients - 1
    if others:
        named = "tensors or gradients" if others > 1 else "tensor or gradient"
        text += f" ({others} more {named} with NaN or infinities)"
    maker = AlertMaker(snapshot, direction)
    return maker.alert(index, "nonfinite", text, value=float(nans + infs), threshold=0.0)


def _fills(snapshot: ScaleSnapshot, index: int) -> bool:
    return op_of(snapshot.names[index], snapshot.modules[index]) in _FILLING
