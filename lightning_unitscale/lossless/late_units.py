"""When to measure tensors of captured steps that were zero when the others got their units."""

from __future__ import annotations

from dataclasses import replace

from lightning_unitscale.lossless.calibrate import Measured, is_late_look
from lightning_unitscale.lossless.fp8_range import Unrepresentable
from lightning_unitscale.lossless.rewrite import LosslessUnitScale

# In each of the first steps, in which most of them come; a tensor may be zero for ever.
_FIRST_STEPS = 64


class LateUnits:
    """Says at which steps to measure what has no unit yet, and what to take of that."""

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self._rewrite = rewrite
        self._first_step: int | None = None
        # Names that probes see, and those that have just got units: whether these fit into a format
        # shows now.
        self._seen: frozenset[str] | None = None
        self._new: frozenset[str] = frozenset()
        # Whether some of several got units: in a format, what was flushed there hides the others.
        self._has_found = False

    def is_due(self, step: int) -> bool:
        """Whether to measure at an optimizer step what probes see."""
        if not self._rewrite.missing:
            self._first_step = None
        elif self._first_step is None:
            self._first_step = step - 1  # at the latest
        if self._new or self._first_step is None:
            return bool(self._new)
        count = step - self._first_step
        return is_late_look(count) or (self._is_alone() and 0 < count < _FIRST_STEPS)

    def needs_rehearsal(self, step: int) -> bool:
        """Whether to rehearse an optimizer step, for what probes do not see, or not as it is."""
        missing = self._rewrite.missing
        if not missing or self._first_step is None or self._seen is None:
            return False
        return self._has_found or (
            not missing <= self._seen and is_late_look(step - self._first_step)
        )

    def of(self, measured: Measured, *, rehearsed: bool = False) -> Measured:
        """What was measured of tensors without units, and what a format would lose of them."""
        missing, before = self._rewrite.missing, self._new
        if missing:
            self._seen = self._joint(self._rewrite.drift.names)
        own = measured.of_names(missing)
        late = frozenset((*own.forward, *own.backward))
        self._new = frozenset() if rehearsed else late
        self._has_found = bool(late) and not rehearsed
        lost = measured.unrepresentable
        products, gradients = (
            {
                name: why
                for name, why in reasons.items()
                if _is_of(name, late if rehearsed else before)
            }
            for reasons in (lost.products, lost.gradients)
        )
        return replace(own, unrepresentable=Unrepresentable(products, gradients))

    def report(self) -> str:
        """What ``explain()`` says of tensors without units."""
        names = sorted(self._rewrite.missing)
        if not names:
            return ""
        return f"No units yet, since they were zero whenever measured: {', '.join(names)}."

    def _is_alone(self) -> bool:
        """Return whether no other rank has to measure at the same steps."""
        return True

    def _joint(self, names: frozenset[str]) -> frozenset[str]:
        """Return the names that any rank has."""
        return names


def _is_of(product: str, names: frozenset[str]) -> bool:
    """Whether one of the names is of a product: of its gradient, or of an operand."""
    return any(name == product or name.startswith(f"{product}:") for name in names)
