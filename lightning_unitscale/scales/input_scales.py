"""The scales of what a tensor was computed from, for alerts about it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from lightning_unitscale.scales.alerts import AlertKind, ScaleAlert, TensorScale
from lightning_unitscale.scales.layout import Direction
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.tensor_statistics import FloatArray


class InputScales:
    """Looks up the scales of what tensors were computed from, as stored, for alerts about them.

    Args:
        snapshot: Where to look.
        direction: A gradient is computed from the gradients of what its tensor is an input of.
    """

    def __init__(self, snapshot: ScaleSnapshot, direction: Direction) -> None:
        self._snapshot = snapshot
        self._direction = direction

    def of(self, index: int) -> tuple[TensorScale, ...]:
        """The scales for the tensor at a position in ``snapshot.names``."""
        return tuple(self._scales[name] for name in self._inputs[index] if name in self._scales)

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
        """An alert about a tensor, with the scales of what it was computed from.

        Args:
            index: Position of the tensor in ``snapshot.names``.
            kind: What is wrong.
            text: The same as the end of a sentence about the tensor.
            value: What was measured, see ``ScaleAlert``.
            threshold: What is allowed, in the same terms.
            format: Name of the number format, if it is about one.
        """
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
            inputs=self.of(index),
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
