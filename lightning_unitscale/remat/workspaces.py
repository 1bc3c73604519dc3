"""Bytes that an operation allocates and that are free again once it has run."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.profiler import workspace
from lightning_unitscale.remat.costs import concrete, example_of, tensors_of
from lightning_unitscale.remat.sizes import hint


def workspace_bytes(node: fx.Node) -> int:
    """Bytes beyond the outputs that somebody reads: the kernel's own, and outputs nobody takes."""
    value = node.meta.get("val")
    if node.op != "call_function" or node.target is operator.getitem:
        return 0
    devices = {one.device.type for one in tensors_of(value)}
    if not devices:
        return 0
    args = [example_of(one) for one in node.args]
    kwargs = {key: example_of(one) for key, one in node.kwargs.items()}
    device = devices.pop()
    own = workspace.workspace_bytes(node.target, args, kwargs, concrete(value), device)
    untaken = _untaken(node, value) if isinstance(value, (tuple, list)) else 0
    return own + untaken


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
