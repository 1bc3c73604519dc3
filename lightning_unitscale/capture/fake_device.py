"""Simulate a device that need not exist, for fake tensors, and choose its operators.

The CPU and a GPU save different tensors for the backward pass. A dropout's mask is scaled and has
the input's type on the CPU, and is boolean on a GPU. A GPU has other attention kernels and fuses
the RMS norm. On fake tensors torch chooses the CPU's (see :class:`SimulatedDevice`), so this file
chooses a GPU's kernels, and the types of its autocast.

Private names of torch, checked on 2.13 and 2.11: ``FakeTensorMode`` and its exceptions,
``_current_autograd_node``, ``_execution_engine``, ``_IncludeDispatchKeyGuard``,
``HigherOrderOperator``, ``reset_code``, and that C++ reads a fake tensor's device through the
operator ``prim::device``.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo.eval_frame import reset_code
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lightning_unitscale.capture.graph_nodes import call
from lightning_unitscale.patching import shadowed

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
DispatchMode = TorchDispatchMode
is_several_tensors = is_traceable_wrapper_subclass
Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
aten = torch.ops.aten
# The simulated device as C++ sees it. Python's own has no index.
_STAND_IN = torch.device("cpu", 0)
# The simulated GPU's generation: Ampere.
_COMPUTE_CAPABILITY = (8, 0)
_HALF = (torch.float16, torch.bfloat16)
# The largest head size that the flash kernel takes.
_FLASH_DEPTH = 256
# Rows of a mask are padded to a multiple of this for the memory-efficient kernel.
_MASK_ALIGNMENT = 16


def is_control_flow(function: Any) -> bool:
    """Check whether an operator takes functions, as ``torch.cond`` and ``scan`` do."""
    return isinstance(function, HigherOrderOperator)


@contextlib.contextmanager
def forgetting_control_flow() -> Iterator[None]:
    """Let Dynamo forget, on leaving, that it skipped ``torch.cond`` and its like under a mode."""
    try:
        yield
    finally:
        for function in (torch.cond, scan, while_loop):
            for code in inspect.unwrap(function).__code__.co_consts:
                if isinstance(code, types.CodeType):
                    reset_code(code)


def run_control_flow(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run the first branch of a ``cond``, all of a ``scan``, one round of a ``while_loop``."""
    return _CONTROL_FLOW.get(function.name(), function)(*args, **kwargs)


def _while_loop(
    goes_on: Callable[..., Any], body: Callable[..., Any], carried: Any, constants: Any
) -> tuple[Any, ...]:
    goes_on(*carried, *constants)
    return tuple(body(*carried, *constants))


def _scan(combine: Callable[..., Any], initial: Any, rows: Any, constants: Any = ()) -> list[Any]:
    carried, results = list(initial), []
    for step in range(len(rows[0])):
        outputs = combine(*carried, *[row[step] for row in rows], *constants)
        carried = list(outputs[: len(carried)])
        results.append(outputs[len(carried) :])
    return [*carried, *(torch.stack(column) for column in zip(*results, strict=True))]


_CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    "cond": lambda predicate, taken, other, operands: taken(*operands),
    "while_loop": _while_loop,
    "scan": _scan,
}


def current_autograd_function() -> Any:
    """Return the function of autograd's graph whose backward is running, or ``None``."""
    return torch._C._current_autograd_node()


