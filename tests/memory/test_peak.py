"""The peak of a step against the allocator's events and torch's own tracker."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.memory.real_memory import optimizer_state_bytes, storages_of
from lightning_unitscale.profiler import profile_graph
from tests.memory.networks import NETWORKS
from tests.memory.oracles import measured_peak, measured_saved, storage_bytes, sum_of


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_peak_and_saved_bytes_match_real_step(name: str) -> None:
    module, given = NETWORKS[name]()
    profile = profile_graph(module, given, loss=sum_of)
    # The memory of oneDNN's 16-bit matmuls is known only roughly, and these networks are small.
    tolerance = 0.08 if name in ("autocast", "bfloat16") else 0.01
    assert profile.peak_bytes == pytest.approx(measured_peak(module, given), rel=tolerance)
    assert profile.saved_bytes == measured_saved(module, given, loss=sum_of)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        torch.optim.Adagrad,
    ],
    ids=["AdamW", "SGD", "Adagrad"],
)
def test_peak_of_a_step_with_an_optimizer(optimizer: object) -> None:
    module, given = NETWORKS["mlp"]()
    profile = profile_graph(module, given, loss=sum_of, optimizer=optimizer)
    real = measured_peak(module, given, optimizer=optimizer(module.parameters()))
    assert profile.peak_bytes == pytest.approx(real, rel=0.01)


def test_error_is_at_most_that_of_torch_tracker() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    module, given = NETWORKS["residual"]()
    tracker = MemTracker()
    tracker.track_external(module, given)
    with tracker:
        sum_of(module(given)).backward()
    tracked = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    module.zero_grad(set_to_none=True)
    real = measured_peak(module, given)
    ours = profile_graph(module, given, loss=sum_of).peak_bytes
    assert abs(ours - real) <= abs(tracked - real)


def test_peak_has_phase_and_node() -> None:
    wide = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8))
    peak = profile_graph(wide, torch.randn(4096, 8), loss=sum_of).peak
    assert peak.phase == "backward"
    assert peak.node == "1.relu"
    assert sum(peak.by_kind.values()) == peak.num_bytes
    large = nn.Sequential(nn.Linear(512, 512))
    peak = profile_graph(large, torch.randn(1, 512), optimizer=torch.optim.AdamW).peak
    assert peak.phase == "optimizer"
    assert peak.node == ""


def test_timeline_starts_and_ends_with_persistent_bytes() -> None:
    module, given = NETWORKS["mlp"]()
    profile = profile_graph(module, given, loss=sum_of, optimizer=torch.optim.AdamW)
    there = profile.parameter_bytes + profile.optimizer_bytes + profile.input_bytes
    assert profile.timeline.before_bytes == there
    assert profile.timeline.after_bytes == there + profile.gradient_bytes
    assert profile.gradient_bytes == storage_bytes(module.parameters())
    assert max(profile.timeline.live_bytes) == profile.peak_bytes


def test_frozen_module_has_only_forward_phase() -> None:
    module, given = NETWORKS["mlp"]()
    profile = profile_graph(module.requires_grad_(False), given)
    assert profile.saved_bytes == profile.gradient_bytes == profile.bwd_flops == 0
    assert set(profile.phases) == {"forward"}


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
def test_bytes_of_sparse_tensors(layout: str) -> None:
    dense = torch.eye(4, 6)
    size = (2, 2) if layout.startswith("b") else None
    sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=size)
    names = {"o": ("indices",), "r": ("crow_indices", "col_indices")}
    names |= {"c": ("ccol_indices", "row_indices")}
    parts = [getattr(sparse, name)() for name in (*names[layout[-1]], "values")]
    assert storages_of([sparse, dense]) == storages_of([*parts, dense])
    # Indices may lie in more memory than they fill.
    assert sum(storages_of(sparse).values()) >= sum(one.nbytes for one in parts)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_optimizer_state_for_sparse_gradients() -> None:
    table = nn.Embedding(5, 6, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    before = optimizer_state_bytes([optimizer])
    table(torch.arange(3)).sum().backward()
    optimizer.step()
    assert before == optimizer_state_bytes([optimizer]) == 2 * table.weight.nbytes


class _LanguageModel(nn.Module):
    """A model of transformers without a cache, as with checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, position_ids=positions).loss
        return loss


@pytest.mark.parametrize("rows", [(), (torch.arange(32).repeat(4, 2),)], ids=["none", "given"])
def test_position_ids_expand_attention_mask(rows: tuple[Tensor, ...]) -> None:
    model, ids = _LanguageModel(), torch.zeros(4, 64, dtype=torch.long)
    profile = profile_graph(model, ids, *rows)
    # For a mask, keys and values are repeated for the heads of their group.
    names = {node.op for node in profile.nodes if "self_attn" in node.module}
    assert ("expand" in names) == bool(rows)
    measured = measured_peak(model, ids, *rows, loss=lambda loss: loss)
    assert profile.peak_bytes == pytest.approx(measured, rel=0.002)
