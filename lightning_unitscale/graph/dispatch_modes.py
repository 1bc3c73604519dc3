"""The only file here that knows modes of torch's dispatcher.

Private names used here were checked on torch 2.11 and 2.13: ``torch._C._len_torch_dispatch_stack``
and the ``_schema`` of an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def is_watched() -> bool:
    """Whether a mode such as ``FlopCounterMode`` looks at every operation of the calling code."""
    count: int = torch._C._len_torch_dispatch_stack()
    return count > 0


class Writes(TorchDispatchMode):
    """Notes the storages that operators write into, by what their schemas say.

    Attributes:
        storages: The storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[torch.UntypedStorage] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = args[position] if position < len(args) else given.get(argument.name)
                tensors = (one for one in tree_leaves(value) if isinstance(one, Tensor))
                self.storages.update(one.untyped_storage() for one in tensors)
        return func(*args, **given)
