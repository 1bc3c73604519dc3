"""The link between a device and the host's memory: its speed, and the option that uses it."""

from __future__ import annotations

import functools
from typing import Literal

import torch

from lightning_unitscale.arguments import shown
from lightning_unitscale.memory.budgets import Budget
from lightning_unitscale.memory.costs import CostModel, default_cost_model
from lightning_unitscale.memory.gpus import GPU, GPUS, present_gpu
from lightning_unitscale.memory.offload import HostLink

Offload = Literal["host"] | HostLink | None
"""``"host"`` for the link of the device that runs the step, or a link to assume."""
OP_BY_OP = (
    "Inductor may reorder operations, so copies to the host would not end where the plan expects "
    "it. Leave compile=True out, or leave offload out."
)
# Of the link's rate, after the headers of its packets (24 bytes for 128 to 256 of data).
_LINK_SHARE = 0.8
# A CPU copies at the rate at which it moves bytes: each is read and written.
_CPU_LINK = HostLink(4e9)
_MEASURED_BYTES = 64 * 2**20


def check_offload(offload: Offload, budget: Budget) -> Offload:
    """Return a checked ``offload``, which needs a budget that limits bytes."""
    if offload is not None and offload != "host" and not isinstance(offload, HostLink):
        raise ValueError(
            f"offload={shown(offload)}: not a place for saved tensors. Expected 'host', for pinned "
            "host memory, or None. Pass offload='host'."
        )
    if offload is not None and budget in ("min_cut", "default"):
        raise ValueError(
            f"offload={shown(offload)}: budget={budget!r} limits no bytes, so nothing would be "
            "moved. Pass a budget in bytes or a float such as budget=0.5, or leave offload out."
        )
    return offload


def described_link(gpu: GPU) -> HostLink:
    """Return the link of a GPU that need not exist here."""
    return HostLink(_LINK_SHARE * gpu.host_bytes_per_second)


def gpu_cost_model(gpu: GPU) -> CostModel:
    """Return the speed of one GPU, at the rates of its data sheet.

    No step is faster, so in a real one copies have more time than planned.
    """
    default = default_cost_model("cuda")
    return CostModel(
        gpu.flops_per_second,
        gpu.bytes_per_second,
        default.overhead_seconds,
        default.random_seconds,
    )


def link_of(device: str) -> HostLink:
    """Return the link of a device: a named GPU's as described, this machine's as measured."""
    kind, _, name = device.partition(":")
    if kind != "cuda":
        return _CPU_LINK
    if name in GPUS:
        return described_link(GPUS[name])
    if not torch.cuda.is_available():
        return described_link(present_gpu())
    return measured_link(torch.cuda.current_device())


@functools.cache
def measured_link(device: int) -> HostLink:
    """Return the link of a GPU from pinned copies, at the rate of the slower direction."""
    on_device = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
    on_host = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    return HostLink(min(_rate(on_host, on_device), _rate(on_device, on_host)))


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    device = next(tensor.device for tensor in (target, source) if tensor.is_cuda)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    milliseconds = []
    with torch.cuda.device(device):
        for _ in range(3):
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end))
    return source.numel() / (1e-3 * min(milliseconds))
