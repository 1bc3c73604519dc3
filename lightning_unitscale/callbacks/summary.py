"""A snapshot as a few numbers for any logger."""

from __future__ import annotations

import numpy as np

from lightning_unitscale.snapshot import Direction, ScaleSnapshot

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# Places in the last dimension of ``ScaleSnapshot.fractions``.
_KINDS = {"overflow": 0, "underflow": 2}


def summary_scalars(snapshot: ScaleSnapshot) -> dict[str, float]:
    """The worst share over all tensors of stored elements that leave each format's range.

    Returns:
        ``scales/FP16/overflow_forward`` and so on; formats without any measured tensor left out.
    """
    scalars = {}
    for direction in _DIRECTIONS:
        fractions = snapshot.fractions(direction, stored=True)
        for place, item in enumerate(snapshot.layout.formats):
            for kind, kind_place in _KINDS.items():
                column = fractions[:, place, kind_place]
                column = column[~np.isnan(column)]
                if column.size:
                    scalars[f"scales/{item.name}/{kind}_{direction}"] = float(column.max())
    return scalars
