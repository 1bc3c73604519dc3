"""Call functions as on a GPU: its dropout, norms, attention kernels and types of autocast.

On fake tensors torch chooses a CPU's kernels, since C++ sees them on the CPU (see
:class:`~lightning_unitscale.capture.fake_device.SimulatedDevice`). The CPU and a GPU save different
tensors for the backward pass. A dropout's mask is scaled and has the input's type on the CPU, and
is boolean on a GPU.

A GPU runs recurrent layers as one cuDNN operator for all layers, with a reserve. torch's fake
tensors know neither the size of the reserve nor the backward operator (2.13), so this file has
both. The reserve is what the backward pass reads. NVIDIA does not document its size, which follows
from the equations of the layers ("cuDNN API, cudnnRNNMode_t"). For each direction and each position
of the sequence it has, of the size of the hidden state:

- for each layer the gates after their activation (LSTM: 4, GRU: 3, and its product of the hidden
  state that the reset gate multiplies; tanh and ReLU: 1), since their derivatives are functions of
  them;
- for each layer of an LSTM the cell state;
- for each layer but the last its output, which is the input of the next one. The last layer's is
  the operator's result;
- with dropout one bit for each of these outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_unitscale.capture.decompose import open_function
from lightning_unitscale.capture.fake_device import has_autocast_rule, run_operator
from lightning_unitscale.capture.graph_nodes import call
from lightning_unitscale.memory.gpu_attention import attention
from lightning_unitscale.memory.gpus import GPU
from lightning_unitscale.memory.operator_bytes import bytes_of, copy_of

aten = torch.ops.aten
_RELU, _TANH, _LSTM, _GRU = range(4)  # cuDNN's numbers of the kinds of layers, cudnnRNNMode_t
# Saved vectors for each position of a layer: gates, and an LSTM's cell state.
_SAVED = {_RELU: 1, _TANH: 1, _LSTM: 5, _GRU: 4}


class _Layers(NamedTuple):
    """Sizes of stacked recurrent layers."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    num_directions: int
    num_positions: int  # of all sequences together

    def reserve_bytes(self, item_bytes: int, dropout: float) -> int:
        """Return the bytes kept for the backward pass. See the top of this file."""
        vectors = self.num_positions * self.num_directions
        output_size = self.proj_size or self.hidden_size
        handed_on = (self.num_layers - 1) * vectors * output_size
        saved = self.num_layers * vectors * _SAVED[self.mode] * self.hidden_size
        bits = ceil(handed_on / 8) if dropout else 0
        return (saved + handed_on) * item_bytes + bits


def _layers_of(args: Sequence[Any]) -> _Layers:
    """Return the sizes from the arguments of ``_cudnn_rnn``."""
    input, mode, hidden_size, proj_size, num_layers = args[0], *args[6:10]
    directions = 2 if args[13] else 1
    positions = prod(map(int, input.shape[:-1]))
    return _Layers(mode, int(hidden_size), int(proj_size), num_layers, directions, positions)


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """Return the results of ``_cudnn_rnn``, with the output in the layout of the kernel."""
    input, hidden, cell, batch_first, train = args[0], args[4], args[5], args[10], args[12]
    layers = _layers_of(args)
    width = (layers.proj_size or layers.hidden_size) * layers.num_directions
    if batch_first and not args[14]:
        batch, length = input.shape[:2]
        output = input.new_empty(length, batch, width).transpose(0, 1)
    else:
        output = input.new_empty(*input.shape[:-1], width)
    size = layers.reserve_bytes(input.element_size(), args[11]) if train else 0
    reserve = input.new_empty(size, dtype=torch.uint8)
    last_cell = hidden.new_empty(0) if cell is None else torch.empty_like(cell)
    return output, torch.empty_like(hidden), last_cell, reserve, args[3]


def _backward(*args: Any) -> tuple[Any, ...]:
    """Return the results of ``_cudnn_rnn_backward``, with one tensor for all weights."""
    input, weights, hidden, cell, mask = args[0], args[1], args[4], args[5], args[21]
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    grads: list[Tensor] = []
    if mask[3]:
        flat = weights[0].new_zeros(sum(weight.numel() for weight in weights))
        start = 0
        for weight in weights:
            grads.append(flat[start : start + weight.numel()].view(weight.shape))
            start += weight.numel()
    grad_cell = None if cell is None else torch.empty_like(cell)
    return grad_input, torch.empty_like(hidden), grad_cell, grads


