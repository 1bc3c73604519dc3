"""Snapshots with given elements."""

import torch

from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from tests.tensorboard.runs import LAYOUT


def of(forward, backward=None, step=0, inputs=(), **options):
    """A snapshot of tensors ``m.a``, ``m.b``, ... with these elements."""
    names = tuple(f"m.{letter}" for letter in "abcdefgh"[: len(forward)])

    def rows(values):
        return torch.stack([statistics_row(torch.tensor(one), LAYOUT) for one in values]).numpy()

    backward = [[1.0]] * len(forward) if backward is None else backward
    options = {"names": names, "inputs": inputs, **options}
    return ScaleSnapshot(
        step=step, forward=rows(forward), backward=rows(backward), layout=LAYOUT, **options
    )
