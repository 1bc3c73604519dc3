"""Agreement across ranks: measured values and statistics rows, each in one packed exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_unitscale.exponents import FloatArray
from lightning_unitscale.row_reduction import pack_rows, unpack_rows
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.transforms.calibration import combined_rms


def is_distributed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def joint_rms(*measured: Mapping[str, float]) -> tuple[dict[str, float], ...]:
    """RMS over all ranks of named values; ranks may have measured different names."""
    if not is_distributed():
        return tuple(dict(one) for one in measured)
    gathered: list[tuple[Mapping[str, float], ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, measured)
    return tuple(_joint(one) for one in zip(*gathered, strict=True))


def joint_reasons(*reasons: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """What any rank has found, by name; where several have, the words of the first."""
    if not is_distributed():
        return tuple(dict(one) for one in reasons)
    gathered: list[tuple[Mapping[str, str], ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, reasons)
    return tuple(
        {name: text for one in reversed(found) for name, text in one.items()}
        for found in zip(*gathered, strict=True)
    )


def joint_snapshot(snapshot: ScaleSnapshot, device: torch.device) -> ScaleSnapshot:
    """Statistics of the joint batch of all ranks.

    Ranks that ran different graphs (a branch on data) cannot be packed; they are merged by name
    over the tensors that all of them have in the same units: what a product reads on one rank only
    has its units there, and is counted in them.
    """
    if not is_distributed():
        return snapshot
    if _same_everywhere(snapshot.names, device):
        return replace(
            snapshot,
            forward=_reduced(snapshot.forward, snapshot, device),
            backward=_reduced(snapshot.backward, snapshot, device),
        )
    return _merged_by_name(snapshot)


def _joint(values: tuple[Mapping[str, float], ...]) -> dict[str, float]:
    names = dict.fromkeys(name for one in values for name in one)
    return {name: combined_rms([one[name] for one in values if name in one]) for name in names}


def _same_everywhere(names: tuple[str, ...], device: torch.device) -> bool:
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    number = int.from_bytes(digest[:6], "big")
    extremes = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def _reduced(rows: FloatArray, snapshot: ScaleSnapshot, device: torch.device) -> FloatArray:
    table: Tensor = torch.as_tensor(rows).to(device)
    packed = pack_rows(table, snapshot.layout, dist.get_rank(), dist.get_world_size())
    dist.all_reduce(packed)
    joint: FloatArray = unpack_rows(packed, snapshot.layout, dist.get_world_size()).cpu().numpy()
    return joint


def _merged_by_name(snapshot: ScaleSnapshot) -> ScaleSnapshot:
    gathered: list[ScaleSnapshot] = [snapshot] * dist.get_world_size()
    dist.all_gather_object(gathered, snapshot)
    shared = set.intersection(*(set(_in_units(one)) for one in gathered))
    # In the order of the first rank: graphs of others may list the same tensors in another.
    names = [one[0] for one in _in_units(gathered[0]) if one in shared]
    first, *others = (one.select(names) for one in gathered)
    for one in others:
        first = first.merge(one)
    return first


def _in_units(snapshot: ScaleSnapshot) -> list[tuple[str, int, int]]:
    units = (snapshot.log2_sigma.tolist(), snapshot.log2_gamma.tolist())
    return list(zip(snapshot.names, *units, strict=True))
