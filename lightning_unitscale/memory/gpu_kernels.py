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

from lightning_unitscale.capture.fake_device import has_autocast_rule
from lightning_unitscale.capture.graph_nodes import call
from lightning_unitscale.memory.gpu_attention import attention
from lightning_unitscale.memory.gpu_recurrent import RECURRENT
from lightning_unitscale.memory.gpus import GPU

Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class _Activation(torch.autograd.Function):
    """An elementwise function whose input autograd saves."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(input)
        return operator(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (input,) = ctx.saved_tensors
        return torch.empty_like(input), None


class _InPlace(_Activation):
    """An elementwise function in place, for which autograd saves a copy of the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, operator: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(input.clone())
        ctx.mark_dirty(input)
        return operator(input)


def _activation(
    function: Callable[..., Tensor],
    operator: Callable[[Tensor], Tensor],
    in_place: Callable[[Tensor], Tensor],
) -> Callable[..., Tensor]:
    def run(input: Tensor, inplace: bool = False) -> Tensor:
        if not (torch.is_grad_enabled() and input.requires_grad):
            return function(input, inplace)
        result: Tensor = (
            _InPlace.apply(input, in_place) if inplace else _Activation.apply(input, operator)
        )
        return result

    return run


# Functions in place of torch's. `silu_backward` and `mish_backward` are one kernel each, with a
# composite definition beside it (`native_functions.yaml`). Dispatch modes see the operators of the
# composite one, whose intermediate results no real step allocates.
SINGLE_KERNELS: dict[Any, Callable[..., Tensor]] = {
    F.silu: _activation(F.silu, aten.silu, aten.silu_),
    F.mish: _activation(F.mish, aten.mish, aten.mish_),
}


def calls_of(gpu: GPU | None) -> Call:
    """Return ``call(function, args, kwargs)``, which calls functions as on a GPU, or on a CPU."""
    if gpu is None:
        return _call_on_cpu
    kernels: dict[Any, Callable[..., Any]] = {
        F.linear: _linear,
        F.cross_entropy: _cross_entropy,
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
    if torch.is_autocast_enabled("cpu"):
        name = getattr(function, "__name__", "")
        if name in _FP32_RESULTS and _lacks_type(args, kwargs):
            while args[-1:] == (None,):  # the type may be a positional argument
                args = args[:-1]
            kwargs = {**kwargs, "dtype": torch.float32}
        elif name in _FP32_ARGUMENTS:
            args = tuple(map(_widened, args))
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
    return kernels.get(function, function)(*args, **kwargs)


def _lacks_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Check that a function of a 16-bit tensor was called without the type of its result."""
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return False
    return _is_half(args[0] if args else kwargs.get("input"))


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF


def _widened(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Keep the logarithms of the softmax in 16 bits under autocast, and sum them in FP32.

    References:
        torch, ``native/LossNLL.cpp``, ``cross_entropy_loss``: it asks for a softmax in the type of
        the input, which autocast follows.
    """
    is_cast = _is_half(input) and torch.is_autocast_enabled("cpu")
    options = (weight, size_average, ignore_index, reduce, reduction)
    if not is_cast or label_smoothing or target.is_floating_point():
        return F.cross_entropy(input, target, *options, label_smoothing)
    logs = F.log_softmax(input, 0 if input.dim() == 1 else 1, dtype=input.dtype)
    return F.nll_loss(logs.float(), target, *options)


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
    if weight is None or weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return result


# torch 2.13, ATen/autocast_mode.h: AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_FP32, as functions.
# The CPU's autocast leaves them as they are.
_FP32_RESULTS = frozenset({"softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"})
_FP32_ARGUMENTS = frozenset(
    {"acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss",
     "cosine_similarity", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss",
     "huber_loss", "interpolate", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p",
     "log2", "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
     "multilabel_margin_loss", "nll_loss", "norm", "pdist", "poisson_nll_loss", "pow",
     "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softplus",
     "tan", "triplet_margin_loss", *(["rms_norm"] if has_autocast_rule("rms_norm") else [])}
)  # fmt: skip