# Operators that fake tensors do not know, by their packet.
_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn: _forward,
    aten._cudnn_rnn_backward: _backward,
}


def run_kernel(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on fake tensors as its kernel does, those of cuDNN included."""
    run = _OPERATORS.get(func.overloadpacket)
    return run_operator(func, args, kwargs) if run is None else run(*args)


def forward_workspace(args: Sequence[Any], result: Any) -> int:
    """Count the input in the layout of the kernel, for a batch that comes first."""
    return _turned(args[0], args[10], args[14])


def backward_workspace(args: Sequence[Any], result: Any) -> int:
    """Count input and gradient in the layout of the kernel, and zeros for an unused gradient."""
    input, grad, batch_first, batch_sizes = args[0], args[7], args[14], args[18]
    absent = (args[4] if args[8] is None else None, args[5] if args[9] is None else None)
    zeros = sum(map(bytes_of, absent))
    turned = 0 if grad is None else _turned(grad, batch_first, batch_sizes)
    return zeros + _turned(input, batch_first, batch_sizes) + turned


def _turned(tensor: Tensor, batch_first: bool, batch_sizes: Sequence[int]) -> int:
    return copy_of(tensor.transpose(0, 1) if batch_first and not batch_sizes else tensor)


def _recurrent(mode: int) -> Callable[..., Any]:
    """Return a function in place of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""

    def run(input: Tensor, *args: Any) -> Any:
        if isinstance(args[2], (list, tuple)):  # the weights come after the sizes of a packed batch
            batch_sizes, hx, weights, _, num_layers, dropout, train, both = args
            batch_first, sizes = False, [int(size) for size in _values(batch_sizes, input)]
        else:
            hx, weights, _, num_layers, dropout, train, both, batch_first = args
            sizes = []
        hidden, cell = hx if mode == _LSTM else (hx, None)
        weights = list(weights)
        if torch.is_autocast_enabled("cpu"):  # the simulated one
            dtype = torch.get_autocast_dtype("cpu")
            input, hidden = input.to(dtype), hidden.to(dtype)
            cell = None if cell is None else cell.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
        directions = 2 if both else 1
        per_layer = len(weights) // (num_layers * directions)
        proj_size = hidden.shape[-1] if per_layer in (3, 5) else 0
        hidden_size = weights[1].shape[0] // {_LSTM: 4, _GRU: 3}.get(mode, 1)
        # cuDNN reads the weights from one buffer, which the parameters are views of.
        buffer = weights[0].detach()
        results = aten._cudnn_rnn(
            input, weights, per_layer, buffer, hidden.contiguous(),
            None if cell is None else cell.contiguous(), mode, hidden_size, proj_size, num_layers,
            batch_first, dropout if train else 0.0, train, bool(both), sizes, None,
        )  # fmt: skip
        output, last, last_cell = results[:3]
        return (output, last, last_cell) if mode == _LSTM else (output, last)

    return run


def _values(batch_sizes: Tensor, input: Tensor) -> list[int]:
    """Return the sizes of a packed batch as one long step. A fake tensor lacks their values."""
    steps = int(batch_sizes.shape[0])
    per_step = ceil(int(input.shape[0]) / steps)
    return [per_step] * steps


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _recurrent(_LSTM),
    torch.gru: _recurrent(_GRU),
    torch.rnn_tanh: _recurrent(_TANH),
    torch.rnn_relu: _recurrent(_RELU),
}
"""The functions of recurrent layers on a GPU, by torch's."""


Call = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
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
    """Mode that calls functions as on a GPU, or on a CPU, also those in multi-head attention."""

    def __init__(self, gpu: GPU | None) -> None:
        super().__init__()
        self._call = calls_of(gpu)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:  # its parts depend on the device too
                return open_function(func)(*args, **(kwargs or {}))
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
