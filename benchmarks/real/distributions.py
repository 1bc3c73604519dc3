"""What is installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def versions_of(distributions: Iterable[str]) -> dict[str, str | None]:
    """The version of each distribution, ``None`` for those that are not installed."""
    return {name: _version(name) for name in distributions}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
