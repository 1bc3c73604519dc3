"""From the rows of the calls of a step to one snapshot of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightning_unitscale.exponents import FloatArray
from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.row_reduction import merge_rows, shift_rows
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.transforms.probed_calls import ProbedCall


def take_snapshot(
    step: int, calls: Sequence[ProbedCall], layout: RowLayout, grad_scale: float
) -> ScaleSnapshot:
    """The snapshot of what calls have recorded, with one transfer from the device.

    Args:
        step: Optimizer step of the snapshot.
        calls: At least one.
        layout: Columns of a row.
        grad_scale: Factor that the loss carried; gradients are divided by it.
    """
    device = calls[0].record.forward.device
    rows = [call.record.forward.to(device) for call in calls]
    rows += [call.record.backward.to(device) for call in calls]
    if device.type == "cpu" and len(calls) == 1:
        forward, backward = rows
    else:
        forward, backward = torch.cat(rows).cpu().chunk(2)
    values, gradients = (one.detach().double().numpy() for one in (forward, backward))
    return snapshot_of(step, calls, values, gradients, layout, grad_scale)


def snapshot_of(
    step: int,
    calls: Sequence[ProbedCall],
    forward: FloatArray,
    backward: FloatArray,
    layout: RowLayout,
    grad_scale: float,
) -> ScaleSnapshot:
    """The snapshot of a step.

    Args:
        step: The step.
        calls: What its graphs recorded, in the order of the calls.
        forward: All forward rows of the calls; it is written into.
        backward: All backward rows, zeros where no gradient has arrived; it is written into.
        layout: The columns.
        grad_scale: Factor that the loss carried; gradients are divided by it.

    Returns:
        The snapshot; rows of a tensor that was recorded several times are merged.
    """
    first = 0
    for call in calls:
        own = slice(first, first := first + len(call.tensors))
        if call.shared is not None:
            call.shared.fill(forward[own], backward[own], layout)
    # A slot that no gradient reached holds zeros, and a real row has elements.
    backward[~(backward[:, 0] > 0)] = np.nan
    sigmas, gammas = (
        np.array([unit for call in calls for unit in call.exponents(which)])
        for which in ("sigma", "gamma")
    )
    tensors = [one for call in calls for one in call.tensors]
    in_graph = np.array([one.held.in_graph for one in tensors])
    forward = _shifted(forward, sigmas * in_graph, layout)
    # A loss scaler moves by factors of two, so taking it off again is a shift as well.
    backward = _shifted(backward, gammas * in_graph - round(math.log2(grad_scale)), layout)
    names = [one.name for one in tensors]
    places = {name: place for place, name in reversed(list(enumerate(names)))}
    kept = sorted(places.values())
    if len(kept) < len(names):
        forward, backward = (_merged(rows, names, kept, layout) for rows in (forward, backward))
    return ScaleSnapshot(
        step=step,
        names=tuple(names[place] for place in kept),
        forward=forward,
        backward=backward,
        layout=layout,
        modules=tuple(tensors[place].module for place in kept),
        log2_sigma=sigmas[kept],
        log2_gamma=gammas[kept],
        counted_as_stored=True,
        inputs=tuple(tensors[place].inputs for place in kept),
    )


def _shifted(rows: FloatArray, exponents: npt.NDArray[np.int64], layout: RowLayout) -> FloatArray:
    if not exponents.any():
        return rows
    shifted = shift_rows(torch.from_numpy(rows), torch.from_numpy(exponents), layout)
    result: FloatArray = shifted.numpy()
    return result


def _merged(
    rows: FloatArray, names: Sequence[str], kept: Sequence[int], layout: RowLayout
) -> FloatArray:
    """One row a name, where each name first was."""
    merged = {names[place]: torch.from_numpy(rows[place]) for place in kept}
    first = set(kept)
    for place, name in enumerate(names):
        if place not in first:
            merged[name] = merge_rows(merged[name], torch.from_numpy(rows[place]), layout)
    result: FloatArray = torch.stack(list(merged.values())).numpy()
    return result
