"""Checks of arguments: one of a few words, a count, a flag, a name of something that is there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


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


def check_count(name: str, value: object) -> None:
    """Refuse an argument that is no whole number of at least 1.

    Raises:
        ValueError: With the argument's name and value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{name}={value!r}: not a count; expected a whole number of at least 1; "
            f"pass {name}=1 or more."
        )


def check_flag(name: str, value: object) -> None:
    """Refuse an argument that is neither ``True`` nor ``False``.

    Raises:
        ValueError: If it is something else, such as ``"yes"``.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: not a flag; expected True or False; pass one of them.")


def nearest(name: str, others: Iterable[str]) -> str | None:
    """Of some names the one that a person may have meant; ``None`` if there are none."""
    found = difflib.get_close_matches(name, list(others), n=1, cutoff=0.0)
    return found[0] if found else None
