"""Put attributes of one object in front of those of its class, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context ``owner`` has these attributes; what it had itself is back afterwards."""
    own = vars(owner)
    before = {name: own.get(name, _MISSING) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                own.pop(name, None)
            else:
                own[name] = value
