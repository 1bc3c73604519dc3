"""Call functions as on a GPU: its dropout, norms, attention kernels and types of autocast.

On fake tensors torch chooses a CPU's kernels, since C++ sees them on the CPU (see
:class:`~lightning_unitscale.capture.fake_device.SimulatedDevice`). The CPU and a GPU save different
tensors for the backward pass. A dropout's mask is scaled and has the input's type on the CPU, and
is boolean on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_unitscale.capture.graph_nodes import call
from lightning_unitscale.memory.gpu_attention import attention
from lightning_unitscale.memory.gpu_recurrent import RECURRENT
from lightning_unitscale.memory.gpus import GPU
from lightning_unitscale.memory.single_kernels import SINGLE_KERNELS

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def calls_of(gpu: GPU | None) -> Call:
    """Return ``call(function, args, kwargs)``, which calls functions as on a GPU, or on a CPU."""
    if gpu is None:
        return _call_on_cpu
    kernels: dict[Any, Callable[..., Any]] = {
        F.linear: _linear,
        F.dropout: _dropout,
        torch.dropout: lambda input, p, train: _dropout(input, p, train),
        F.rms_norm: _rms_norm,
        torch.rms_norm: _rms_norm,
        F.scaled_dot_product_attention: partial(attention, gpu),
        **RECURRENT,
        **SINGLE_KERNELS,
    }
    return partial(_call_on_gpu, kernels)


class DeviceCalls(TorchFunctionMode):
    """Mode that calls functions as on a GPU, or on a CPU."""

    def __init__(self, gpu: GPU | None) -> None:
        super().__init__()
        self._call = calls_of(gpu)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _call_on_cpu(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(SINGLE_KERNELS.get(function, function), args, kwargs)


def _call_on_gpu(
    kernels: dict[Any, Callable[..., Any]],
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    # The names are those of "Automatic Mixed Precision package", CUDA Ops that can autocast to
    # float32; the CPU's autocast does not cast their arguments.
    if torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") in _FP32_ON_GPU:
        args = tuple(map(_widened, args))
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
    return kernels.get(function, function)(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias in place after a matmul of a view, as real tensors do and fake ones do not."""
    if bias is None or input.dim() < 3 or input.is_contiguous():
        return F.linear(input, weight, bias)
    result = F.linear(input, weight)
    return result.add_(bias.to(result.dtype))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0.0 < p < 1.0 or inplace or not input.numel():
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    fused = getattr(aten, "_fused_rms_norm", None)
    if fused is None or weight is None or weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    return fused(input, list(normalized_shape), weight, eps)[0]


_FP32_ON_GPU = frozenset(
    {"softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy", "nll_loss", "mse_loss",
     "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits",
     "cosine_similarity", "logsumexp", "norm", "exp", "expm1", "log", "log2", "log10", "log1p",
     "pow", "reciprocal", "rsqrt", "softplus", "sum", "prod", "cumsum", "cumprod", "interpolate"}
)  # fmt: skip
