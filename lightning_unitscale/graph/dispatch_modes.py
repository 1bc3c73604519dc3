"""The only file here that asks for modes of torch's dispatcher, by a private name of torch.

``torch._C._len_torch_dispatch_stack``; checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import torch


def is_watched() -> bool:
    """Whether a mode such as ``FlopCounterMode`` looks at every operation of the calling code."""
    count: int = torch._C._len_torch_dispatch_stack()
    return count > 0
