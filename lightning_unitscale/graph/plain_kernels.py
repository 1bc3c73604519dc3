"""Operators that AOTAutograd takes apart by Python code of its own, kept as the kernels they are.

Interpolation and some losses have Python decompositions registered for autograd's dispatch key,
which a traced joint graph gets whatever decompositions it is asked for. They add up in another
order than the kernels of a plain step, so that losses and gradients would differ by an ulp.

A file of its own for the names it takes from torch's dispatcher (checked on torch 2.13 and 2.11):
``OpOverload.py_kernels``, ``OpOverload._dispatch_cache``, ``torch._C.DispatchKey``, and
``upsample_compute_output_size`` and ``suggest_memory_format`` of its decompositions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten
# Left out: what has the kernel's bits once it is taken apart (dropout, GRUs, nearest neighbours),
# batch norm, whose kernel writes to its running statistics behind autograd's back, and LSTMs: the
# shapes that oneDNN's kernel returns cannot be told without running it.
_TAKEN_APART = (
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
)
_RESIZED = {
    aten.upsample_linear1d: aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d: aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d: aten.upsample_trilinear3d_backward.default,
    aten.upsample_bicubic2d: aten.upsample_bicubic2d_backward.default,
}
# Their gradients keep the layout of an image with channels last.
_KEEP_LAYOUT = (
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_trilinear3d_backward.default,
)
_COMPOSITE = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Within this context a traced graph has the kernels that a plain step runs."""
    with contextlib.ExitStack() as stack:
        for operator in _TAKEN_APART:
            stack.enter_context(_with_python_kernel(operator, DispatchKey.Autograd, None))
        for packet, backward in _RESIZED.items():
            # Torch's own in C++ would fix the sizes of a graph in which these are symbols.
            resize = functools.partial(_resized, packet.default)
            for key in _COMPOSITE:
                stack.enter_context(_with_python_kernel(packet.vec, key, resize))
            shape = functools.partial(_gradient_of_resized, backward in _KEEP_LAYOUT)
            stack.enter_context(_with_python_kernel(backward, DispatchKey.Meta, shape))
        yield


def _resized(
    kernel: OpOverload,
    given: Tensor,
    output_size: Any,
    align_corners: bool,
    scale_factors: Any = None,
) -> Any:
    """A resized image by the kernel that takes sizes, which autograd knows as one operation."""
    size = upsample_compute_output_size(given.size(), output_size, scale_factors)
    return kernel(given, size, align_corners, *(scale_factors or [None] * len(size)))


def _gradient_of_resized(
    keeps_layout: bool, grad: Tensor, output_size: Any, input_size: Any, *_: Any
) -> Tensor:
    """What the backward kernel returns, without its numbers."""
    layout = suggest_memory_format(grad) if keeps_layout else torch.contiguous_format
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=layout)


@contextlib.contextmanager
def _with_python_kernel(
    operator: OpOverload, key: DispatchKey, function: Callable[..., Any] | None
) -> Iterator[None]:
    kernels = operator.py_kernels
    before = kernels.pop(key, None)
    if function is not None:
        kernels[key] = function
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        kernels.pop(key, None)
        if before is not None:
            kernels[key] = before
        operator._dispatch_cache.clear()
