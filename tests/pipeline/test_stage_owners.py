"""The owners of parameters, and cuts that follow them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.pipeline import Pipe, SplitPoint, balanced_split, pipeline
from lightning_unitscale.pipeline.stage_owners import Ownership


class Layers(nn.Module):
    """Six layers; Python state decides the order of the last two and which others are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.extra = nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(16))
        self.register_buffer("seen", torch.zeros(()))
        self.backwards = self.uses_extra = self.ties = False
        self.reads_table_at, self.counts_at = 0, None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(reversed(self.layers) if self.backwards else self.layers):
            x = layer(x).tanh()
            if self.uses_extra and index == 4:
                x = self.extra(x)
            if index == self.reads_table_at:
                x = x * self.table
            if index == self.counts_at:
                self.seen.add_(1)
        if self.ties:
            x = self.layers[0](x)
        return x


def _cut(module: nn.Module, at: int = 1, size: int = 8) -> Pipe:
    """Cut far off the middle: no policy would."""
    spec = {f"layers.{at}": SplitPoint.BEGINNING}
    return pipeline(module, torch.ones(size, 16), split_spec=spec)


def _first(module: nn.Module) -> Ownership:
    owners = Ownership(module, 2, lambda stage: stage, balanced_split(2))
    assert not owners.is_settled
    owners.note(_cut(module))
    return owners


def _layers(pipe: Pipe) -> list[set[str]]:
    return [{one.rpartition(".")[0] for one in info.parameters} for info in pipe.info().stages]


def test_later_graph_is_cut_between_owners() -> None:
    module = Layers()
    owners = _first(module)
    x = torch.randn(4, 16)
    balanced = pipeline(module, x, split_policy=balanced_split(2))
    assert _layers(balanced)[0] == {"layers.0", "layers.1", "layers.2"}
    pipe = pipeline(module, x, split_policy=owners.policy())
    assert _layers(pipe)[0] == {"layers.0"}
    assert torch.equal(pipe(x), module(x))
    before = owners.names
    owners.note(pipe)
    assert owners.names == before
    assert before[0] == {"layers.0.weight", "layers.0.bias"}


def test_later_used_parameter_gets_owner() -> None:
    module = Layers()
    owners = _first(module)
    assert not any("extra.weight" in one for one in owners.names)
    module.uses_extra = True
    owners.note(pipeline(module, torch.ones(8, 16), split_policy=owners.policy()))
    assert ["extra.weight" in one for one in owners.names] == [False, True]


def test_unused_replica_is_kept() -> None:
    module = Layers()
    module.ties = True
    owners = _first(module)
    tied = {"layers.0.weight": (0, 1), "layers.0.bias": (0, 1)}
    assert owners.replicas() == tied
    module.ties = False
    owners.note(pipeline(module, torch.ones(8, 16), split_policy=owners.policy()))
    assert owners.replicas() == tied
    assert {"layers.0.weight", "layers.5.bias"} <= owners.parameters_of(1).keys()


def test_changed_layer_order_is_an_error() -> None:
    module = Layers()
    owners = _first(module)
    module.backwards = True
    with pytest.raises(RuntimeError, match="no cuts keep them on their ranks"):
        pipeline(module, torch.ones(8, 16), split_policy=owners.policy())


def test_marks_that_move_parameters_are_an_error() -> None:
    module = Layers()
    owners = _first(module)
    before = owners.names
    with pytest.raises(RuntimeError, match=r"\['layers.1.bias', 'layers.1.weight'\] would be used"):
        owners.note(_cut(module, at=2))
    assert owners.names == before


def test_buffer_written_by_other_rank_is_an_error() -> None:
    module = Layers()
    module.counts_at = 0
    owners = _first(module)
    assert "seen" in owners.names[0]
    assert not any("table" in one for one in owners.names)
    module.reads_table_at = 3
    owners.note(_cut(module))
    module.counts_at = 4
    with pytest.raises(RuntimeError, match=r"\['seen'\] would be used by other ranks"):
        owners.note(_cut(module))
