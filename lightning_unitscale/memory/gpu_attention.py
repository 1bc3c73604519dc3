"""Choose the same attention kernel as torch on a GPU, and run it on fake tensors.

The conditions are those of torch 2.13's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``
and ``sdp_utils_cpp.h``, for dense tensors and the default switches of ``torch.backends.cuda``. They
are checked in torch's order: cuDNN on Hopper and Blackwell data-center GPUs, flash, the
memory-efficient kernel, and matmuls.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.capture.decompose import attention_as_matmuls
from lightning_unitscale.memory.gpus import GPU

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
# The largest head size that the flash kernel takes, and the one that cuDNN takes.
_FLASH_DEPTH = 256
_CUDNN_DEPTH = 128
_CUDNN_ALIGNMENT = 8
_FLASH_ALIGNMENT = 8  # the flash kernel's inputs are padded to a multiple of this
# Rows of a mask are padded to a multiple of this for the memory-efficient kernel.
_MASK_ALIGNMENT = 16
# Bits that a tensor core reads at once. The memory-efficient kernel's heads are aligned to them.
_ALIGNED_BITS = 128
_MAX_BATCH = 65535


class _Inputs(NamedTuple):
    """Arguments of an attention, cast as by autocast."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def needs_gradient(self) -> bool:
        """Check whether a fused kernel saves the sums of its rows."""
        qkv = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in qkv)

    @property
    def has_rows(self) -> bool:
        """Check that the numbers of a row are adjacent in memory, also in a mask."""
        mask = () if self.mask is None else (self.mask,)
        rows = (self.query, self.key, self.value, *mask)
        return all(tensor.shape[-1] == 1 or tensor.stride(-1) == 1 for tensor in rows)

    @property
    def depths(self) -> tuple[int, int, int]:
        """Return the head sizes of query, key and value."""
        return self.query.shape[-1], self.key.shape[-1], self.value.shape[-1]

    @property
    def is_fusible(self) -> bool:
        """Check the needs of all fused kernels: four dimensions, one type, equal batches."""
        query, key, value = self.query, self.key, self.value
        if not query.dim() == key.dim() == value.dim() == 4:
            return False
        if not query.dtype == key.dtype == value.dtype or query.shape[0] != key.shape[0]:
            return False
        if key.shape[0] != value.shape[0] or 0 in (query.shape[-2], key.shape[-2]):
            return False
        heads, shared = query.shape[1], key.shape[1]
        if self.enable_gqa:
            return shared == value.shape[1] and heads % shared == 0
        return heads == shared == value.shape[1]


