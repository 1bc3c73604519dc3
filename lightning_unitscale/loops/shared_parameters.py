"""Whether an optimizer has parameters of a module, asked in every step."""

from __future__ import annotations

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class SharedParameters:
    """The parameters that optimizers share with a module.

    A large model has thousands of them, so the one that was found last is looked at first.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By optimizer: which of its parameters it is, and whose in the module, by which name.
        self._found: WeakKeyDictionary[Any, tuple[int, int, nn.Module, str]] = WeakKeyDictionary()

    def are_in(self, optimizer: Any) -> bool:
        """Whether the optimizer has one."""
        groups = optimizer.param_groups
        if (found := self._found.get(optimizer)) is not None:
            group, index, owner, name = found
            with contextlib.suppress(IndexError, KeyError):
                if owner._parameters[name] is groups[group]["params"][index]:
                    return True
        places = {
            id(parameter): (owner, name)
            for owner in self._module.modules()
            for name, parameter in owner._parameters.items()
        }
        for group, options in enumerate(groups):
            for index, parameter in enumerate(options["params"]):
                if (place := places.get(id(parameter))) is not None:
                    self._found[optimizer] = group, index, *place
                    return True
        return False
