"""When the units of a gauge are looked at again."""

from __future__ import annotations

from typing import Literal

# Steps at which "auto" looks: often while the scales of a fresh model move, then rarely.
_EARLY_LOOKS = frozenset({8, 16, 32, 64})
_LOOK_EVERY = 128


class Looks:
    """The optimizer steps at which a gauge is looked at.

    Args:
        recalibrate: ``"auto"``, a number of steps, or ``None`` for never.

    Raises:
        ValueError: If it is none of these.
    """

    def __init__(self, recalibrate: Literal["auto"] | int | None) -> None:
        valid_number = isinstance(recalibrate, int) and not isinstance(recalibrate, bool)
        if not (recalibrate in ("auto", None) or (valid_number and recalibrate > 0)):  # type: ignore[operator]
            raise ValueError(
                f"recalibrate={recalibrate!r}: no such interval; expected 'auto', None or a "
                "positive number of optimizer steps; pass recalibrate='auto'."
            )
        self._recalibrate = recalibrate

    def at(self, step: int) -> bool:
        """Whether to look at this step."""
        if self._recalibrate is None or step <= 0:
            return False
        if self._recalibrate == "auto":
            return step in _EARLY_LOOKS or step % _LOOK_EVERY == 0
        return step % int(self._recalibrate) == 0
