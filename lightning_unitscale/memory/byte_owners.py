"""Name what owns the bytes of a training step: weights, states, and the activations of modules."""

from __future__ import annotations

import re
from collections import Counter

from tabulate import tabulate

from lightning_unitscale.memory.graph_profile import GraphProfile
from lightning_unitscale.memory.profile_report import format_bytes

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def byte_owners(profile: GraphProfile, limit: int = 5) -> list[tuple[str, int]]:
    """Return the largest owners of the bytes of a step, the largest first.

    Modules whose paths differ in the numbers of their parents only, such as those of the blocks of
    a model, are one owner. The activations of a module are the bytes that autograd saves because of
    its own operations.
    """
    owners: Counter[str] = Counter(
        {
            "parameters": profile.parameter_bytes,
            "gradients": profile.gradient_bytes,
            "optimizer state": profile.optimizer_bytes,
            "buffers": profile.buffer_bytes,
            "batch": profile.input_bytes,
        }
    )
    for node in profile.nodes:
        path = _NUMBER.sub("*", node.module) or "the step itself"
        owners[f"activations of {path}"] += node.saved_bytes
    return [(owner, size) for owner, size in owners.most_common(limit) if size]


def owners_table(profile: GraphProfile, limit: int = 5) -> str:
    """Return the largest owners as text."""
    rows = [(owner, format_bytes(size)) for owner, size in byte_owners(profile, limit)]
    return tabulate(rows, tablefmt="plain", disable_numparse=True)
