"""Arguments that are one of a few words."""

from __future__ import annotations

from collections.abc import Sequence


def check_choice(name: str, value: object, choices: Sequence[str], what: str, advice: str) -> None:
    """Refuse an argument that is none of its choices.

    Args:
        name: Of the argument.
        value: What was given.
        choices: What is expected, in the order in which the error lists it.
        what: What is wrong with any other value, such as ``"unknown rounding"``.
        advice: What to change.

    Raises:
        ValueError: If ``value`` is not one of ``choices``.
    """
    if value not in choices:
        *first, last = map(repr, choices)
        expected = f"{', '.join(first)} or {last}"
        raise ValueError(f"{name}={value!r}: {what}; expected {expected}; {advice}.")
