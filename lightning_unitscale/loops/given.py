"""What a user gives as callbacks: instances, no two of which set the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_unitscale.arguments import checked_folder, shown
from lightning_unitscale.loops.loop import Claim, LoopCallback

_EXPECTED = "expected UnitScaleCallback(), ScaleMonitor() or several in a list"


def why_not_together(callbacks: Iterable[Any]) -> str | None:
    """What is wrong with a list of callbacks; ``None`` if they go together."""
    listed = list(callbacks)
    for callback in listed:
        if is_own_class(callback):
            return class_given(callback)
    own = [callback for callback in listed if isinstance(callback, LoopCallback)]
    claims: defaultdict[str, list[tuple[LoopCallback, Claim]]] = defaultdict(list)
    for callback in own:
        for claim in callback.claims():
            claims[claim.subject].append((callback, claim))
    for subject, made in claims.items():
        text = _why_not(subject, made)
        if text is not None:
            return text
    return None


def _why_not(subject: str, made: Sequence[tuple[LoopCallback, Claim]]) -> str | None:
    values = {claim.value for _, claim in made}
    if len(made) == 1 or (len(values) == 1 and None not in values):
        return None
    kinds = {type(callback).__name__ for callback, _ in made}
    if len(kinds) == 1:
        return (
            f"callbacks: {kinds.pop()} is given {len(made)} times; expected it once; remove the "
            "others."
        )
    settings = " and ".join(claim.setting for _, claim in made)
    return (
        f"callbacks: {settings} both set {subject}, and only one of them can be in force; expected "
        "one such setting; leave the others out."
    )


def is_own_class(callback: Any) -> bool:
    """Whether the class of a callback was given in place of an instance."""
    return isinstance(callback, type) and issubclass(callback, LoopCallback)


def class_given(kind: type) -> str:
    """The error for a class that was given in place of an instance."""
    name = kind.__name__
    return (
        f"callbacks={name}: it is the class; expected an instance; write {name}(), with its "
        "arguments."
    )


def given_callbacks(callbacks: Any) -> tuple[LoopCallback, ...]:
    """One callback or several, as a tuple."""
    is_one = isinstance(callbacks, (LoopCallback, type, str, bytes, Mapping))
    is_list = isinstance(callbacks, Iterable) and not is_one
    listed: list[Any] = list(callbacks) if is_list else [callbacks]
    for callback in listed:
        if is_own_class(callback):
            raise TypeError(class_given(callback))
        if not isinstance(callback, LoopCallback):
            raise TypeError(f"callbacks={shown(callback)}: {_what_it_is(callback)}")
    text = why_not_together(listed)
    if text is not None:
        raise ValueError(text)
    return tuple(listed)


def check_log_dir(log_dir: Any) -> None:
    """Refuse a folder that TensorBoard's event files cannot be written to; make it if need be."""
    # TensorBoard writes to object stores too.
    if not (isinstance(log_dir, str) and "://" in log_dir):
        checked_folder("log_dir", log_dir)


def _what_it_is(callback: Any) -> str:
    # Lightning's, of whichever of its packages: none is imported here.
    if hasattr(callback, "on_train_batch_start"):
        return f"it works in a Lightning Trainer only; {_EXPECTED}; leave it out."
    return f"it is no callback of lightning_unitscale; {_EXPECTED}; pass one of them."
