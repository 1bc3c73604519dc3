"""Compute recurrent layers in AOTAutograd's graphs as an uncaptured step does.

Two bugs of torch are fixed here. Its decomposition of stacked layers never applies dropout between
them: it compares their number with a layer's index the wrong way around. And oneDNN's LSTM returns
the workspace that its backward kernel reads only in grad mode, which is off while a graph runs
(pytorch issue 158007).

Private names used here were checked on torch 2.13 and 2.11: ``_rnn_helper`` of torch's
decompositions, ``torch._C._AutoDispatchBelowAutograd`` and ``OpOverload._schema``.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decompositions

from lightning_unitscale.patching import shadowed

_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
# The index of the result that only the backward kernel reads.
_WORKSPACE = 3


def recurrent_dropout() -> AbstractContextManager[None]:
    """Return a context in which traced recurrent layers apply dropout between them."""
    layers = functools.partial(_layer_by_layer, decompositions._rnn_helper)
    return shadowed(decompositions, _rnn_helper=layers)


def _layer_by_layer(
    run: Callable[..., Any],
    input: Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Callable[..., Any],
) -> tuple[Tensor, list[Any]]:
    """Run stacked layers one by one, with dropout between them."""
    output = input.transpose(0, 1) if batch_first else input
    finals: list[Any] = []
    directions = 2 if bidirectional else 1
    for start in range(0, num_layers * directions, directions):
        if start and train and dropout:
            output = torch.dropout(output, dropout, train=True)
        layer = slice(start, start + directions)
        options = (has_biases, 1, 0.0, train, bidirectional, False, layer_fn)
        output, final = run(output, hidden[layer], params[layer], *options)
        finals += final
    return output.transpose(0, 1) if batch_first else output, finals


def keep_workspaces(graph: fx.Graph) -> None:
    """Let the LSTMs of a graph return the workspaces that its backward pass reads."""
    for node in graph.find_nodes(op="call_function", target=operator.getitem):
        layer, index = node.args
        if index == _WORKSPACE and layer.target is _LSTM:
            layer.target = _lstm_with_workspace()


@functools.cache
def _lstm_with_workspace() -> Any:
    """Return the operator. It is made when it is first needed, since that is slow."""
    schema = str(_LSTM._schema).partition("(")[2]

    @torch.library.custom_op(
        "lightning_unitscale::lstm_with_workspace", mutates_args=(), schema=f"({schema}"
    )
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return _LSTM(*args)

    run.register_fake(_LSTM)
    return torch.ops.lightning_unitscale.lstm_with_workspace.default
