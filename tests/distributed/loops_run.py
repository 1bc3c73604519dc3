"""Trainings without a Trainer on CPU processes: ``python -m ... FOLDER KIND:HOW ...``.

Run it once per rank. Every rank writes what it computed to ``FOLDER/KIND:HOW-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_unitscale import attach
from tests.distributed.launch import quiet_rank
from tests.distributed.sharded_run import HOWS, Block, outcome

NUM_STEPS = 6
# How the training is spread over processes, and whether each of them has data of its own.
KINDS = {"ddp": True, "fsdp": True, "fsdp-bf16": True, "tensor": False, "fabric-ddp": True}


class Model(nn.Module):
    """Blocks, and a product that the root itself computes after the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mixing = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.mixing


def _spread(kind: str, model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "tensor":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model
    dtype = torch.bfloat16 if kind == "fsdp-bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in (*model.blocks, model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return model


def train(folder: Path, kind: str, how: str) -> None:
    """Train and write down what came out."""
    torch.manual_seed(4)
    callbacks = HOWS[how]()
    rank = int(os.environ["LOCAL_RANK"])
    model: Any = Model()
    if kind == "fabric-ddp":
        strategy = DDPStrategy(process_group_backend="gloo")
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, callbacks=callbacks)
        fabric.launch()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        backward: Any = fabric.backward
        attachments = callbacks[0].attachments if callbacks else ()
    else:
        model = _spread(kind, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        backward = torch.Tensor.backward
        attachments = (attach(model, optimizer, callbacks),)
    torch.manual_seed(rank if KINDS[kind] else 0)
    losses = []
    for _ in range(NUM_STEPS):
        loss = (model(torch.randn(4, 6) * 30).float() - torch.randn(4, 16)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    for attachment in attachments:
        attachment.detach()
    torch.save(outcome(model, losses, callbacks), folder / f"{kind}:{how}-{rank}.pt")


if __name__ == "__main__":
    quiet_rank()
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    for run in sys.argv[2:]:
        train(Path(sys.argv[1]), *run.split(":"))
    dist.destroy_process_group()
