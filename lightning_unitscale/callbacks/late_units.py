"""When to measure tensors of captured steps that were zero when the others got their units."""

from __future__ import annotations

from lightning_unitscale.callbacks.distributed import is_distributed
from lightning_unitscale.loops.loop import gathered
from lightning_unitscale.lossless.calibrate import Measured
from lightning_unitscale.lossless.fp8_range import Unrepresentable
from lightning_unitscale.lossless.rewrite import LosslessUnitScale

# In each of the first steps, in which most of them come; a tensor may be zero for ever.
_FIRST_STEPS = 64
# What costs a second run of the step, or a meeting of all ranks, waits longer from time to time.
_EARLY = frozenset({1, 2, 4})
_EVERY = 8


class LateUnits:
    """Says at which steps to measure what has no unit yet, and what to take of that.

    All ranks decide alike: they have the same units.

    Args:
        rewrite: The pass that has the units.
    """

    def __init__(self, rewrite: LosslessUnitScale) -> None:
        self._rewrite = rewrite
        self._first_step: int | None = None
        # Names that probes see, and those that have just got units: whether these fit into a format
        # shows now.
        self._seen: frozenset[str] | None = None
        self._new: frozenset[str] = frozenset()

    def is_due(self, step: int) -> bool:
        """Whether to measure at an optimizer step what probes see."""
        if not self._rewrite.missing:
            self._first_step = None
        elif self._first_step is None:
            self._first_step = step
        if self._new or self._first_step is None:
            return bool(self._new)
        count = step - self._first_step
        return self._is_early(count) or (not is_distributed() and 0 < count < _FIRST_STEPS)

    def needs_rehearsal(self, step: int) -> bool:
        """Whether to rehearse an optimizer step, since no probe sees a tensor without a unit."""
        if self._first_step is None or self._seen is None or self._rewrite.missing <= self._seen:
            return False
        return self._is_early(step - self._first_step)

    def of(self, measured: Measured, *, rehearsed: bool = False) -> Measured:
        """What was measured of tensors without units, and what a format would lose of them.

        Args:
            measured: What all ranks have measured.
            rehearsed: Whether a rehearsal has: it measures what formats lose in the new units,
                which probes see in the next step.
        """
        missing, before = self._rewrite.missing, self._new
        probed = self._rewrite.drift.names
        self._seen = probed.union(*(gathered(probed) if is_distributed() else ()))
        forward, backward = (
            {name: rms for name, rms in sizes.items() if name in missing}
            for sizes in (measured.forward, measured.backward)
        )
        late = frozenset((*forward, *backward))
        self._new = frozenset() if rehearsed else late
        lost = measured.unrepresentable
        products, gradients = (
            {
                name: why
                for name, why in reasons.items()
                if _is_of(name, late if rehearsed else before)
            }
            for reasons in (lost.products, lost.gradients)
        )
        return Measured(forward, backward, unrepresentable=Unrepresentable(products, gradients))

    def report(self) -> str:
        """What ``explain()`` says of tensors without units."""
        names = sorted(self._rewrite.missing)
        if not names:
            return ""
        return f"No units yet, since they were zero whenever measured: {', '.join(names)}."

    @staticmethod
    def _is_early(count: int) -> bool:
        return count in _EARLY or (count > 0 and count % _EVERY == 0)


def _is_of(product: str, names: frozenset[str]) -> bool:
    """Whether one of the names is of a product: of its gradient, or of an operand."""
    return any(name == product or name.startswith(f"{product}:") for name in names)
