"""From the rows of the calls of a step to one snapshot of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.row_reduction import merge_rows, shift_rows
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.transforms.probed_calls import ProbedCall


def snapshot_of(
    step: int, calls: Sequence[ProbedCall], table: Tensor, layout: RowLayout, grad_scale: float
) -> ScaleSnapshot:
    """The snapshot of a step.

    Args:
        step: The step.
        calls: What its graphs recorded, in the order of the calls.
        table: All forward rows of the calls and then all backward rows, on the host; it is written
            into.
        layout: The columns.
        grad_scale: Factor that the loss carried; gradients are divided by it.

    Returns:
        The snapshot; rows of a tensor that was recorded several times are merged.
    """
    forward, backward = table.split(len(table) // 2)
    first = 0
    for call in calls:
        own = slice(first, first := first + len(call.tensors))
        if call.shared is not None:
            call.shared.fill(forward[own], backward[own], layout)
    # A slot that no gradient reached holds zeros, and a real row has elements.
    backward = torch.where(backward[:, :1] > 0, backward, torch.nan)
    sigmas, gammas = (
        torch.tensor([unit for call in calls for unit in call.exponents(which)])
        for which in ("sigma", "gamma")
    )
    tensors = [one for call in calls for one in call.tensors]
    in_graph = torch.tensor([one.held.in_graph for one in tensors])
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
        forward=forward.double().numpy(),
        backward=backward.double().numpy(),
        layout=layout,
        modules=tuple(tensors[place].module for place in kept),
        log2_sigma=sigmas[kept].numpy(),
        log2_gamma=gammas[kept].numpy(),
        counted_as_stored=True,
        inputs=tuple(tensors[place].inputs for place in kept),
    )


def _shifted(rows: Tensor, exponents: Tensor, layout: RowLayout) -> Tensor:
    return shift_rows(rows, exponents, layout) if exponents.any() else rows


def _merged(rows: Tensor, names: Sequence[str], kept: Sequence[int], layout: RowLayout) -> Tensor:
    """One row a name, where each name first was."""
    merged = {names[place]: rows[place] for place in kept}
    first = set(kept)
    for place, name in enumerate(names):
        if place not in first:
            merged[name] = merge_rows(merged[name], rows[place], layout)
    return torch.stack(list(merged.values()))
