"""What goes on in each thread: whose products run there, and who watches them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.session import ProductSession


@dataclass(frozen=True)
class RanProduct:
    """A product that has just run, for whoever shows tensors in the units that they are stored in.

    Attributes:
        name: Name of the product in the gauge.
        storages: ``untyped_storage().data_ptr()`` of each operand.
        log2_sigmas: What each operand was divided by, as an exponent of two.
        log2_gamma: What the gradient that arrives at the product is divided by.
    """

    name: str
    storages: tuple[int, ...]
    log2_sigmas: tuple[int, ...]
    log2_gamma: int


class _Local(threading.local):
    """What goes on in one thread.

    Attributes:
        session: Whose the forward products are.
        suspended: What ``session`` was before the optimizers that are stepping.
        is_inside: Whether a product is running, whose own kernels are nobody's.
        watched: Where products are listed, if somebody watches.
    """

    session: ProductSession | None = None
    is_inside: bool = False
    watched: list[RanProduct] | None = None

    def __init__(self) -> None:
        self.suspended: list[ProductSession | None] = []


LOCAL = _Local()


@contextlib.contextmanager
def watching() -> Iterator[list[RanProduct]]:
    """Within this context the forward products of this thread are listed as they run."""
    previous, LOCAL.watched = LOCAL.watched, []
    try:
        yield LOCAL.watched
    finally:
        LOCAL.watched = previous
