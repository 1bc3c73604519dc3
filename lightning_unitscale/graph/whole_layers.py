"""Layers that torch runs as one kernel while they are evaluated, products and all.

``nn.TransformerEncoderLayer`` takes such a kernel where no gradient is wanted. Nothing inside of it
can be rewritten: its products would keep their precision while the same layer is trained in FP8,
and weights that rules have set to RMS 1 would miss their factors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def opened_layers(are_opened: bool) -> Iterator[None]:
    """Within this context such layers are captured operation by operation, if they are to be.

    Args:
        are_opened: Whether to; without it the user's own setting holds, and with it the user's
            bits.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and not are_opened)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
