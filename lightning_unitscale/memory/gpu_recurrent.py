"""Run recurrent layers as cuDNN does on a GPU: one operator for all layers, with a reserve.

torch's fake tensors know neither the size of the reserve nor the backward operator (2.13), so this
file has both. The reserve is what the backward pass reads. NVIDIA does not document its size, which
follows from the equations of the layers ("cuDNN API, cudnnRNNMode_t"). For each direction and each
position of the sequence it has, of the size of the hidden state:

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
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_unitscale.capture.fake_device import run_operator
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
