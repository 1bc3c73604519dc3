"""The only file here that asks for ``torch.func``'s state, by private names of torch.

``torch._C._are_functorch_transforms_active``, ``is_functorch_wrapped_tensor`` and ``get_unwrapped``
of ``torch._C._functorch``, the depth of functorch's stack, the level of forward-mode
differentiation, and whether hooks on saved tensors are disabled, which transforms do; checked on
torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from lightning_unitscale.shadowing import shadowed


def is_transforming() -> bool:
    """Whether a ``torch.func`` transform (``grad``, ``vmap``, ...) runs the calling code."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


@contextlib.contextmanager
def leaving_transforms() -> Iterator[None]:
    """Leave, with this context, the transforms that were entered within it.

    A captured graph enters and leaves them by operations of its own, so an exception in between
    leaves them active for all that follows, plain operations included.
    """
    functorch, autograd = torch._C._functorch, torch._C._autograd
    depth = functorch.get_dynamic_layer_stack_depth()
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    is_dual = forward_ad._current_level >= 0
    try:
        yield
    except BaseException:
        if not is_dual:
            _leave_dual_level()
        raise
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if message is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(message)


def _leave_dual_level() -> None:
    """Leave the level of forward-mode differentiation, if there is one: nothing tells but a try."""
    with contextlib.suppress(RuntimeError):
        # Levels do not nest, so entering fails within one.
        torch._C._enter_dual_level()
    torch._C._exit_dual_level(level=0)


def plain_tensor(tensor: Tensor) -> Tensor:
    """What a transform has wrapped: all samples of a ``vmap``, the value that ``grad`` follows."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def hooks_in_transforms() -> Iterator[None]:
    """Within this context transforms run under hooks of saved tensors that leave these as they are.

    They refuse all hooks, because one that changes a tensor would see it wrapped.
    """

    def allowed(message: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with shadowed(torch.autograd.graph, disable_saved_tensors_hooks=allowed):
        yield
