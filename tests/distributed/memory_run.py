"""Memory of steps of sharded modules, measured on CPU processes: ``python -m ... FOLDER CASE ...``.

Run it once per rank. Every rank writes what it measured to ``FOLDER/CASE-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.distributed.launch import quiet_rank
from tests.memory.oracles import measured_peak, storage_bytes, sum_of

NUM_RANKS = 2
# Sizes of the mesh, and options of FSDP.
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "fsdp": ((2, 1), {}),
    "kept": ((2, 1), {"reshard_after_forward": False}),
    "mixed": ((2, 1), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "checkpoints": ((2, 1), {}),
    "tensor": ((1, 2), {}),
}


class Block(nn.Module):
    """A feed-forward layer with a residual sum; of the widths one is odd."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up = nn.Linear(33, 136)
        self.down = nn.Linear(136, 33)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            return x + checkpoint(self._layers, x, use_reentrant=False, preserve_rng_state=False)
        return x + self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def sharded(case: str, device: str = "cpu", sizes: tuple[int, int] | None = None) -> nn.Module:
    """The module of a case on ``meta``, sharded over the process group of the day."""
    mesh_sizes, options = CASES[case]
    data, tensor = sizes or mesh_sizes
    with torch.device("meta"):
        blocks = [Block(case == "checkpoints") for _ in range(3)]
        module = nn.Sequential(*blocks, nn.Linear(33, 7))
    mesh = init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor"))
    for block in blocks:
        if tensor > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        if data > 1:
            fully_shard(block, mesh=mesh["data"], **options)
    return fully_shard(module, mesh=mesh["data"], **options) if data > 1 else module


def batch() -> Tensor:
    """Return the arguments of the module's call."""
    return torch.ones(24, 33)


class _Files:
    """Collectives through files, since Gloo's threads keep sent tensors for a while."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in memory that is not torch's."""
        self.calls += 1
        key = f"{type(self).__name__}-{self.calls}"
        self.store.set(f"{key}-{dist.get_rank()}", tensor.view(torch.uint8).numpy().tobytes())
        found = [self.store.get(f"{key}-{rank}") for rank in range(dist.get_world_size())]
        return [torch.frombuffer(bytearray(data), dtype=tensor.dtype) for data in found]


class _AllGather(_Files):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        for part, given in zip(
            output_tensor.chunk(group.size()), self.exchange(input_tensor), strict=True
        ):
            part.copy_(given)


class _ReduceScatter(_Files):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.zero_()
        for given in self.exchange(input_tensor):
            output_tensor.add_(given.chunk(group.size())[group.rank()], alpha=1 / group.size())


def through_files(module: nn.Module, path: Path) -> None:
    """Let a sharded module communicate in memory that is not counted, so its peak is exact."""
    store = dist.FileStore(str(path), NUM_RANKS)
    gather, scatter = _AllGather(store), _ReduceScatter(store)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(gather)
            part.set_custom_reduce_scatter(scatter)


def measure(folder: Path, case: str) -> None:
    """Measure a step and write the results."""
    module = sharded(case).to_empty(device="cpu")
    through_files(module, folder / f"{case}.store")
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(0.01)
    optimizer = torch.optim.AdamW(module.parameters())
    peak = measured_peak(module, batch(), optimizer=optimizer)
    sum_of(module(batch())).backward()
    found = {
        "peak": peak,
        "parameters": storage_bytes(module.parameters()),
        "gradients": storage_bytes(param.grad for param in module.parameters()),
        "optimizer": storage_bytes(
            value for state in optimizer.state.values() for value in state.values()
        ),
    }
    torch.save(found, folder / f"{case}-{dist.get_rank()}.pt")


if __name__ == "__main__":
    quiet_rank()
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    for name in sys.argv[2:]:
        measure(Path(sys.argv[1]), name)
    dist.destroy_process_group()
