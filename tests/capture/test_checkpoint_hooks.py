"""Hooks that let checkpointed blocks train work in a step that is captured in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import assert_same_bits, captured_copy, run

IDS = torch.arange(6) % 4


class Frozen(nn.Module):
    """A frozen embedding with transformers' hook, and a reentrant checkpoint behind it."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.embedding.requires_grad_(False)
        self.block = nn.Linear(8, 8)
        self.breaks = breaks

        def make_inputs_require_grads(module: nn.Module, args: object, output: Tensor) -> None:
            output.requires_grad_(True)

        self.embedding.register_forward_hook(make_inputs_require_grads)

    def forward(self, ids: Tensor) -> Tensor:
        for _ in range(self.breaks):
            torch._dynamo.graph_break()  # within a loop it leaves the whole function uncaptured
        result: Tensor = checkpoint(self.block, self.embedding(ids), use_reentrant=True)
        return result.square().sum()


# Torch 2.11 captures nothing of it.
@pytest.mark.filterwarnings("ignore:Frozen.forward. no graph could be captured")
def test_input_require_grads_hook_runs_between_two_graphs() -> None:
    module = Frozen(breaks=True)
    assert_same_bits(run(captured_copy(module), IDS), run(module, IDS))


def test_input_require_grads_hook_keeps_whole_graph() -> None:
    module = Frozen(breaks=False)
    captured = captured_copy(module)
    assert_same_bits(run(captured, IDS), run(module, IDS))
    assert "No graph breaks" in captured.explain()  # type: ignore[operator]
