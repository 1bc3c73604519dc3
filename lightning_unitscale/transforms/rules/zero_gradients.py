"""What stands in for a backward pass while a step is rehearsed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def zero_gradients(*args: Any, **kwargs: Any) -> None:
    """Give every leaf that a loss depends on a gradient of zeros, if it has none.

    A step under manual optimization may read ``parameter.grad`` after its backward pass: to clip by
    hand, to log a norm. The pass itself must not run in a rehearsal: the hooks of DDP would wait
    for other ranks. What the loss does not depend on keeps ``None``, as after a real backward pass.

    Args:
        *args: Arguments of the backward pass, the loss among them.
        **kwargs: Its keyword arguments.
    """
    seen: set[Any] = set()
    pending: list[Any] = [
        one.grad_fn for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)
    ]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [one for one, _ in node.next_functions]
        # Only the node that adds to the gradient of a leaf has a variable.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
