"""Trainings in every loop on CPU processes: ``python -m ... FOLDER DOOR:SPREAD:METHOD:MODULE ...``.

Run it once per rank. Every rank writes what it computed to ``FOLDER/RUN-RANK.pt``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_unitscale import RematCallback, UnitScaleCallback
from lightning_unitscale.loops.ranks import is_distributed
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from tests.distributed.launch import quiet_rank, whole
from tests.loops import zoo
from tests.loops.every_loop import LOOPS, NUM_ACCUMULATED
from tests.loops.methods import METHODS

NUM_STEPS = 3
_REFUSED: dict[str, Callable[[], list[Any]]] = {
    "remat": lambda: [RematCallback(0.8)],
}
_PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _ddp(module: nn.Module, mesh: Any) -> nn.Module:
    return DistributedDataParallel(module)


def _fsdp(module: nn.Module, mesh: Any, **policies: Any) -> nn.Module:
    mesh = mesh["data_parallel"] if mesh.mesh_dim_names else mesh
    return _hsdp(module, mesh, **policies)


def _hsdp(module: nn.Module, mesh: Any, **policies: Any) -> nn.Module:
    """Shards over all dimensions of the mesh: over the last one, in copies over a first of two."""
    for part in (*zoo.feeds(module), module):
        fully_shard(part, mesh=mesh, **policies)
    return module


def _checkpointed(module: nn.Module, mesh: Any) -> nn.Module:
    for name, part in list(module.named_modules()):
        if isinstance(part, zoo.Feed):
            module.set_submodule(name, checkpoint_wrapper(part))
    return _fsdp(module, mesh)


def _fsdp1(module: nn.Module, mesh: Any) -> nn.Module:
    # It looks for an accelerator where it is not told of a device.
    policy = ModuleWrapPolicy({zoo.Feed})
    return FullyShardedDataParallel(
        module, device_id=torch.device("cpu"), use_orig_params=True, auto_wrap_policy=policy
    )


def _tensor(module: nn.Module, mesh: Any) -> nn.Module:
    mesh = mesh["tensor_parallel"] if mesh.mesh_dim_names else mesh
    for part in zoo.feeds(module) or [module]:
        parallelize_module(part, mesh, _PLAN)
    return module


class FSDPInFabric(fabric_strategies.FSDPStrategy):
    """Lightning refuses its own class on a CPU."""


class FSDPInTrainer(trainer_strategies.FSDPStrategy):
    """The same for FSDP in a Trainer."""


_GLOO: dict[str, Any] = {"process_group_backend": "gloo"}
SIZES = {
    "fsdp": {"data_parallel_size": 2, "tensor_parallel_size": 1, **_GLOO},
    "tensor": {"data_parallel_size": 1, "tensor_parallel_size": 2, **_GLOO},
    "fsdp-tensor": {"data_parallel_size": 2, "tensor_parallel_size": 2, **_GLOO},
}
SPREADS = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "fsdp-checkpointed": _checkpointed,
    "fsdp-bf16": partial(_fsdp, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp-offloaded": partial(_fsdp, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp1": _fsdp1,
    "tensor": _tensor,
    "whole": lambda module, mesh: module,
    "hsdp": _hsdp,
    "fsdp-tensor": lambda module, mesh: _fsdp(_tensor(module, mesh), mesh),
}


def _in_fabric(spread: str, *arguments: Any) -> Any:
    module, *others = arguments
    strategy: Any
    if spread == "ddp":
        strategy = fabric_strategies.DDPStrategy(**_GLOO)
    elif spread == "fsdp1":
        module, strategy = _fsdp1(module, None), FSDPInFabric(**_GLOO)
    else:
        strategy = fabric_strategies.ModelParallelStrategy(SPREADS[spread], **SIZES[spread])
    return LOOPS["fabric"](module, *others, devices=2, strategy=strategy)


def _in_trainer(spread: str, *arguments: Any) -> Any:
    strategy: Any
    if spread == "fsdp1":
        strategy = FSDPInTrainer(**_GLOO)
    else:
        strategy = trainer_strategies.ModelParallelStrategy(**SIZES[spread])
    options = {"devices": dist.get_world_size(), "strategy": strategy, "spread": SPREADS[spread]}
    return LOOPS["lightning"](*arguments, **options)


def _attached(spread: str, module: nn.Module, *arguments: Any) -> Any:
    names = "data_parallel", "tensor_parallel"
    if (size := dist.get_world_size()) == 2:
        mesh = init_device_mesh("cpu", (size,))
    else:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
    return LOOPS["plain"](SPREADS[spread](module, mesh), *arguments)


def _joined(spread: str, module: nn.Module, batches: Any, *arguments: Any) -> Any:
    """The second rank has only the batches of one step."""
    model = DistributedDataParallel(module)
    count = len(batches) if dist.get_rank() == 0 else NUM_ACCUMULATED
    with Join([model]):
        found = LOOPS["plain"](model, batches[:count], *arguments)
    assert is_distributed()  # what is attached later exchanges its units again
    return found


DOORS: dict[str, Callable[..., Any]] = {
    "attach": _attached,
    "join": _joined,
    "fabric": _in_fabric,
    "lightning": _in_trainer,
    # These wrap the module by themselves.
    "accelerate": lambda spread, *arguments: LOOPS["accelerate"](*arguments),
    "hugging_face": lambda spread, *arguments: LOOPS["hugging_face"](
        *arguments, ddp_backend="gloo"
    ),
}


def train(folder: Path, run: str) -> None:
    """Train and write the results."""
    door, spread, method, name = run.split(":")
    rank = int(os.environ["LOCAL_RANK"])
    callbacks = (METHODS | _REFUSED)[method]()
    # Ranks that share a tensor have the same batch.
    seed = {"tensor": 0, "whole": 0, "fsdp-tensor": rank // 2}.get(spread, rank)
    batches = zoo.batches(name, NUM_STEPS * NUM_ACCUMULATED, seed)
    try:
        with _counting_collectives() as counts:
            losses, weights = DOORS[door](spread, zoo.new(name), batches, callbacks, folder)
    except MisconfigurationException as error:
        torch.save({"refused": str(error)}, folder / f"{run}-{rank}.pt")
        return
    found: dict[str, Any] = {
        "losses": losses,
        "collectives": dict(counts),
        "weights": {key.removeprefix("module."): whole(value) for key, value in weights.items()},
    }
    for callback in callbacks:
        if isinstance(callback, UnitScaleCallback):
            found["gauge"] = callback.gauge.state()
            found["matmuls"] = (callback.coverage.num_in_units, callback.coverage.num_matmuls)
        else:
            snapshot = callback.snapshots[-1]
            found["names"] = list(snapshot.names)
            found["rms"] = {
                way: dict(zip(snapshot.names, _log2_rms(snapshot, way), strict=True))
                for way in ("forward", "backward")
            }
    torch.save(found, folder / f"{run}-{rank}.pt")


@contextlib.contextmanager
def _counting_collectives() -> Iterator[Counter[str]]:
    """Counts calls in Python; DDP and distributed tensors have other call paths."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    names = ("all_reduce", "all_gather_object", "all_gather", "broadcast_object_list")
    with mock.patch.multiple(dist, **{name: counted(name) for name in names}):
        yield counts


def _log2_rms(snapshot: ScaleSnapshot, way: Any) -> list[Tensor]:
    return [torch.as_tensor(value) for value in snapshot.log2_rms(way, stored=False)]


if __name__ == "__main__":
    quiet_rank()
    os.environ["RANK"] = os.environ["LOCAL_RANK"]  # Accelerate asks for it
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    for run in sys.argv[2:]:
        train(Path(sys.argv[1]), run)
    dist.destroy_process_group()
