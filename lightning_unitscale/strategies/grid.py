"""Several pipelines side by side: which ranks are one pipeline, and which have the same stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

from lightning_unitscale.shadowing import shadowed
from lightning_unitscale.strategies.replicas import Replicas


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
    """The groups of this rank. Every rank calls it.

    Raises:
        MisconfigurationException: If the ranks cannot be divided.
    """
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
    pipelines = [dist.new_group(one, timeout=timeout) for one in ranks.T.tolist()]
    rows = [dist.new_group(one, timeout=timeout) for one in ranks.tolist()]
    row, column = divmod(dist.get_rank(), num_pipelines)
    mesh = DeviceMesh.from_group(
        [pipelines[column], rows[row]], device_type, ranks, mesh_dim_names=("pipeline", "data")
    )
    return Grid(pipelines[column], Replicas(rows[row], column, num_pipelines), mesh)


class GridStrategy(DDPStrategy):
    """What DDP does for ranks, for pipelines: their data, and what is averaged over them.

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
            for one in module.modules():
                if not isinstance(one, torchmetrics.Metric) or one.process_group is not None:
                    continue
                if self.data_parallel == 1:
                    stack.enter_context(shadowed(one, distributed_available_fn=_never))
                else:
                    stack.enter_context(shadowed(one, process_group=self.grid.replicas.group))
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

        with shadowed(connector, _prepare_dataloader=prepare_in_order):
            yield


def _never() -> bool:
    return False
