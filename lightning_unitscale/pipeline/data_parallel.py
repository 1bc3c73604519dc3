"""Run several pipelines side by side: divide the data and average the gradients."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import RandomSampler
from typing_extensions import override

from lightning_unitscale.loops.ranks import broadcast, gathered
from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.pipeline.schedules import Schedule
from lightning_unitscale.pipeline.stage_owners import Ownership

# Bytes per message: enough to hide the latency, few compared with the gradients.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Replicas:
    """The ranks with the same position in every pipeline."""

    group: dist.ProcessGroup | None
    # The index of this rank's pipeline, and the number of pipelines.
    rank: int
    count: int

    def of_first(self, value: Any) -> Any:
        """Return the first pipeline's value on all of these ranks."""
        return value if self.count == 1 else broadcast(value, 0, self.group)

    @torch.no_grad()
    def average(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Average the gradients over all pipelines."""
        # A missing gradient counts as zero if another pipeline has one.
        for bucket in _buckets(self._present(parameters)):
            gradients = [
                torch.zeros_like(param) if param.grad is None else param.grad for param in bucket
            ]
            # Divided first, as in DDP: the sum of halves has the same bits as the half of a sum.
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.count)
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for param, gradient, part in zip(bucket, gradients, parts, strict=True):
                param.grad = gradient.copy_(part.view_as(gradient))

    def _present(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return the parameters that have a gradient in any pipeline."""
        digest = hashlib.sha256(repr(list(parameters)).encode()).hexdigest()
        has_gradient = [param.grad is not None for param in parameters.values()]
        rows = gathered((digest, has_gradient), self.group)
        if any(other != digest for other, _ in rows):
            raise RuntimeError(
                f"the pipelines are cut in different places: this rank has the parameters "
                f"{list(parameters)[:3]}... here, and another pipeline has others there. Keep "
                "Python state and shapes that differ between the pipelines out of the step, or "
                "mark the cuts with pipe_split() or split={path: SplitPoint.BEGINNING}."
            )
        any_has = map(any, zip(*(flags for _, flags in rows), strict=True))
        return dict(itertools.compress(parameters.items(), any_has))


def _buckets(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield buckets of parameters of one type and device."""
    open_buckets: dict[Any, list[nn.Parameter]] = {}
    sizes: Counter[Any] = Counter()
    for param in parameters.values():
        kind = param.dtype, param.device
        if sizes[kind] and sizes[kind] + param.nbytes > _BUCKET_BYTES:
            yield open_buckets.pop(kind)
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(param)
        sizes[kind] += param.nbytes
    yield from open_buckets.values()


@dataclass(frozen=True)
class Grid:
    """The ranks as a table: a column is a pipeline, a row has the same stages of every pipeline."""

    # Rank `r` of `N` pipelines is in row `r // N` and column `r % N`. Ranks of a row exchange
    # gradients. They are adjacent, so they share a machine if they fit. Only the few values between
    # two stages travel between machines.

    # The ranks of this rank's pipeline. ``None`` means all.
    pipeline: dist.ProcessGroup | None
    replicas: Replicas  # the ranks with the same stages
    # Both groups, as the dimensions ``"pipeline"`` and, with several pipelines, ``"data"``.
    mesh: DeviceMesh


class GridStrategy(DDPStrategy):
    """A DDP strategy over pipelines: it divides data among them and averages over them."""

    data_parallel: int = 1  # the number of pipelines
    schedule: Schedule
    num_microbatches: int
    free_unowned: bool
    ownership: Ownership
    _grid: Grid | None = None
    _is_accumulating = False

    @property
    def grid(self) -> Grid:
        """Return the groups of this rank, which exist after the processes have connected."""
        assert self._grid is not None
        return self._grid

    @property
    def own_module(self) -> pl.LightningModule:
        """Return the connected module."""
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Give all ranks of a pipeline the same batches."""
        num_pipelines = self.data_parallel
        return {"num_replicas": num_pipelines, "rank": self.global_rank % num_pipelines}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        count, num_ranks = self.data_parallel, dist.get_world_size()
        if num_ranks % count:
            raise MisconfigurationException(
                f"PipelineStrategy(data_parallel={count}): {num_ranks} devices (devices times "
                "num_nodes) cannot be divided into as many pipelines. Change one of the numbers."
            )
        device_type, world = self.root_device.type, dist.group.WORLD
        if count == 1:
            assert world is not None
            mesh = DeviceMesh.from_group(world, device_type, mesh_dim_names=("pipeline",))
            self._grid = Grid(None, Replicas(None, 0, 1), mesh)
            return
        ranks = torch.arange(num_ranks).view(-1, count)
        column, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=self._timeout)
        row, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=self._timeout)
        mesh = DeviceMesh.from_group(
            [column, row], device_type, ranks, mesh_dim_names=("pipeline", "data")
        )
        self._grid = Grid(column, Replicas(row, dist.get_rank(row), count), mesh)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the pipelines. Ranks of one pipeline have the same values."""
        if isinstance(tensor, Tensor) and group in (None, dist.group.WORLD):
            if self.data_parallel == 1:
                return tensor
            group = self.grid.replicas.group
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather from the pipelines: ``(data_parallel, ...)``, or the tensor itself for one."""
        # ``LightningModule.all_gather`` passes the group of all ranks by default.
        if group in (None, dist.group.WORLD):
            if self.data_parallel == 1:
                return tensor
            group = self.grid.replicas.group
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        count = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count)

    @override
    def block_backward_sync(self) -> Any:
        """Accumulate gradients within this context without averaging over the pipelines."""
        return shadowed(self, _is_accumulating=True)

    @contextlib.contextmanager
    def metrics_over_pipelines(self, module: nn.Module) -> Iterator[None]:
        """Let metric objects count a pipeline's samples only once within this context."""
        attributes: dict[str, Any] = {"process_group": self.grid.replicas.group}
        if self.data_parallel == 1:
            attributes = {"distributed_available_fn": lambda: False}
        with contextlib.ExitStack() as stack:
            for metric in module.modules():
                if isinstance(metric, torchmetrics.Metric) and metric.process_group is None:
                    stack.enter_context(shadowed(metric, **attributes))
            yield

    @contextlib.contextmanager
    def order_of_loaders(self, trainer: pl.Trainer) -> Iterator[None]:
        """Keep the order of a single pipeline's training data within this context."""
        # For several devices, Lightning replaces the sampler of the training data by one that
        # always shuffles. The ranks of one pipeline read the same data, so we keep the loader's
        # order. Several pipelines divide the data as DDP does.
        if self.data_parallel > 1:
            yield
            return
        # Private names of Lightning, checked on 2.6: no strategy hook has access to both samplers.
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepare_in_order(dataloader: Any, shuffle: bool, mode: Any) -> object:
            is_shuffled = isinstance(getattr(dataloader, "sampler", None), RandomSampler)
            return prepare(dataloader, shuffle=shuffle and is_shuffled, mode=mode)

        with shadowed(connector, _prepare_dataloader=Replacement(prepare, prepare_in_order)):
            yield
