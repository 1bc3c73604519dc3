"""Modules that are sharded over ranks that do not exist; measured in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_unitscale.memory.fake_step import OptimizerLike
from lightning_unitscale.profiler import GraphProfile, fake_process_group, profile_graph
from tests.distributed.memory_run import batch, sharded
from tests.memory.oracles import sum_of


def profiled(
    module: nn.Module, device: str = "cpu", optimizer: OptimizerLike = torch.optim.AdamW
) -> GraphProfile:
    return profile_graph(module, batch(), device=device, optimizer=optimizer, loss=sum_of)  # type: ignore[arg-type]


@pytest.mark.slow_cases
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2), (8, 8), (1, 2)])
def test_profile_of_shards_on_absent_devices(device: str, sizes: tuple[int, int]) -> None:
    count = sizes[0] * sizes[1]
    with fake_process_group(count, device=device):
        module = sharded("fsdp", device, sizes)
        profile = profiled(module, device)
        again = profiled(module, device)
        largest = profile.max_batch_size(10 * profile.peak_bytes)
    assert (profile.num_ranks, profile.device) == (count, device)
    assert f" on each of {count} {device} ranks " in profile.totals()
    assert ("unsharded" in profile.totals()) == (sizes[0] > 1)
    assert profile.gradient_bytes == profile.parameter_bytes
    assert profile.optimizer_bytes >= 2 * profile.parameter_bytes * 0.9
    assert again == profile
    assert largest > profile.batch_size
    assert GraphProfile.from_json(profile.to_json()) == profile


@pytest.mark.slow
def test_at_most_two_layers_are_gathered() -> None:
    with fake_process_group(4):
        profile, kept = (profiled(sharded(case, sizes=(4, 1))) for case in ("fsdp", "kept"))
    whole = 4 * profile.parameter_bytes
    block = (whole - 4 * 34 * 7) / 3
    # In backward the next layer is gathered while one runs, into a buffer first.
    assert 2 * block <= profile.unsharded_bytes <= 3.1 * block
    assert kept.unsharded_bytes > whole
    assert kept.saved_bytes == profile.saved_bytes
    assert profile.peak.by_kind["unsharded"] <= profile.unsharded_bytes


@pytest.mark.slow
def test_optimizer_instance_matches_optimizer_class() -> None:
    with fake_process_group(2):
        module = sharded("fsdp")
        made = profiled(module, optimizer=torch.optim.AdamW(module.parameters()))
        by_class = profiled(sharded("fsdp"))
    assert made.timeline == by_class.timeline


def test_tied_layers_that_are_not_sharded_stay_tied() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    module[3].weight = module[2].weight
    whole = 3 * 64 * 4 + 4 * 8 * 4
    with fake_process_group(2):
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(module, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        profile = profile_graph(module, torch.ones(2, 8))
    # Half of the first two weights, and of the first bias.
    assert profile.parameter_bytes == whole - 64 * 4 - 4 * 4
    assert profile.gradient_bytes == profile.parameter_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_operators_on_distributed_tensors(device: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.5), nn.Linear(16, 16))
    plan = {"0": SequenceParallel(use_local_output=False), "1": SequenceParallel(),
            "2": ColwiseParallel(input_layouts=Shard(1))}  # fmt: skip
    with fake_process_group(2, device=device):
        parallelize_module(module, init_device_mesh(device, (2,)), plan)
        profile = profile_graph(module, torch.ones(2, 4, 16), device=device, loss=sum_of)
    assert "1.dropout" in {node.name for node in profile.nodes}


@pytest.mark.slow
def test_error_is_at_most_that_of_torch_tracker() -> None:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    with fake_process_group(2):
        profile = profiled(sharded("fsdp"))
        module = sharded("fsdp").to_empty(device="cpu")
        optimizer = torch.optim.AdamW(module.parameters())
        tracker = FSDPMemTracker(module, optimizer)
        given = batch()
        tracker.track_inputs((given,))
        with tracker:
            for step in range(2):
                sum_of(module(given)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        tracked = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    assert profile.peak_bytes == pytest.approx(tracked, rel=0.05)


@pytest.mark.slow
def test_fake_process_group_is_removed() -> None:
    before = dict(vars(torch.cuda)), dict(vars(torch.UntypedStorage))
    with fake_process_group(4, device="cuda"):
        assert dist.get_world_size() == 4
        profiled(sharded("fsdp", "cuda", (2, 2)), "cuda")
    assert not dist.is_initialized()
    assert (dict(vars(torch.cuda)), dict(vars(torch.UntypedStorage))) == before
    with pytest.raises(KeyError, match="of the user"), fake_process_group(2):
        raise KeyError("of the user")
    assert not dist.is_initialized()


class TestErrors:
    """Modules that cannot be profiled raise an error with the reason."""

    def test_nested_fake_group_is_an_error(self) -> None:
        with fake_process_group(2), pytest.raises(ValueError, match="in a group of 2 already"):  # noqa: SIM117
            with fake_process_group(3):
                pass

    def test_world_size_of_zero_is_an_error(self) -> None:
        with (
            pytest.raises(ValueError, match="`world_size=0`: not a number of ranks"),
            fake_process_group(0),
        ):
            pass

    def test_module_with_data_is_an_error(self) -> None:
        with fake_process_group(2):
            module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
            with pytest.raises(ValueError, match=r"on cpu. Expected a module on meta"):
                profile_graph(module, torch.ones(2, 4))
            assert type(module.weight.to_local()) is torch.Tensor

    def test_cpu_offload_is_an_error(self) -> None:
        with torch.device("meta"):
            module = nn.Linear(4, 4)
        with fake_process_group(2, device="cuda"):
            mesh = init_device_mesh("cuda", (2,))
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
            with pytest.raises(ValueError, match="FSDP keeps its shards on the CPU"):
                profile_graph(module, torch.ones(2, 4), device="cuda")

    def test_destroyed_process_group_is_an_error(self) -> None:
        with fake_process_group(2):
            module = sharded("fsdp")
        with pytest.raises(ValueError, match="its process group is gone"):
            profile_graph(module, batch())
