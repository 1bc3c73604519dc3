"""Give AOTAutograd's graphs plain tensors in place of subclasses that only Python knows.

Dynamo has traced the operations of such a class (``__torch_function__``) into the graph, and makes
the results instances of it. AOTAutograd calls its graph with the inputs as they are, and its checks
of the first call end in an error then. Classes with ``__torch_dispatch__`` it unwraps by itself.

Private names used here were checked on torch 2.13 and 2.11: ``_disabled_torch_dispatch_impl``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def on_plain_tensors(run: Callable[..., Any], examples: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs ``run`` on the numbers of its inputs.

    Dynamo guards on classes, so the examples show which inputs are of which.
    """
    positions = [index for index, value in enumerate(examples) if is_python_subclass(value)]
    if not positions:
        return run

    @functools.wraps(run)
    def run_on_plain(*inputs: Any) -> Any:
        plain = list(inputs)
        for index in positions:
            # The same memory, and a gradient reaches the tensor that was given.
            plain[index] = plain[index].as_subclass(Tensor)
        return run(*plain)

    return run_on_plain


def is_python_subclass(value: Any) -> bool:
    """Whether a tensor is of a class whose operations only Python knows."""
    # A parameter may hold one.
    tensor = value.data if isinstance(value, nn.Parameter) else value
    kind = type(tensor)
    return (
        isinstance(tensor, Tensor)
        and kind not in {Tensor, nn.Parameter}
        and kind.__torch_dispatch__ is _NO_DISPATCH
    )
