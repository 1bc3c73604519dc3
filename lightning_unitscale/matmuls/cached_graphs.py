"""Identify graphs for Inductor's caches of compiled code.

A graph from a cache skips our passes. So its key must contain all that the passes read besides the
graph's code: the modules of its nodes, which give the matmuls their names, and the numbers that
matmuls got in the joint graph.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from torch import fx

from lightning_unitscale.compiling import compiles_frame
from lightning_unitscale.matmuls.compiler_internals import note_compiled, number_of_key
from lightning_unitscale.matmuls.joint_graphs import MATMUL, path_of
from lightning_unitscale.matmuls.owners import running_session
from lightning_unitscale.matmuls.session import SESSION
from lightning_unitscale.matmuls.torch_internals import current_node

# Operators that read tables of this process.
_NAMES = ("begin", "fp8_numbers", "matmul")
_UNCACHED = frozenset(f"lightning_unitscale.{name}.default" for name in _NAMES)


@functools.cache
def _sources() -> str:
    """Return a digest of this package's code, since another version may rewrite differently."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def identity_of(graph: fx.Graph) -> str | None:
    """Return what our passes read besides a graph's code; ``None`` if it must not be cached."""
    rounding = running_session()
    if rounding is not None and rounding.numerics:
        return None
    if any(str(node.target) in _UNCACHED for node in graph.nodes):
        return None
    session = SESSION.get() if compiles_frame() else None
    notes = [node.meta.get(MATMUL) for node in graph.nodes]
    if session is None:
        return f"{_sources()} {notes}" if any(notes) else ""
    if (number := number_of_key()) is not None:
        note_compiled(number)
    run = session.sites.run_of(current_node())
    root = "" if run is None else run.path
    paths = [path_of(node, session.sites, root) for node in graph.nodes]
    digest = hashlib.sha256(repr((root, paths, notes)).encode()).hexdigest()
    return f"{_sources()} {digest}"
