"""FSDP2 trainings within a budget: ``python -m tests.distributed.remat_fsdp_run FOLDER RUN ...``.

Run it once per rank, with Lightning's environment variables. Every rank writes what it computed to
``FOLDER/RUN-RANK.pt``.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.runs import QUIET, Rows
from tests.distributed.launch import quiet_rank
from tests.distributed.memory_run import through_files
from tests.memory.oracles import bytes_allocated, storage_bytes

NUM_STEPS = 6
# Of the module, of the Trainer, and of the data.
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "accumulated": {"accumulate_grad_batches": 2},
    "sizes": {"lengths": (24, 20)},
    "ranks": {"lengths": (24, 20)},
}


class Block(nn.Module):
    """A feed-forward layer with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 136)
        self.down = nn.Linear(136, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks in a loop, which Dynamo passes over."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 50)
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        self.seen.append(weakref.ref(logits := self.head(hidden)))
        return logits


class Model(pl.LightningModule):
    """Watches what its last step keeps for the backward pass, and the peak of it."""

    def __init__(self, store: Path, lengths: tuple[int, ...] = (24,), **sharding: Any) -> None:
        super().__init__()
        self.store, self.lengths, self.sharding = store, lengths, sharding
        self.net: nn.Module | None = None
        self.losses: list[Tensor] = []
        self.saved: list[tuple[tuple[int, ...], int]] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(0)
        self.net = Net()
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], **self.sharding)
        through_files(self.net, self.store)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rows = batch[:, : self.lengths[batch_idx % len(self.lengths)]]
        return F.cross_entropy(self.net(rows).flatten(0, 1), rows.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def on_before_backward(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        self.saved = [
            (tuple(sorted(tensor.shape)), tensor.untyped_storage().nbytes())
            for node in _nodes(loss.grad_fn)
            for tensor in getattr(node, "saved_tensors", ())
        ]


def _nodes(last: Any) -> Iterator[Any]:
    seen, pending = set(), [last]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [earlier for earlier, _ in node.next_functions]


class LastPeak(pl.Callback):
    """Measures the last optimizer step. The callback has measured earlier ones."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.peak = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != self.first:
            return
        # Lightning would free them only within the step.
        trainer.optimizers[0].zero_grad()
        state = [value for each in trainer.optimizers[0].state.values() for value in each.values()]
        self._before = storage_bytes([*pl_module.parameters(), *state, batch])
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if batch_idx != self.last:
            return
        self._profile.__exit__(None, None, None)
        self.peak = self._before + bytes_allocated(self._profile)[0]


def train(folder: Path, setting: str, name: str, budget: Any) -> int | None:
    """Train and write the results; return the predicted peak."""
    options = dict(SETTINGS[setting])
    accumulated = options.pop("accumulate_grad_batches", 1)
    num_batches = NUM_STEPS * accumulated
    remat = None if budget is None else RematCallback(budget, compile=name == "compile")
    measured = LastPeak(num_batches - accumulated, num_batches - 1)
    units = UnitScaleCallback() if name == "units" else None
    trainer = pl.Trainer(
        callbacks=[one for one in (measured, remat, units) if one is not None],
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        profiler="pytorch" if name == "profiled" else None,
        strategy=ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        **{**QUIET, "devices": 2, "use_distributed_sampler": True},
    )
    if setting == "ranks":  # each has batches of a length of its own
        options["lengths"] = options["lengths"][trainer.global_rank :][:1]
    module = Model(folder / f"{setting}-{name}.store", **options)
    rows = Rows(16 * num_batches, lambda generator: torch.randint(50, (24,), generator=generator))
    found: dict[str, Any] = {"error": ""}
    try:
        trainer.fit(module, DataLoader(rows, batch_size=8))
    except (ValueError, MisconfigurationException) as error:
        found["error"] = str(error)
    else:
        found |= {
            "losses": module.losses,
            "weights": [param.full_tensor() for param in module.parameters()],
            "saved": module.saved,
            "peak": measured.peak,
            "alive": sum(reference() is not None for reference in module.net.seen),
        }
    if remat is not None:
        found["predicted"] = remat.predicted_peak_bytes
        found["measured"] = remat.measured_peak_bytes
        found["num_planned"] = len(remat.reports)
    if units is not None:
        found["scaled"] = units.coverage.fraction_of_flops("units")
    torch.save(found, folder / f"{setting}:{name}-{trainer.global_rank}.pt")
    return None if remat is None else remat.predicted_peak_bytes


def main(folder: Path, runs: list[str]) -> None:
    """All of the trainings, one after the other, in one process group."""
    quiet_rank()
    whole = 0
    for run in runs:
        setting, name = run.split(":")
        named = {
            "none": None,
            "bytes": int(0.8 * whole),
            "min_cut": name,
            "compile": 1.0,
            "profiled": 1.0,
            "units": 1.0,
            "too little for one": 1 if os.environ["LOCAL_RANK"] == "1" else 1.0,
        }
        budget = named[name] if name in named else float(name)
        predicted = train(folder, setting, name, budget)
        whole = predicted if name == "1.0" and predicted else whole


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
