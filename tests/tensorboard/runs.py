"""Small runs with known scales, written by the writer, for the plugin, the report and the page."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.scales.layout import DIRECTIONS, FORMAT_KINDS, RowLayout, TensorStatistics
from lightning_unitscale.scales.reduce import absent_rows
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.tensorboard.writer import ScaleWriter

LAYOUT = RowLayout()
NAMES = (
    "blocks.0.attn.weight",
    "blocks.0.attn.linear",
    "blocks.0.mlp.gelu",
    "blocks.1.attn.linear",
    "blocks.1.mlp.gelu",
    "head.linear",
)


def snapshot(
    step: int, *, names: Sequence[str] = NAMES, backward: bool = True, offset: int = 0
) -> ScaleSnapshot:
    """Tensor k is about 2**(offset - 2k) and its gradient 2**(-4 - 2k); the last one is zero."""
    generator = torch.Generator().manual_seed(step)
    number = len(names)
    normal = torch.randn(number, 400, generator=generator)
    forward = [statistics_row(normal[k] * 2.0 ** (offset - 2 * k), LAYOUT) for k in range(number)]
    gradients = absent_rows(number, LAYOUT)
    if backward:
        for k in range(number):
            gradients[k] = statistics_row(normal[k] * 2.0 ** (-4 - 2 * k), LAYOUT)
        gradients[-1] = statistics_row(torch.zeros(8), LAYOUT)
    return ScaleSnapshot(
        step, tuple(names), torch.stack(forward).numpy(), gradients.numpy(), LAYOUT
    )


def with_nan(snapshot: ScaleSnapshot, *tensors: int) -> ScaleSnapshot:
    """The snapshot with two NaN and an infinity in some tensors, values and gradients."""
    row = statistics_row(torch.tensor([1.0, torch.nan, torch.nan, torch.inf]), LAYOUT).numpy()
    forward, backward = snapshot.forward.copy(), snapshot.backward.copy()
    forward[list(tensors)] = backward[list(tensors)] = row
    return replace(snapshot, forward=forward, backward=backward)


def unit_scaled(meant: ScaleSnapshot) -> ScaleSnapshot:
    """The same tensors, stored in units near their own scales."""
    rows, units = {}, {}
    for direction in DIRECTIONS:
        values = meant.log2_rms(direction)
        units[direction] = np.where(np.isfinite(values), np.round(values), 0).astype(int)
        rows[direction] = meant.rows(direction).copy()
        for row, unit in zip(rows[direction], units[direction].tolist(), strict=True):
            if unit:  # formats count what is stored, here told from the exponents
                stored = TensorStatistics(row.copy(), LAYOUT, log2_factor=-unit)
                for item, kind in itertools.product(LAYOUT.formats, FORMAT_KINDS):
                    share = stored.fraction(item, kind)
                    row[LAYOUT.index(f"{item.name}.{kind}")] = share * stored.numel
    return ScaleSnapshot(
        meant.step,
        meant.names,
        rows["forward"],
        rows["backward"],
        LAYOUT,
        log2_sigma=units["forward"],
        log2_gamma=units["backward"],
    )


def write(directory: Path, snapshots: Sequence[ScaleSnapshot]) -> Path:
    with SummaryWriter(str(directory)) as experiment:
        writer = ScaleWriter(experiment)
        for one in snapshots:
            writer.write(one)
    return directory
