"""cuDNN's reserve of recurrent layers, counted by saved vectors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.profiler import profile_graph

KINDS = {nn.LSTM: 5, nn.GRU: 4, nn.RNN: 1}


class Layers(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *sizes: int, **options: object) -> None:
        super().__init__()
        self.layers = kind(*sizes, **options)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)[0]
        return output


def _recurrent_node(module: nn.Module, given: Tensor) -> tuple[int, int, int]:
    """Saved bytes beside input and output, and the bytes of the results and of gradients."""
    profile = profile_graph(module, given, device="cuda:h100")
    (node,) = [node for node in profile.nodes if node.op in ("lstm", "gru", "rnn_tanh")]
    beside = node.saved_bytes - given.numel() * 4
    return beside, node.fwd_mem_out, node.param_grad_bytes


@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_reserve_matches_saved_vectors(
    kind: type[nn.RNNBase], layers: int, both: bool, batch_first: bool
) -> None:
    module = Layers(kind, 16, 32, layers, bidirectional=both, batch_first=batch_first)
    directions, positions = 1 + both, 4 * 8
    beside, results, grads = _recurrent_node(module, torch.ones(4, 8, 16, requires_grad=True))
    hidden = positions * directions * 32 * 4
    states = layers * directions * (4 if batch_first else 8) * 32 * 4
    per_layer = KINDS[kind] * layers + (layers - 1)
    both_states = states * (2 if kind is nn.LSTM else 1)
    # The output and the first state are saved too.
    assert beside == per_layer * hidden + hidden + both_states
    assert results == hidden + both_states
    assert grads == sum(param.numel() * 4 for param in module.parameters())


def test_dropout_saves_one_bit_per_value() -> None:
    given = torch.ones(4, 8, 16, requires_grad=True)
    plain = _recurrent_node(Layers(nn.LSTM, 16, 32, 3), given)[0]
    dropped = _recurrent_node(Layers(nn.LSTM, 16, 32, 3, dropout=0.1), given)[0]
    assert dropped - plain == 2 * 4 * 8 * 32 // 8


def test_reserve_matches_measurement_on_h100() -> None:
    """Three layers of width 1,024, dropout, 64 sequences of 128: one block of 546 MiB."""
    with torch.device("meta"):
        module = Layers(nn.LSTM, 512, 1024, 3, dropout=0.1, batch_first=True)
        given = torch.empty(64, 128, 512)
    profile = profile_graph(module, given, device="cuda:h100")
    (node,) = [node for node in profile.nodes if node.op == "lstm"]
    output, states = 64 * 128 * 1024 * 4, 2 * 3 * 64 * 1024 * 4
    assert node.saved_bytes - given.numel() * 4 - output - states == 546 * 2**20


def test_autocast_dtype_and_no_reserve_in_inference() -> None:
    module, given = Layers(nn.GRU, 16, 32, 2), torch.ones(4, 8, 16)
    half = profile_graph(
        module, given, device="cuda:h100", context=lambda: torch.autocast("cuda", torch.bfloat16)
    )
    assert next(node for node in half.nodes if node.op == "gru").dtype == "bfloat16"
    module.eval()
    frozen = profile_graph(module.requires_grad_(False), given, device="cuda:h100")
    assert frozen.saved_bytes == 0


def test_cpu_has_no_reserve() -> None:
    profile = profile_graph(Layers(nn.LSTM, 16, 32), torch.ones(4, 8, 16))
    assert profile.library_bytes == 0
