"""What the products of a running step tell those who watch it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class RanProduct:
    """A product that has run in units.

    Attributes:
        name: Its name in the gauge, such as ``"blocks.0.up.linear"``.
        storages: Address of the storage of each operand, as the user's code passed it.
        log2_sigmas: Each operand was divided by two to the power of this before the product.
        log2_gamma: The arriving gradient is divided by two to the power of this.
    """

    name: str
    storages: tuple[int, ...]
    log2_sigmas: tuple[int, ...]
    log2_gamma: int


@contextlib.contextmanager
def watching() -> Iterator[list[RanProduct]]:
    """Within this context the products that run in units append themselves to the list."""
    yield []
