"""The arguments of ``attach``, as torch's own objects."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that replicas of a module call."""
    # One that is compiled in place has all of its call compiled, what it calls included.
    while isinstance(module, DistributedDataParallel) and module._compiled_call_impl is None:
        module = module.module
    return module


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers of one or several, which other packages may have wrapped.

    Raises:
        TypeError: If one of them is none.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = []
    for item in given:
        inner = item
        while not isinstance(inner, Optimizer) and hasattr(inner, "optimizer"):
            inner = inner.optimizer
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"optimizer={item!r}: no torch.optim.Optimizer; expected one, or several in a "
                "list; leave it out for every optimizer with parameters of the module."
            )
        found.append(getattr(inner, "optimizer", inner))
    return found