def attention(
    gpu: GPU,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run the kernel that torch chooses for ``scaled_dot_product_attention`` on a GPU."""
    if torch.is_autocast_enabled("cpu"):  # the simulated one; see ``simulating``
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (_cast(tensor, dtype) for tensor in (query, key, value))
        attn_mask = None if attn_mask is None else _cast(attn_mask, dtype)
    inputs = _Inputs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for can_run, run in (
        (_prefers_cudnn, _cudnn),
        (_can_use_flash, _flash),
        (_can_use_efficient, _efficient),
    ):
        if inputs.is_fusible and inputs.has_rows and can_run(gpu, inputs):
            return run(inputs)
    return _matmuls(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _is_half(gpu: GPU, inputs: _Inputs) -> bool:
    if gpu.capability >= (8, 0):
        return inputs.query.dtype in _HALF
    return inputs.query.dtype == torch.float16


def _prefers_cudnn(gpu: GPU, inputs: _Inputs) -> bool:
    """Check ``check_prefer_cudnn_attention`` and ``can_use_cudnn_attention``."""
    # The preference needs cuDNN 9.15.1, which the wheels for CUDA 13 have.
    if gpu.capability[0] not in (9, 10) or not _is_half(gpu, inputs):
        return False
    heads = max(inputs.query.shape[:2])
    depths = (inputs.depths[0], inputs.depths[2])
    num_keys, num_queries = inputs.key.shape[-2], inputs.query.shape[-2]
    return (
        heads <= _MAX_BATCH
        and max(depths) <= _CUDNN_DEPTH
        and not any(depth % _CUDNN_ALIGNMENT for depth in depths)
        # cuDNN's dropout has a resolution of 1/16. Torch 2.11 did not check it.
        and (16 * inputs.dropout_p).is_integer()
        and num_keys != 1
        and (not inputs.dropout_p or num_queries != 1)
        and _takes_mask(inputs)
    )


def _takes_mask(inputs: _Inputs) -> bool:
    """Check ``check_attn_mask_shape``."""
    mask = inputs.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    shape = (*inputs.query.shape[:3], inputs.key.shape[-2])[-mask.dim() :]
    return all(size in (1, whole) for size, whole in zip(mask.shape, shape, strict=True))


def _can_use_flash(gpu: GPU, inputs: _Inputs) -> bool:
    """Check ``can_use_flash_attention``."""
    depth = inputs.depths[0]
    if inputs.mask is not None or gpu.capability < (8, 0) or not _is_half(gpu, inputs):
        return False
    if len(set(inputs.depths)) > 1 or depth > _FLASH_DEPTH:
        return False
    if inputs.is_causal and inputs.query.shape[-2] != inputs.key.shape[-2]:
        return False
    # The backward kernel needs more shared memory than these GPUs have.
    is_small = (8, 6) <= gpu.capability <= (8, 9) or gpu.capability[0] == 12
    if is_small and inputs.needs_gradient:
        return depth <= 192 or (not inputs.dropout_p and depth > 224)
    return True


def _can_use_efficient(gpu: GPU, inputs: _Inputs) -> bool:
    """Check ``can_use_mem_efficient_attention``. It has no kernel for shared heads."""
    dtype = inputs.query.dtype
    if gpu.capability < (8, 0) and dtype == torch.bfloat16:
        return False
    if dtype not in (*_HALF, torch.float32) or inputs.query.shape[1] != inputs.key.shape[1]:
        return False
    alignment = _ALIGNED_BITS // (8 * dtype.itemsize) if gpu.capability >= (8, 0) else 1
    depth, key_depth, value_depth = inputs.depths
    return depth == key_depth and not depth % alignment and not value_depth % alignment


def _cudnn(inputs: _Inputs) -> Tensor:
    query, key, value, mask, dropout_p, is_causal, scale, _ = inputs
    bias = None
    if mask is not None:
        # A cast mask is repeated for the batch by its strides alone.
        bias = _additive(mask, query.dtype)
        shape = (query.shape[0], bias.shape[1] if bias.dim() == 4 else 1)
        bias = bias.expand(*shape, query.shape[-2], key.shape[-2])
    result: Tensor = aten._scaled_dot_product_cudnn_attention(
        query, key, value, bias, inputs.needs_gradient, dropout_p, is_causal, False, scale=scale
    )[0]
    return result


def _flash(inputs: _Inputs) -> Tensor:
    query, key, value, _, dropout_p, is_causal, scale, _ = inputs
    depth = query.shape[-1]
    scale = depth**-0.5 if scale is None else scale
    if depth % _FLASH_ALIGNMENT:
        padding = (0, -depth % _FLASH_ALIGNMENT)
        query, key, value = (F.pad(tensor, padding) for tensor in (query, key, value))
    result: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result if result.shape[-1] == depth else result[..., :depth]


def _efficient(inputs: _Inputs) -> Tensor:
    query, key, value, mask, dropout_p, is_causal, scale, _ = inputs
    bias = None if mask is None else _aligned(_additive(mask, query.dtype), query, key)
    result: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, inputs.needs_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _dropout(weights: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(weights, p, train)[0]


_matmuls = attention_as_matmuls(None, _dropout)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to numbers that are added."""
    if mask.dtype != torch.bool:
        return mask
    zeros = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zeros, -torch.inf)


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Repeat a mask for batch and heads, in rows of an aligned length."""
    if mask.shape[-1] % _MASK_ALIGNMENT:
        length = mask.shape[-1]
        mask = F.pad(mask, (0, -length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
