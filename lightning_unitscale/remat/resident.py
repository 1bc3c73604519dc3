"""Bytes alive in a step that its graph does not show: gradients, the optimizer's state."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

_SIDE = 16


def storages_of(values: Any) -> dict[int, int]:
    """The storages of all tensors in a nested value, and the bytes of each."""
    storages = (one.untyped_storage() for one in tree_leaves(values) if isinstance(one, Tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def storage_bytes(values: Any) -> int:
    """Bytes of all tensors in a nested value, each storage once."""
    return sum(storages_of(values).values())


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, tied ones once."""
    return storage_bytes([*module.parameters(), *module.buffers()])


def gradient_bytes(module: nn.Module) -> int:
    """Bytes of the gradients of a module's parameters once all of them exist."""
    return storage_bytes([one for one in module.parameters() if one.requires_grad])


def optimizer_state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Bytes of the optimizers' states: as they are, or as they will be after the first step."""
    return sum(_state_bytes(one) for one in optimizers)


def _state_bytes(optimizer: Optimizer) -> int:
    if optimizer.state:
        return storage_bytes(list(map(dict, optimizer.state.values())))
    parameters = [
        one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
    ]
    share = _state_share(optimizer)
    return int(share * storage_bytes(parameters))


def _state_share(optimizer: Optimizer) -> float:
    """Bytes of state per byte of parameter, found by a step on a small one."""
    probe = nn.Parameter(torch.zeros(_SIDE, _SIDE))
    probe.grad = torch.zeros_like(probe)
    small: Optimizer = object.__new__(type(optimizer))
    small.__dict__.update(optimizer.__dict__)
    # A scheduler leaves its own ``step`` on the object, which would move the schedule.
    small.__dict__.pop("step", None)
    for name in [one for one in small.__dict__ if one.endswith("_hooks")]:
        small.__dict__[name] = OrderedDict()
    small.state = defaultdict(dict)
    small.param_groups = [{**optimizer.param_groups[0], "params": [probe]}]
    try:
        small.step()
    except Exception as error:  # a user's class may need, and raise, anything
        warnings.warn(
            f"{type(optimizer).__name__}: its state could not be measured ({error}); expected one "
            "that can step on a CPU; two values per parameter "
            "are assumed.",
            stacklevel=2,
        )
        return 2.0
    states = tree_leaves(list(map(dict, small.state.values())))
    kept = [one for one in states if isinstance(one, Tensor) and one.numel() >= _SIDE]
    return storage_bytes(kept) / (4 * _SIDE * _SIDE)
