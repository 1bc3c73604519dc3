"""Multiply a tensor by one factor in the forward pass and its gradient by another in the backward.

Unit scaling changes a graph only by this primitive. With powers of two it is exact: multiplying by
2**k only moves the exponent, so nothing is rounded unless a value leaves the range of its type.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from lightning_unitscale.compiling import is_compiling
from lightning_unitscale.patching import shadowed

__all__ = ["scale", "scale_bwd", "scale_fwd"]


def whole_view(tensor: Tensor) -> Tensor:
    """Return a view of all of a tensor, with its strides, also for dimensions of size 1."""
    # ``view_as`` recomputes those, and convolutions use them to detect channels-last images. A
    # single image would go through another kernel, with other last bits.
    if tensor.layout is torch.jagged:
        return tensor.view_as(tensor)
    return torch.ops.aten.alias.default(tensor)


def is_transforming() -> bool:
    """Check whether a ``torch.func`` transform (``grad``, ``vmap``, ...) runs the calling code."""
    return torch._C._are_functorch_transforms_active()


# A context without the ``torch.func`` transforms that run the calling code.
outside_transforms = temporarily_clear_interpreter_stack


@contextlib.contextmanager
def leaving_transforms() -> Iterator[None]:
    """Leave, with this context, the transforms that were entered within it."""
    # A captured graph enters and leaves them by operations of its own. So an exception in between
    # leaves them active for all later operations, also ordinary ones.
    functorch, autograd = torch._C._functorch, torch._C._autograd
    depth = functorch.get_dynamic_layer_stack_depth()
    message = autograd._saved_tensors_hooks_get_disabled_error_message()
    is_dual = forward_ad._current_level >= 0
    try:
        yield
    except BaseException:
        if not is_dual:
            # There may be a level of forward-mode differentiation, which only a try shows. Levels
            # do not nest, so entering fails within one.
            with contextlib.suppress(RuntimeError):
                torch._C._enter_dual_level()
            torch._C._exit_dual_level(level=0)
        raise
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if message is None:
            autograd._saved_tensors_hooks_enable()
        else:
            autograd._saved_tensors_hooks_disable(message)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor inside transforms' wrappers: all samples of ``vmap``, ``grad``'s value."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


@contextlib.contextmanager
def hooks_in_transforms() -> Iterator[None]:
    """Let transforms run under hooks of saved tensors that leave these unchanged.

    Transforms refuse all hooks, because one that changes a tensor would see it wrapped.
    """

    def allowed(message: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with shadowed(torch.autograd.graph, disable_saved_tensors_hooks=allowed):
        yield


Factor = float | Tensor


# One node to Dynamo: torch 2.11 loses gradients when it traces two such functions in a row.
@torch.compiler.allow_in_graph
def scale(input: Tensor, forward_factor: Factor, backward_factor: Factor) -> Tensor:
    """Return ``input * forward_factor``, whose gradient is multiplied by ``backward_factor``.

    The two factors are independent: this is a deliberate change of units, not a derivative.

    ``torch.func`` can transform it by ``grad``, ``vmap`` (also over factors) and ``jacrev``. It has
    no forward-mode derivative, since Dynamo refuses functions that define one.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), section 4, scaled ops.
    """
    return _scaled(input, forward_factor, backward_factor)


def scale_fwd(input: Tensor, factor: Factor) -> Tensor:
    """Multiply by ``factor`` in the forward pass only. The gradient does not change."""
    return scale(input, factor, 1.0)


@torch.compiler.allow_in_graph
def scale_bwd(input: Tensor, factor: Factor) -> Tensor:
    """Multiply the gradient by ``factor``; the result is a view of ``input``."""
    return _scaled(input, None, factor)


def _scaled(input: Tensor, forward_factor: Factor | None, backward_factor: Factor) -> Tensor:
    function = _TransformableScale if is_transforming() else _Scale
    return function.apply(input, forward_factor, backward_factor)


def multiply(tensor: Tensor, factor: Factor) -> Tensor:
    """Return ``tensor * factor`` in the type and layout of ``tensor``, exact for powers of two."""
    # A 16-bit kernel may round a tensor factor to its own type first (2**20 is inf in FP16), so
    # FP16 is multiplied in FP32. An expanded dimension stays expanded and a slice keeps its gaps.
    # With a dense copy later operations could use another kernel, with another order of summation
    # or (on a CPU, which computes vectors and their remainders differently) with other last bits.
    if not is_compiling() and tensor.layout is not torch.strided:
        # The gradient of a sparse embedding, or rows of different lengths: no layout to keep.
        return _product(tensor, factor)
    core = tensor
    if tensor.numel() > 0:
        for dim in range(tensor.dim()):
            if tensor.stride(dim) == 0 and tensor.size(dim) != 1:
                core = core.narrow(dim, 0, 1)
    product = _product(core, factor)
    has_gaps = not core.is_contiguous() and product.stride() != core.stride()
    if core.numel() > 0 and (has_gaps or _alignment(core)):
        product = empty_placed_like(core, product.dtype, _alignment(core)).copy_(product)
    return product if core is tensor else product.expand(tensor.shape)


def _product(tensor: Tensor, factor: Factor) -> Tensor:
    if not isinstance(factor, Tensor):
        return tensor * factor
    # A 0-d tensor counts as much as a 0-d factor in torch's type promotion.
    wide = tensor.float() if tensor.dtype == torch.float16 else tensor
    return (wide * factor).to(tensor.dtype)


# Beyond it a power of two, or its inverse, is not a normal FP32 number, the type in which kernels
# hold a Python factor.
LARGEST_LOG2 = 126
_EXPONENTS = range(-LARGEST_LOG2, LARGEST_LOG2 + 1)
_NUMBERS: Mapping[int, Tensor | float] = {e: 2.0**e for e in _EXPONENTS}
# Powers of two by type and exponent, as tensors for multiplication. Torch makes a tensor of each
# number factor, which takes longer than multiplying a small tensor. FP16 cannot represent all of
# these factors, and numbers are used in FP32.
POWERS_OF_TWO: Mapping[torch.dtype, Mapping[int, Tensor | float]] = {
    torch.float16: _NUMBERS,
    **{
        dtype: dict(
            zip(
                _EXPONENTS,
                torch.tensor([*_NUMBERS.values()], dtype=dtype, device="cpu").unbind(),
                strict=True,
            )
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    },
}


def scale_in_place(tensor: Tensor, exponent: int) -> None:
    """Multiply a tensor by ``2**exponent``, in steps where one factor would overflow."""
    while exponent:
        part = max(-LARGEST_LOG2, min(exponent, LARGEST_LOG2))
        tensor.mul_(POWERS_OF_TWO.get(tensor.dtype, _NUMBERS)[part])
        exponent -= part


def empty_placed_like(tensor: Tensor, dtype: torch.dtype, offset: int) -> Tensor:
    """Allocate memory whose dimensions merge where those of ``tensor`` do, and nowhere else."""
    # Kernels run over merged dimensions, and in other steps if rows are aligned differently. So
    # every stride and the address are those of ``tensor`` modulo a cache line. The gaps themselves
    # may be smaller: a slice of one column out of a thousand does not need a thousand columns.
    shape, strides = tensor.shape, tensor.stride()
    if isinstance(sum(shape) + sum(strides), torch.SymInt):  # as soon as one of them is
        return torch.empty(shape, dtype=dtype, device=tensor.device)
    placed, end = placed_strides(shape, strides, LINE_BYTES // tensor.element_size())
    spread = torch.empty(offset + end, dtype=dtype, device=tensor.device)
    return spread.as_strided(shape, placed, offset)


@functools.lru_cache(maxsize=2**12)
def placed_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], line: int
) -> tuple[tuple[int, ...], int]:
    """Return the strides of :func:`empty_placed_like`, and the number of elements they span."""
    placed = [1] * len(shape)
    end, true_end = 1, 1
    # From the innermost dimension outwards. One of size 1 is never stepped over.
    for dim in sorted(range(len(shape)), key=strides.__getitem__):
        size, stride = shape[dim], strides[dim]
        if size == 1:
            placed[dim] = stride  # kernels read the order of dimensions from it
            continue
        placed[dim] = end if stride == true_end else end + 1 + (stride - end - 1) % line
        end, true_end = placed[dim] * size, stride * size
    return tuple(placed), end


LINE_BYTES = 64


def _alignment(tensor: Tensor) -> int:
    """Return the offset of ``tensor`` in its cache line in elements, or 0 under a compiler."""
    if is_compiling():
        return 0
    offset = tensor.storage_offset()
    return 0 if isinstance(offset, torch.SymInt) else offset % (LINE_BYTES // tensor.element_size())


def _times(tensor: Tensor, factor: Factor | None) -> Tensor:
    return whole_view(tensor) if factor is None else multiply(tensor, factor)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, forward_factor: Factor | None, backward_factor: Factor
    ) -> Tensor:
        _keep_factor(ctx, backward_factor)
        return _times(input, forward_factor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_output is None:
            return None, None, None
        factor = ctx.saved_tensors[0] if ctx.number is None else ctx.number
        # A gradient may be a tensor of an outer ``vmap``, whose memory multiply must not read.
        is_plain = not is_transforming()
        gradient = multiply(grad_output, factor) if is_plain else scale(grad_output, factor, factor)
        return gradient, None, None


# Separate from the one above, since torch calls a transformable function three times as slowly.
class _TransformableScale(_Scale):
    @staticmethod
    def forward(  # type: ignore[override]
        input: Tensor, forward_factor: Factor | None, backward_factor: Factor
    ) -> Tensor:
        return _times(input, forward_factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _keep_factor(ctx, inputs[2])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Run with the dimension that ``vmap`` hides in front of all others."""
        (tensor, *factors), (dim, *factor_dims) = inputs, in_dims
        size = info.batch_size
        tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        ones = [1] * (tensor.dim() - 1)
        factors = [
            factor if factor_dim is None else factor.reshape(size, *ones)
            for factor, factor_dim in zip(factors, factor_dims, strict=True)
        ]
        return _scaled(tensor, *factors), 0


def _keep_factor(ctx: Any, factor: Factor) -> None:
    """Save tensor factors, or aot_autograd bakes their value into the backward graph."""
    # Zeros in place of a missing gradient would make optimizers move unused parameters.
    ctx.set_materialize_grads(False)
    ctx.number = None if isinstance(factor, Tensor) else factor
    if isinstance(factor, Tensor):
        ctx.save_for_backward(factor)
