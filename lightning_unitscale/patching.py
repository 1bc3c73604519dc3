"""Give one object, class or Python module other attributes, for a while."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context ``owner`` has these attributes; what it had itself is back afterwards."""
    before = {name: vars(owner).get(name, _MISSING) for name in attributes}
    _put(owner, attributes)
    try:
        yield
    finally:
        _put(owner, before)


def _put(owner: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(owner, type):
            # The dictionary of a class is read-only.
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        elif value is _MISSING:
            vars(owner).pop(name, None)
        else:
            # Past a __setattr__ such as that of a torch module, which files what it is given.
            vars(owner)[name] = value


def copied_method(method: Any, memo: dict[int, Any]) -> Any:
    """The method of an object's copy: what stands in for it is not copied.

    Args:
        method: The object's own.
        memo: What has been copied, by identity.
    """
    if isinstance(method, MethodType):
        return MethodType(method.__func__, memo.get(id(method.__self__), method.__self__))
    return method


def reduced_method(method: Any) -> Any:
    """What a pickled object has in a method's place: its own."""
    if isinstance(method, MethodType):
        return getattr, (method.__self__, method.__name__)
    return functools.partial, (method,)


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for a call that is left out."""