class SimulatedDevice(FakeTensorMode):
    """Mode in which nothing is computed. The user's constants become fake by themselves.

    C++ needs a stream and a queue for the device of every tensor in autograd, and ends the process
    if the device has no driver. So C++ sees ``cpu:0``. Tensors that it makes there are made on the
    simulated device, which Python code sees. With a CPU's queue the backward pass runs in the
    calling thread, where dispatch modes see it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            device: torch.device = args[0].device
            return device if device.type == "cpu" else _STAND_IN
        kwargs = kwargs or {}
        # ``to`` compares the devices in C++, where both are the stand-in, and calls ``_to_copy``.
        is_new = kwargs.get("device") == _STAND_IN and func.overloadpacket is not aten.to
        if is_new and self.device.type != "cpu":
            kwargs = {**kwargs, "device": self.device}
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def simulating(device: torch.device) -> Iterator[None]:
    """Make Python code see the simulated device as if it existed.

    Without a GPU, torch turns its autocast off with a warning, and C++ sees no tensors on it. So
    the CPU's autocast runs instead, with the requested type. :func:`calls_of` corrects the
    differences.
    """
    if device.type == "cpu":
        yield
        return
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == device.type:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device.type)
        original(self, device_type, dtype, *args, **kwargs)

    with (
        shadowed(torch.autocast, __init__=init),
        shadowed(torch.cuda, get_device_capability=lambda *_: _COMPUTE_CAPABILITY),
        torch._C._IncludeDispatchKeyGuard(torch.DispatchKey.AutocastCPU),
    ):
        yield


def run_backward(roots: Sequence[Tensor]) -> None:
    """Run the backward pass with gradients of one."""
    # Torch function modes are off within ``torch.autograd.backward``, but a checkpoint must call
    # its functions as in the forward pass.
    gradients = tuple(torch.ones_like(root) for root in roots)
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class FakeScalars(TorchDispatchMode):
    """Mode that makes up the value of a fake tensor, since optimizers read their step count.

    Their allocations do not depend on it. It is neither 0 nor 1, since they may divide by it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0.5 if args[0].is_floating_point() else 2
        return func(*args, **(kwargs or {}))


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors, corrected where they differ from the kernels."""
    packet = getattr(func, "overloadpacket", func)
    if packet is getattr(aten, "_grouped_mm", None) and args[0].dtype != torch.bfloat16:
        # Fake tensors know the shapes for BF16 only, the kernels also other types (torch 2.13).
        in_bf16 = [
            value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
            for value in args
        ]
        return func(*in_bf16, **kwargs).to(args[0].dtype)
    if packet is aten.native_layer_norm and args[0].device.type == "cpu":
        result, *statistics = func(*args, **kwargs)
        # For 16-bit inputs with FP32 gains the CPU keeps them in FP32, unlike fake tensors.
        dtype = args[0].dtype if args[2] is None else args[2].dtype
        return (result, *(statistic.to(dtype) for statistic in statistics))
    return func(*args, **kwargs)


def calls_of(device: torch.device) -> Call:
    """Return ``call(function, args, kwargs)``, which calls functions as on a device."""
    return _call_on_gpu if device.type == "cuda" else call


def _call_on_gpu(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The names are those of "Automatic Mixed Precision package", CUDA Ops that can autocast to
    # float32; the CPU's autocast does not cast their arguments.
    if torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") in _FP32_ON_GPU:
        args = tuple(map(_widened, args))
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
    return _GPU_KERNELS.get(function, function)(*args, **kwargs)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value


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
    """Run the kernel that torch takes on a GPU of compute capability 8.0 or later.

    torch's order: flash for 16 bits without a mask, the memory-efficient kernel, two matmuls. The
    last is also used for shared heads with a mask, and in FP32.
    """
    is_plain = query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype
    depth = value.shape[-1]
    result: Tensor
    fits_flash = attn_mask is None and max(query.shape[-1], depth) <= _FLASH_DEPTH
    if is_plain and query.dtype in _HALF and fits_flash:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if query.shape[-1] % 8:
            padding = (0, -query.shape[-1] % 8)
            query, key, value = (F.pad(tensor, padding) for tensor in (query, key, value))
        result = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        return result if result.shape[-1] == depth else result[..., :depth]
    shares_heads = query.shape[-3] != key.shape[-3]
    if is_plain and query.dtype in (*_HALF, torch.float32) and not shares_heads:
        mask = None if attn_mask is None else _aligned(attn_mask, query, key)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        result = aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
        return result
    result = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Convert a mask for the memory-efficient kernel to numbers in rows of an aligned length."""
    if mask.dtype == torch.bool:
        zeros = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zeros, -torch.inf)
    if mask.shape[-1] % _MASK_ALIGNMENT:
        length = mask.shape[-1]
        mask = F.pad(mask, (0, -length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


_FP32_ON_GPU = frozenset(
    {"softmax", "log_softmax", "layer_norm", "group_norm", "cross_entropy", "nll_loss", "mse_loss",
     "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits",
     "cosine_similarity", "logsumexp", "norm", "exp", "expm1", "log", "log2", "log10", "log1p",
     "pow", "reciprocal", "rsqrt", "softplus", "sum", "prod", "cumsum", "cumprod", "interpolate"}
)  # fmt: skip

_GPU_KERNELS: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: lambda input, p, train: _dropout(input, p, train),
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: _attention,
}
