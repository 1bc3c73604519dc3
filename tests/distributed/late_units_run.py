"""Trainings on CPU processes in which tensors are zero at first: ``... FOLDER SPREAD:METHOD ...``.

Run it once per rank. Every rank writes what it computed to ``FOLDER/RUN-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_unitscale import UnitScaleCallback, attach
from tests.distributed.launch import quiet_rank, whole

NUM_STEPS, SIZE = 20, 32
# Where the first rank gets its first token, and where the other one runs a layer of its own.
FIRST_TOKEN, FIRST_RUN = 3, 10
METHODS = {
    "plain": list,
    "units": lambda: [UnitScaleCallback(recalibrate=None)],
    "simulated": lambda: [UnitScaleCallback(simulate="fp8", recalibrate=None)],
    "fp8": lambda: [UnitScaleCallback(precision="fp8", recalibrate=None)],
}


class Model(nn.Module):
    """A branch that begins with zeros, an expert, and layers that only some of the ranks need.

    Args:
        rank: Of this process.
        has_dead: Whether a layer stays without a gradient on all ranks.
        is_uneven: Whether the last rank runs a layer that the others do not run.
    """

    def __init__(self, rank: int, *, has_dead: bool, is_uneven: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rank, self.has_dead, self.is_uneven = rank, has_dead, is_uneven
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.expert = nn.Linear(SIZE, SIZE)
        self.dead, self.own = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        # The last rank never has a token.
        has_tokens = self.rank == 0 and step >= FIRST_TOKEN
        chosen = x[:, 0] > (0.0 if has_tokens else 100.0)
        y = y.index_add(0, chosen.nonzero()[:, 0], self.expert(x[chosen]))
        if self.has_dead:
            y = y + 0 * self.dead(y)
        if self.is_uneven and self.rank > 0 and step >= FIRST_RUN:
            # Of zeros, when it runs for the first time.
            y = y + self.own(x * (step > FIRST_RUN))
        return (y - x).square().mean()


def train(folder: Path, run: str) -> None:
    """Train and write the results."""
    spread, method, *others = run.split(":")
    rank, callbacks = dist.get_rank(), METHODS[method]()
    model: nn.Module = Model(rank, has_dead="dead" in others, is_uneven="uneven" in others)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if spread == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    elif spread == "fsdp":
        for part in (*model.children(), model):
            fully_shard(part, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # Ranks that share a tensor have the same batch.
    generator = torch.Generator().manual_seed(rank if spread != "tensor" else 0)
    if spread == "tensor":
        model.rank = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gauges = [], []
    with attach(model, optimizer, callbacks):
        for step in range(NUM_STEPS):
            loss = model(torch.randn(16, SIZE, generator=generator), step)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            gauges.append({k: v for one in callbacks for k, v in one.gauge.state().items()})
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    texts = [str(one.explain()) for one in callbacks]
    found = {"losses": losses, "weights": weights, "gauges": gauges, "texts": texts}
    torch.save(found, folder / f"{run}-{rank}.pt")


if __name__ == "__main__":
    quiet_rank()
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    for run in sys.argv[2:]:
        train(Path(sys.argv[1]), run)
    dist.destroy_process_group()
