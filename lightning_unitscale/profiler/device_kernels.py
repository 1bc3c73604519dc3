"""Which operators a device runs for the functions that do not run the same ones everywhere.

The CPU and a GPU save different things for the backward pass: of a dropout the CPU keeps the
scaled mask in the type of the input, a GPU a mask of booleans; attention has other kernels, and a
GPU fuses the RMS norm. On fake tensors torch decides as for the CPU (see
``memory.SimulatedDevice``), so what a GPU would take is chosen here, and what its autocast does
otherwise than the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_HALF = (torch.float16, torch.bfloat16)
# The largest head that the flash kernel takes.
_FLASH_DEPTH = 256
# The multiple of elements that rows of a mask are padded to for the memory-efficient kernel.
_MASK_ALIGNMENT = 16


def calls_of(device: torch.device) -> Call:
    """How functions are called on a device: ``call(function, args, kwargs)``."""
    return _call_on_gpu if device.type == "cuda" else _call_as_is


def _call_as_is(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _call_on_gpu(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_autocast_enabled("cpu"):
        args, kwargs = _autocast(function, args, kwargs)
    kernel = _GPU_KERNELS.get(function)
    return function(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)


def _autocast(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in FP32 where a GPU's autocast computes in it and the CPU's does not.

    References:
        "Automatic Mixed Precision package", CUDA Ops that can autocast to float32.
    """
    if getattr(function, "__name__", "") not in _FP32_ON_GPU:
        return args, kwargs

    def cast(one: Any) -> Any:
        return one.float() if isinstance(one, Tensor) and one.dtype in _HALF else one

    return tuple(map(cast, args)), {name: cast(one) for name, one in kwargs.items()}


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0.0 < p < 1.0 or inplace or not input.numel():
        return F.dropout(input, p, training, inplace)
    result: Tensor = torch.native_dropout(input, p, True)[0]
    return result


def _torch_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(input, p, train)


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    fused = getattr(aten, "_fused_rms_norm", None)
    if fused is None or weight is None or weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = fused(input, list(normalized_shape), weight, eps)[0]
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that torch takes on a GPU of compute capability 8.0 or later.

    In torch's order: flash for 16 bits without a mask, then the memory-efficient kernel, then plain
    products. The third is also what shared heads with a mask, or in FP32, come to.
    """
    is_plain = query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype
    depth = max(query.shape[-1], value.shape[-1])
    if is_plain and query.dtype in _HALF and attn_mask is None and depth <= _FLASH_DEPTH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    shares_heads = query.shape[-3] != key.shape[-3]
    if is_plain and query.dtype in (*_HALF, torch.float32) and not shares_heads:
        return _memory_efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    result: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    depth = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.shape[-1] % 8:
        padding = (0, -query.shape[-1] % 8)
        query, key, value = (F.pad(one, padding) for one in (query, key, value))
    result: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result if result.shape[-1] == depth else result[..., :depth]


def _memory_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            zeros = torch.zeros((), dtype=query.dtype, device=query.device)
            mask = torch.where(mask, zeros, -torch.inf)
        if mask.shape[-1] % _MASK_ALIGNMENT:
            length = mask.shape[-1]
            mask = F.pad(mask, (0, -length % _MASK_ALIGNMENT))[..., :length]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    result: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]
    return result


_FP32_ON_GPU = frozenset(
    {"softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy", "nll_loss", "mse_loss",
     "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits",
     "cosine_similarity", "logsumexp", "norm", "exp", "expm1", "log", "log2", "log10", "log1p",
     "pow", "reciprocal", "rsqrt", "softplus", "sum", "prod", "cumsum", "cumprod", "interpolate"}
)  # fmt: skip

_GPU_KERNELS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
}
