"""The product in ``nn.Bilinear`` under autocast, which its kernel runs in autocast's type.

``_trilinear`` is a kernel that multiplies by ``bmm``. A plain step runs it within autocast, and so
these in BF16. A captured graph has the kernel as one operation, and runs it outside of autocast, in
FP32: its results would be others. This operator runs the kernel within autocast.

Private names used here were checked on torch 2.13 and 2.11: ``OpOverload._op_dk``,
``torch._C.DispatchKey``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey

_KERNEL = torch.ops.aten._trilinear.default


def trilinear(i1: Tensor, i2: Tensor, i3: Tensor, *dims: Any, **options: Any) -> Tensor:
    """Run the kernel as a step does that is not captured; stands in for its autograd kernel."""
    device = i1.device.type
    if not torch.is_autocast_enabled(device):
        result: Tensor = _KERNEL._op_dk(DispatchKey.Autograd, i1, i2, i3, *dims, **options)
        return result
    within: Tensor = _operator()(i1, i2, i3, *dims[:4], torch.get_autocast_dtype(device))
    return within


@functools.cache
def _operator() -> Any:
    """Return the operator; made when it is first needed, since that takes a moment."""

    @torch.library.custom_op("lightning_unitscale::trilinear_within_autocast", mutates_args=())
    def run(
        i1: Tensor, i2: Tensor, i3: Tensor, expand1: Sequence[int], expand2: Sequence[int],
        expand3: Sequence[int], sumdim: Sequence[int], dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(i1.device.type, dtype):
            result: Tensor = _KERNEL(i1, i2, i3, expand1, expand2, expand3, sumdim)
        return result

    def shape(i1: Tensor, i2: Tensor, i3: Tensor, *dims: Any) -> Tensor:
        result: Tensor = _KERNEL(i1, i2, i3, *dims[:4])
        return result

    run.register_fake(shape)
    run.register_autograd(_gradients, setup_context=_save)
    return run


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.dims = inputs[3:7]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients as torch's own derivative computes them, by the same kernel."""
    i1, i2, i3 = ctx.saved_tensors
    first, second, third, total = ctx.dims
    run = torch.ops.aten._trilinear
    needed = ctx.needs_input_grad
    return (
        run(grad, i2, i3, total, second, third, first) if needed[0] else None,
        run(i1, grad, i3, first, total, third, second) if needed[1] else None,
        run(i1, i2, grad, first, second, total, third) if needed[2] else None,
        *[None] * 5,
    )
