"""Ranks that have the same stages, each in a pipeline with other data: one mean gradient."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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
        if self.count == 1:
            return value
        payload = [value if self.rank == 0 else None]
        dist.broadcast_object_list(payload, group=self.group, group_src=0)
        return payload[0]

    @torch.no_grad()
    def average(
        self, parameters: Mapping[str, nn.Parameter], names: Iterable[str], device: torch.device
    ) -> None:
        """Give all pipelines the mean of their gradients.

        A parameter without a gradient counts as zero where another pipeline has one.

        Args:
            parameters: Those of this rank, by name.
            names: Names of all parameters of the module, which are the same on all ranks.
            device: Where the group's messages are.

        Raises:
            RuntimeError: If the pipelines do not have the same parameters on their ranks.
        """
        if self.count == 1:
            return
        present = self._present(parameters, list(names), device)
        # In the order of the names, which is the same for all, whatever made the mapping.
        chosen = [parameters[name] for name in present]
        for one in chosen:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        for bucket in _buckets(chosen):
            gradients = [one.grad for one in bucket if one.grad is not None]
            # Divided first, as DDP does: the sum of halves is the half of a sum to the last bit.
            flat = torch.cat([one.reshape(-1) for one in gradients]).div_(self.count)
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([one.numel() for one in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _present(
        self, parameters: Mapping[str, nn.Parameter], names: list[str], device: torch.device
    ) -> list[str]:
        """Names of the parameters that some pipeline has a gradient of."""
        own = [name for name in names if name in parameters]
        digest = hashlib.sha256("\n".join(own).encode()).digest()[:7]
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
        return [name for name, one in zip(names, any_has, strict=True) if one]


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """In order, each of one type, device and at most so many bytes, or of one parameter."""
    bucket: list[nn.Parameter] = []
    size = 0
    for one in parameters:
        num_bytes = one.numel() * one.element_size()
        first = bucket[0] if bucket else one
        fits = (one.dtype, one.device) == (first.dtype, first.device)
        if bucket and (not fits or size + num_bytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += num_bytes
    if bucket:
        yield bucket
