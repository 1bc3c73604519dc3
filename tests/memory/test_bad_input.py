"""Clear errors for steps that cannot be profiled, without a change to the module."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.pipeline import explain_pipeline
from lightning_unitscale.profiler import MetaInfoProp, profile_graph
from tests.memory.networks import Step


def test_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"device='tpu'.*Expected 'cpu', 'cuda', 'cuda:h100'"):
        profile_graph(nn.Linear(2, 2), torch.ones(1, 2), device="tpu")
    with pytest.raises(ValueError, match=r"device='cuda:1'"):
        MetaInfoProp(torch.fx.symbolic_trace(nn.Linear(2, 2)), device="cuda:1")


def test_parameters_on_several_devices_are_an_error() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"several devices \(0\.bias on cpu, 1\.bias on meta\)"):
        profile_graph(module, torch.ones(1, 2))


def test_data_dependent_step_error_has_node() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Step(lambda x: x if x.sum() > 0 else -x))
    with pytest.raises(RuntimeError, match=r"node 1\.bool: .*test_bad_input.py:.* depends on"):
        profile_graph(module, torch.ones(1, 2))
    module = Step(lambda x: x[x > 0])
    with pytest.raises(RuntimeError, match=r"node getitem: .*boolean indexing"):
        profile_graph(module, torch.ones(3))


def test_mixed_devices_error_has_node() -> None:
    module = Step(lambda linear, x: linear(x) + torch.ones(2, 2), nn.Linear(2, 2))
    profile_graph(module, torch.ones(2, 2), device="cpu")
    with pytest.raises(RuntimeError, match=r"node add: it mixes devices"):
        profile_graph(module, torch.ones(2, 2), device="cuda")


def test_lazy_parameters_and_sparse_inputs_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"weight has no shape yet"):
        profile_graph(nn.LazyLinear(2), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"not one plain storage"):
        profile_graph(nn.Linear(2, 2), torch.ones(2, 2).to_sparse())


def test_uncopyable_module_is_an_error() -> None:
    module = nn.Linear(2, 2)
    module.stream = (item for item in ())  # generators cannot be copied
    with pytest.raises(RuntimeError, match=r"`module=Linear`: it cannot be copied"):
        profile_graph(module, torch.ones(1, 2))


def test_user_error_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        profile_graph(nn.Linear(3, 2), torch.ones(1, 2))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_profiling_does_not_change_module(device: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.calls = 0
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = self.norm(x)
            return F.dropout(self.last, 0.5)

    module = Counting()
    before = copy.deepcopy(module.state_dict())
    state, given = torch.get_rng_state(), torch.randn(8, 4)
    kept, seed = given.clone(), torch.get_rng_state()
    profile_graph(module, given, device=device, optimizer=torch.optim.AdamW)
    assert (module.calls, module.last) == (0, None)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(param.grad is None for param in module.parameters())
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert not module.norm._forward_hooks
    assert torch.equal(given, kept)
    assert torch.equal(torch.get_rng_state(), seed) and not torch.equal(state, seed)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device_of_module_does_not_change_profile(device: str) -> None:
    module, given = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1)), torch.randn(4, 8)
    profile = profile_graph(module, given, device=device)
    on_meta = copy.deepcopy(module).to("meta")
    assert profile_graph(on_meta, given.to("meta"), device=device) == profile


def test_gpu_simulation_is_undone_after_error() -> None:
    before = torch.autocast.__init__, torch.cuda.get_device_capability
    with pytest.raises(RuntimeError):
        profile_graph(Step(lambda x: x.item()), torch.ones(1), device="cuda")
    assert (torch.autocast.__init__, torch.cuda.get_device_capability) == before
    assert not torch.is_autocast_enabled("cpu")


def test_module_without_forward_is_an_error() -> None:
    class Steps(pl.LightningModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return batch.sum()

    for module in (Steps(), nn.Module()):
        with pytest.raises(ValueError, match=r"module=\w+: it has no forward\. .*training_step"):
            profile_graph(module, torch.ones(2))
        with pytest.raises(ValueError, match=r"module=\w+: it has no forward\. .*explain_step"):
            explain_pipeline(module, torch.ones(2), 2)
    assert profile_graph(Steps(), torch.ones(2), 0, method="training_step").batch_size == 2
