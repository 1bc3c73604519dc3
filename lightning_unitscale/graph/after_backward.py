"""What runs at the end of a backward pass.

A private name of torch, checked on torch 2.11 and 2.13: the engine's ``queue_callback``, by which
DDP and FSDP end their backward passes as well.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import Variable


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs has added up all gradients of its leaves."""
    Variable._execution_engine.queue_callback(callback)
