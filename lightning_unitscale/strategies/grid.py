"""Several pipelines side by side: which ranks share data, and one mean gradient for them."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
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

from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.ranks import broadcast

# As much as one message carries: enough to keep the latency out, little beside the gradients.
_BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Replicas:
    """The same rank of every pipeline.

    Attributes:
        group: These ranks.
        rank: This one's place among them, and so its pipeline's.
        count: How many pipelines there are.
    """

    group: dist.ProcessGroup | None
    rank: int
    count: int

    def of_first(self, value: Any) -> Any:
        """The first pipeline's value, on all of them."""
        return value if self.count == 1 else broadcast(value, 0, self.group)

    @torch.no_grad()
    def average(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: Iterable[str],
        device: torch.device,
        steppers: Mapping[str, int],
    ) -> None:
        """Give the mean of the gradients to all pipelines, or to the one that steps the parameter.

        A parameter without a gradient counts as zero where another pipeline has one.
        """
        if self.count == 1:
            return
        # In the order of the names, which is the same for all, whatever made the mapping.
        present = self._present(parameters, list(names), device, steppers)
        for stepper, bucket in _buckets({name: parameters[name] for name in present}, steppers):
            gradients = [
                torch.zeros_like(param) if param.grad is None else param.grad for param in bucket
            ]
            # Divided first, as DDP does: the sum of halves is the half of a sum to the last bit.
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.count)
            if stepper is None:
                dist.all_reduce(flat, group=self.group)
            else:
                dist.reduce(flat, group=self.group, group_dst=stepper)
            if stepper not in (None, self.rank):
                for param in bucket:
                    param.grad = None
                continue
            parts = flat.split([gradient.numel() for gradient in gradients])
            for param, gradient, part in zip(bucket, gradients, parts, strict=True):
                param.grad = gradient.copy_(part.view_as(gradient))

    @torch.no_grad()
    def share(self, parameters: Mapping[str, nn.Parameter], steppers: Mapping[str, int]) -> None:
        """Give all pipelines the values of the parameters that others have stepped."""
        for stepper, bucket in _buckets(parameters, steppers):
            flat = torch.cat([param.reshape(-1) for param in bucket])
            dist.broadcast(flat, group=self.group, group_src=stepper)
            if stepper != self.rank:
                parts = flat.split([param.numel() for param in bucket])
                for param, part in zip(bucket, parts, strict=True):
                    param.copy_(part.view_as(param))

    def _present(
        self,
        parameters: Mapping[str, nn.Parameter],
        names: list[str],
        device: torch.device,
        steppers: Mapping[str, int],
    ) -> list[str]:
        """Names of the parameters that some pipeline has a gradient of."""
        own = [name for name in names if name in parameters]
        described = "\n".join(f"{name} {steppers.get(name)}" for name in own)
        digest = hashlib.sha256(described.encode()).digest()[:7]
        has = [name in parameters and parameters[name].grad is not None for name in names]
        row = torch.tensor([int.from_bytes(digest, "big"), *map(int, has)], device=device)
        rows = [torch.empty_like(row) for _ in range(self.count)]
        dist.all_gather(rows, row, group=self.group)
        table = torch.stack(rows).cpu()
        if table[:, 0].unique().numel() > 1:
            raise RuntimeError(
                f"the pipelines are cut in different places: here this rank has the parameters "
                f"{own[:3]}... and in another pipeline others; expected one course of the step in "
                "all pipelines; keep what differs between them (Python state, shapes of batches) "
                "out of the step, or mark the cuts with pipe_split() or "
                "split={path: SplitPoint.BEGINNING}."
            )
        any_has = table[:, 1:].amax(0).bool().tolist()
        return [name for name, has_gradient in zip(names, any_has, strict=True) if has_gradient]


def _buckets(
    parameters: Mapping[str, nn.Parameter], steppers: Mapping[str, int]
) -> Iterator[tuple[int | None, list[nn.Parameter]]]:
    """Parameters that go together, and who steps them: ``None`` for all.

    Each bucket is in order, of one type and device, and of at most ``_BUCKET_BYTES`` or one
    parameter.
    """
    open_buckets: dict[Any, list[nn.Parameter]] = {}
    sizes: Counter[Any] = Counter()
    for name, param in parameters.items():
        stepper = steppers.get(name)
        kind = stepper, param.dtype, param.device
        if sizes[kind] and sizes[kind] + param.nbytes > _BUCKET_BYTES:
            yield stepper, open_buckets.pop(kind)
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(param)
        sizes[kind] += param.nbytes
    for (stepper, *_), bucket in open_buckets.items():
        yield stepper, bucket


