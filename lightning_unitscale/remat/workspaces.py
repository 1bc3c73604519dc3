"""Bytes that a kernel allocates and frees again while it runs, beside its outputs."""

from __future__ import annotations

import operator

from torch import Tensor, fx

from lightning_unitscale.remat.costs import tensors_of


def workspace_bytes(node: fx.Node) -> int:
    """Bytes beyond the outputs that are read: outputs nobody takes."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)) or node.target is operator.getitem:
        return 0
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    return sum(
        int(one.untyped_storage().nbytes())
        for position, one in enumerate(value)
        if isinstance(one, Tensor) and position not in taken and tensors_of(one)
    )
