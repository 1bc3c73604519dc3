"""Finds what is wrong in a snapshot: NaN and infinities, and formats that lose too many elements.

A violation is about the stored tensor, since formats are; without unit scaling that is the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from lightning_unitscale.alerts import AlertKind, ScaleAlert, TensorScale, op_of
from lightning_unitscale.exponents import FloatArray
from lightning_unitscale.formats import NumberFormat, get_format
from lightning_unitscale.row_layout import FORMAT_KINDS, Kind
from lightning_unitscale.snapshot import Direction, ScaleSnapshot

Limits: TypeAlias = float | Mapping[str, float]
# An infinity ends a training. Of a format that clips, one element of a thousand is no harm.
_DEFAULT_OVERFLOW: Final = {True: 0.0, False: 1e-3}
# What these put into a tensor is what somebody asked for: the -inf of a mask.
_FILLING: Final = frozenset({"masked_fill", "where", "full", "full_like", "fill"})
_VERBS: Final[dict[Kind, str]] = {
    "overflow": "overflow",
    "subnormal": "are subnormal in",
    "flushed": "become zero in",
}


@dataclass(frozen=True)
class Threshold:
    """Which fraction of a tensor's elements may be lost to one format in one way.

    Attributes:
        format: The format.
        kind: The way.
        fraction: More than this fraction is a violation.
    """

    format: NumberFormat
    kind: Kind
    fraction: float


def default_thresholds(formats: Sequence[NumberFormat]) -> tuple[Threshold, ...]:
    """No overflow in a format with infinities, one element of a thousand in one that clips."""
    return tuple(
        Threshold(item, "overflow", _DEFAULT_OVERFLOW[item.has_infinity]) for item in formats
    )


def parse_thresholds(thresholds: Mapping[str | NumberFormat, Limits]) -> tuple[Threshold, ...]:
    """Thresholds as a user writes them.

    Args:
        thresholds: Format -> fraction, for overflow and for flushing to zero alike, or format ->
            ``{"overflow": fraction, "subnormal": fraction, "flushed": fraction}``, any of them.

    Raises:
        ValueError: If a format, a kind or a fraction is none, or a format is given twice.
        TypeError: If it is no mapping.
    """
    if not isinstance(thresholds, Mapping):
        raise TypeError(
            f"thresholds={thresholds!r}: not a mapping; expected format -> fraction of the "
            "elements; pass for example {'E4M3FN': 0.01}"
        )
    found: list[Threshold] = []
    for name, given in thresholds.items():
        item = get_format(name)
        if any(one.format == item for one in found):
            raise ValueError(
                f"thresholds={dict(thresholds)!r}: {item.name} is given twice; expected every "
                "format once; drop one"
            )
        limits = given if isinstance(given, Mapping) else {"overflow": given, "flushed": given}
        for kind, fraction in limits.items():
            if kind not in FORMAT_KINDS:
                raise ValueError(
                    f"thresholds={dict(thresholds)!r}: {kind!r} is unknown; expected "
                    f"{', '.join(FORMAT_KINDS)}; correct it"
                )
            is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
            if not is_number or not 0 <= fraction <= 1:
                raise ValueError(
                    f"thresholds={dict(thresholds)!r}: {fraction!r} is not a fraction of the "
                    "elements; expected a number from 0 to 1; pass for example 0.01"
                )
            found.append(Threshold(item, kind, float(fraction)))
    return tuple(found)


def first_nonfinite(
    snapshot: ScaleSnapshot,
    *,
    known_infinite: Collection[str] = (),
    gradients: bool = True,
) -> ScaleAlert | None:
    """The first tensor of a step that holds a NaN or an infinity.

    Values come before gradients; of values the first one in graph order, of gradients the last,
    which the backward pass computes first. Infinities that nothing came of (no NaN, no infinite
    gradient, no infinite result) are no violation: masks are made of them.

    Args:
        snapshot: Where to look.
        known_infinite: Tensors that hold infinities for a reason; of them only NaN count.
        gradients: Whether to look at gradients; a loss scaler makes infinite ones on purpose.
    """
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
        place = int(bad_gradients[-1])
        return _nonfinite_alert(snapshot, place, "backward", 0, bad_gradients.size)
    return None


def infinite_names(snapshot: ScaleSnapshot) -> tuple[str, ...]:
    """The tensors with infinite values and no NaN."""
    nans, infs = _nonfinite(snapshot, "forward")
    return tuple(snapshot.names[k] for k in np.flatnonzero((infs > 0) & (nans == 0)))


def format_violations(
    snapshot: ScaleSnapshot, thresholds: Sequence[Threshold]
) -> tuple[ScaleAlert, ...]:
    """All tensors that lose more to a format than is allowed, in the order of computation.

    Args:
        snapshot: Where to look; its layout counts the formats of the thresholds.
        thresholds: What is allowed.
    """
    found: list[ScaleAlert] = []
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        fractions = snapshot.fractions(direction, stored=True)
        # The backward pass computes the last tensor's gradient first.
        order = range(len(snapshot)) if direction == "forward" else reversed(range(len(snapshot)))
        limits = [
            (one, fractions[:, snapshot.layout.formats.index(one.format), _place(one.kind)])
            for one in thresholds
        ]
        beyond = np.array([column > one.fraction for one, column in limits])
        if not beyond.any():
            continue
        inputs = InputScales(snapshot, direction)
        for place in order:
            for row in np.flatnonzero(beyond[:, place]):
                one, column = limits[int(row)]
                value = float(column[place])
                text = f"{percent(value)} of the elements {_VERBS[one.kind]} {one.format.name}"
                found.append(
                    inputs.alert(
                        place,
                        one.kind,
                        f"{text} (allowed: {percent(one.fraction)})",
                        format=one.format.name,
                        value=value,
                        threshold=one.fraction,
                    )
                )
    return tuple(found)


class InputScales:
    """Looks up the scales of what tensors were computed from, as stored, for alerts about them.

    Args:
        snapshot: Where to look.
        direction: A gradient is computed from the gradients of what its tensor is an input of.
    """

    def __init__(self, snapshot: ScaleSnapshot, direction: Direction) -> None:
        self._snapshot = snapshot
        self._direction = direction

    def of(self, place: int) -> tuple[TensorScale, ...]:
        """The scales for the tensor at a position in ``snapshot.names``."""
        return tuple(self._scales[name] for name in self._inputs[place] if name in self._scales)

    def alert(
        self,
        place: int,
        kind: AlertKind,
        text: str,
        *,
        value: float,
        threshold: float,
        format: str = "",
    ) -> ScaleAlert:
        """An alert about the tensor at a position in ``snapshot.names``, with these scales."""
        snapshot = self._snapshot
        return ScaleAlert(
            kind=kind,
            step=snapshot.step,
            tensor=snapshot.names[place],
            module=snapshot.modules[place],
            direction=self._direction,
            text=text,
            format=format,
            value=value,
            threshold=threshold,
            inputs=self.of(place),
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
        amax = log2_amax(snapshot, direction).tolist()
        return {
            name: TensorScale(name, *scales)
            for name, *scales in zip(snapshot.names, rms, amax, strict=True)
        }


def log2_amax(snapshot: ScaleSnapshot, direction: Direction) -> FloatArray:
    """``log2`` of the largest finite magnitude of the stored tensors, shape ``(tensors,)``.

    ``-inf`` for a tensor of zeros, NaN where nothing was measured.
    """
    with np.errstate(divide="ignore"):
        amax: FloatArray = np.log2(snapshot.column("abs_max", direction))
    return amax - snapshot.log2_units(direction)


def percent(fraction: float) -> str:
    """A fraction for people: small ones are not rounded to nothing."""
    if fraction == 0.0:
        return "0 %"
    return "less than 0.001 %" if fraction < 1e-5 else f"{100 * fraction:.3g} %"


def _nonfinite(snapshot: ScaleSnapshot, direction: Direction) -> tuple[FloatArray, FloatArray]:
    """Numbers of NaN and of infinities; 0 where nothing was measured."""
    return (
        np.nan_to_num(snapshot.column("nans", direction)),
        np.nan_to_num(snapshot.column("infs", direction)),
    )


def _nonfinite_alert(
    snapshot: ScaleSnapshot, place: int, direction: Direction, values: int, gradients: int
) -> ScaleAlert:
    nans, infs = (int(one[place]) for one in _nonfinite(snapshot, direction))
    numel = int(snapshot.column("numel", direction)[place])
    parts = [f"{nans:,} NaN"] * bool(nans) + [f"{infs:,} infinite"] * bool(infs)
    text = (
        f"holds {' and '.join(parts)} of {numel:,} elements, the first of the step in graph order"
    )
    others = values + gradients - 1
    if others:
        text += f" ({others} more {'tensors' if others > 1 else 'tensor'} or gradients after it)"
    inputs = InputScales(snapshot, direction)
    return inputs.alert(place, "nonfinite", text, value=float(nans + infs), threshold=0.0)


def _fills(snapshot: ScaleSnapshot, place: int) -> bool:
    return op_of(snapshot.names[place], snapshot.modules[place]) in _FILLING


def _place(kind: Kind) -> int:
    return FORMAT_KINDS.index(kind)