@dataclass(frozen=True)
class Grid:
    """The ranks as a table: a column is a pipeline, a row has the same stages of every pipeline.

    Rank ``r`` of ``N`` pipelines is in row ``r // N`` and column ``r % N``. So the ranks of a row,
    which exchange gradients, are next to each other, on one machine as far as they fit, and what
    goes from machine to machine is the few values between two stages.

    Attributes:
        pipeline: The ranks of this rank's pipeline; ``None`` for all.
        replicas: The ranks with the same stages.
        mesh: Both as torch's device mesh, with the dimensions ``"pipeline"`` and, if there are
            several, ``"data"``.
    """

    pipeline: dist.ProcessGroup | None
    replicas: Replicas
    mesh: DeviceMesh


def make_grid(num_pipelines: int, device_type: str, timeout: timedelta | None) -> Grid:
    """The groups of this rank. Every rank calls it."""
    num_ranks = dist.get_world_size()
    if num_ranks % num_pipelines:
        raise MisconfigurationException(
            f"PipelineStrategy(data_parallel={num_pipelines}): {num_ranks} devices cannot be "
            "divided into as many pipelines; expected a divisor of the number of devices "
            "(devices times num_nodes); change one of the two."
        )
    if num_pipelines == 1:
        world = dist.group.WORLD
        assert world is not None
        mesh = DeviceMesh.from_group(world, device_type, mesh_dim_names=("pipeline",))
        return Grid(None, Replicas(None, 0, 1), mesh)
    ranks = torch.arange(num_ranks).view(-1, num_pipelines)
    # All ranks make all groups, in one order.
    pipelines = [dist.new_group(members, timeout=timeout) for members in ranks.T.tolist()]
    rows = [dist.new_group(members, timeout=timeout) for members in ranks.tolist()]
    row, column = divmod(dist.get_rank(), num_pipelines)
    mesh = DeviceMesh.from_group(
        [pipelines[column], rows[row]], device_type, ranks, mesh_dim_names=("pipeline", "data")
    )
    return Grid(pipelines[column], Replicas(rows[row], column, num_pipelines), mesh)


class GridStrategy(DDPStrategy):
    """Treats pipelines as DDP treats ranks: divides data among them and averages over them.

    Attributes:
        data_parallel: How many pipelines there are.
    """

    data_parallel: int = 1
    _grid: Grid | None = None
    _is_accumulating = False

    @property
    def grid(self) -> Grid:
        """The groups of this rank; there once the processes are connected."""
        assert self._grid is not None
        return self._grid

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a pipeline have the same batches."""
        return {
            "num_replicas": self.data_parallel,
            "rank": self.global_rank % self.data_parallel,
        }

    @override
    def setup_environment(self) -> None:
        """Connects the processes, and those of each pipeline among themselves."""
        super().setup_environment()
        self._grid = make_grid(self.data_parallel, self.root_device.type, self._timeout)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the pipelines, all of whose ranks have the same values."""
        if not isinstance(tensor, Tensor) or group not in (None, dist.group.WORLD):
            return super().reduce(tensor, group, reduce_op)
        if self.data_parallel == 1:
            return tensor
        return super().reduce(tensor, self.grid.replicas.group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gathers from the pipelines: ``(data_parallel, ...)``, or the tensor itself of one."""
        # ``LightningModule.all_gather`` names the group of all ranks where its caller names none.
        if group not in (None, dist.group.WORLD):
            return super().all_gather(tensor, group, sync_grads)
        if self.data_parallel == 1:
            return tensor
        return super().all_gather(tensor, self.grid.replicas.group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so."""
        count = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(count)
        return bool(count == self.world_size) if all else bool(count)

    @override
    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within this context gradients are accumulated and not yet averaged over the pipelines."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    @contextlib.contextmanager
    def metrics_over_pipelines(self, module: nn.Module) -> Iterator[None]:
        """Within this context metric objects count what a pipeline has seen once."""
        with contextlib.ExitStack() as stack:
            for metric in module.modules():
                if not isinstance(metric, torchmetrics.Metric) or metric.process_group is not None:
                    continue
                if self.data_parallel == 1:
                    stack.enter_context(shadowed(metric, distributed_available_fn=_never))
                else:
                    stack.enter_context(shadowed(metric, process_group=self.grid.replicas.group))
            yield

    @contextlib.contextmanager
    def order_of_loaders(self, trainer: pl.Trainer) -> Iterator[None]:
        """Within this context Lightning shuffles the training data of a single pipeline if asked.

        It gives the training data of several devices a sampler that shuffles, whatever the loader's
        own does. All ranks of one pipeline read all data, so there the loader's own order is kept.
        The data of several pipelines are divided as under DDP.
        """
        if self.data_parallel > 1:
            yield
            return
        # Private names of Lightning's, checked on 2.6: no hook of a strategy sees both samplers.
        connector = trainer._data_connector
        prepare = connector._prepare_dataloader

        def prepare_in_order(dataloader: Any, shuffle: bool, mode: Any) -> object:
            is_shuffled = isinstance(getattr(dataloader, "sampler", None), RandomSampler)
            return prepare(dataloader, shuffle=shuffle and is_shuffled, mode=mode)

        with shadowed(connector, _prepare_dataloader=Replacement(prepare, prepare_in_order)):
            yield


def _never() -> bool:
    return False
