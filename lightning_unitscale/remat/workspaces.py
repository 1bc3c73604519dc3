"""Bytes that a kernel allocates and frees again while it runs, beside its outputs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.remat.costs import hint, tensors_of


def workspace_bytes(node: fx.Node) -> int:
    """Bytes beyond the outputs that somebody reads: buffers, and outputs nobody takes."""
    value = node.meta.get("val")
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name == "bernoulli":
        return _bernoulli(value)
    if isinstance(value, (tuple, list)):
        return _untaken(node, value)
    return 0


def _untaken(node: fx.Node, value: Any) -> int:
    read = {id(storage) for i in node.all_input_nodes for storage in _storages(i.meta.get("val"))}
    taken = {user.args[1] for user in node.users if user.target is operator.getitem}
    return sum(
        hint(one.untyped_storage().nbytes())
        for position, one in enumerate(value)
        if isinstance(one, Tensor)
        and position not in taken
        and not read & {id(storage) for storage in _storages(one)}
    )


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in tensors_of(value)]


def _bernoulli(value: Any) -> int:
    """MKL draws integers, which are then converted."""
    on_cpu = isinstance(value, Tensor) and value.device.type == "cpu"
    if not on_cpu or not torch.backends.mkl.is_available() or value.dtype == torch.int32:
        return 0
    return 4 * hint(value.numel())
