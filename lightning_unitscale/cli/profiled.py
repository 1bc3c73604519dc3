"""Determine the share of a configured strategy's job on one device, without the devices."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_unitscale.capture.absent_ranks import emptied, is_sharded, take_over
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.profiler import GraphProfile, fake_process_group

# Subclasses of DDP with another content of a device.
_NO_REPLICAS = (DeepSpeedStrategy, XLAStrategy, GridStrategy)


@dataclass(frozen=True)
class ProfiledJob:
    """The share of a job on one device, and the Trainer to profile it with."""

    # One device, the whole model on each of several devices, or a shard on each.
    kind: Literal["one", "replicas", "shards"] = "one"
    strategy: Any = "auto"
    num_devices: int = 1
    num_nodes: int = 1
    num_ranks: int | None = 1  # ``None`` if it is not known
    options: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def ranks(self, trainer: pl.Trainer, model: pl.LightningModule, device: str) -> Iterator[None]:
        """Make this process rank 0 of the job, and give the module its mesh, in this context."""
        strategy = trainer.strategy
        strategy.connect(model)
        if self.kind != "shards":
            yield
            return
        assert isinstance(strategy, ModelParallelStrategy)
        assert self.num_ranks is not None
        with fake_process_group(self.num_ranks, device=device):
            if device == "cuda":
                strategy.accelerator = CUDAAccelerator()
                strategy.parallel_devices = [
                    torch.device(device, i) for i in range(self.num_devices)
                ]
            strategy.setup_environment()
            yield

    def configure(self, trainer: pl.Trainer, model: pl.LightningModule, device: str) -> None:
        """Call the module's ``configure_model``. Shards consist of tensors without memory."""
        precision = trainer.precision_plugin
        if self.kind != "shards":
            model.configure_model()
            precision.convert_module(model)
            return
        if not is_overridden("configure_model", model):
            raise MisconfigurationException(
                f"`strategy=ModelParallelStrategy`: {type(model).__name__} has no configure_model. "
                "Define one that shards it by fully_shard or parallelize_module."
            )
        emptied(model, "meta")
        with torch.device("meta"), precision.module_init_context():
            model.configure_model()
        precision.convert_module(model)
        if is_sharded(model):
            take_over(model, torch.device(device))

    def remark(self, profile: GraphProfile) -> str:
        """Return a note about memory that the profile leaves out, or an empty string."""
        if self.kind == "shards" and profile.num_ranks == 1:
            return (
                f"configure_model has sharded nothing: each of {self.num_ranks} ranks has it all."
            )
        if self.kind != "replicas":
            return ""
        buckets, timeline = profile.gradient_bytes, profile.timeline
        if self.options.get("gradient_as_bucket_view"):
            # Gradients are stored in the buckets, which always exist.
            gradients = timeline.live_by_kind["gradient"]
            beside = [
                live - grad for live, grad in zip(timeline.live_bytes, gradients, strict=True)
            ]
            peak = max(beside, default=0) + buckets
        else:
            peak = profile.peak_bytes + buckets
        ranks = "every device" if self.num_ranks is None else f"each of {self.num_ranks} devices"
        return (
            f"DDP: the whole model is on {ranks}; with its buckets of gradients, "
            f"{format_bytes(buckets)}, the peak is {format_bytes(peak)}"
        )


def profiled_job(strategy: Any, devices: Any, num_nodes: int) -> ProfiledJob:
    """Return the part of a Trainer's job that is profiled."""
    kind, options = _class_of(strategy)
    num_devices = _num_devices(devices)
    num_ranks = None if num_devices is None else num_devices * num_nodes
    if issubclass(kind, ModelParallelStrategy):
        if num_devices is None:
            raise MisconfigurationException(
                f"`devices={devices!r}`: {kind.__name__} needs the number of devices. Expected a "
                "number. Pass it, such as --trainer.devices=8."
            )
        return ProfiledJob("shards", strategy, num_devices, num_nodes, num_ranks, options)
    if num_ranks == 1 or issubclass(kind, SingleDeviceStrategy):
        return ProfiledJob()
    if issubclass(kind, DDPStrategy) and not issubclass(kind, _NO_REPLICAS):
        if strategy == "auto" and num_ranks is None:
            return ProfiledJob()
        return ProfiledJob("replicas", num_ranks=num_ranks, options=options)
    instead = "explain-pipeline" if issubclass(kind, GridStrategy) else "ModelParallelStrategy"
    raise MisconfigurationException(
        f"`strategy={kind.__name__}` with `devices={devices!r}`: the memory of one device is "
        f"not known. Expected ModelParallelStrategy, DDPStrategy or one device. Use {instead}, or "
        "profile the whole model by --trainer.strategy=auto --trainer.devices=1."
    )


def _class_of(strategy: Any) -> tuple[type[Strategy], Mapping[str, Any]]:
    """Return the class that a configuration names, and its arguments; for "auto" that of DDP."""
    if strategy == "auto":
        return DDPStrategy, {}
    if isinstance(strategy, str):
        if strategy not in StrategyRegistry:
            raise MisconfigurationException(
                f"`strategy={strategy!r}`: no such strategy. Expected one of "
                f"{', '.join(sorted(StrategyRegistry))}, or a class. Pass --trainer.strategy=auto."
            )
        registered = StrategyRegistry[strategy]
        kind, options = registered["strategy"], registered["init_params"]
        return kind if isinstance(kind, type) else type(kind(**options)), options
    module, _, name = strategy["class_path"].rpartition(".")
    given = [strategy.get(part) or {} for part in ("init_args", "dict_kwargs")]
    options = {name: value for part in given for name, value in dict(part).items()}
    return getattr(importlib.import_module(module), name), options


def _num_devices(devices: Any) -> int | None:
    """Return a Trainer's number of devices per node, or ``None`` for all available ones."""
    if isinstance(devices, str):
        listed = [part for part in devices.split(",") if part.strip()]
        if "," in devices:
            return len(listed)
        devices = int(devices) if devices.lstrip("-").isdigit() else "auto"
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None
