"""Tell Inductor's caches what else than its code decides how a graph is rewritten.

A graph from a cache runs without any of our passes. So it must be one of which the passes would
make the same: the names of its matmuls and the units that they share depend on the modules that
call them, and a graph of one pass is rewritten by notes of the graph of both.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from torch import fx

from lightning_unitscale.compiling import compiles_frame
from lightning_unitscale.matmuls.compiler_internals import note_compiled, number_to_look_up
from lightning_unitscale.matmuls.joint_graphs import MATMUL, path_of
from lightning_unitscale.matmuls.owners import running_session
from lightning_unitscale.matmuls.session import SESSION
from lightning_unitscale.matmuls.torch_internals import current_node

# Operators that are called with the number of a graph in this process.
_NUMBERED = ("begin", "fp8_numbers", "matmul")
_UNCACHED = frozenset(f"lightning_unitscale.{name}.default" for name in _NUMBERED)


@functools.cache
def _sources() -> str:
    """Return a digest of this package, each version of which may rewrite graphs differently."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def identity_of(graph: fx.Graph) -> str | None:
    """Return what decides how our passes rewrite a graph; ``None`` for one not to be cached."""
    rounding = running_session()
    if rounding is not None and rounding.numerics:
        return None
    if any(str(node.target) in _UNCACHED for node in graph.nodes):
        return None
    session = SESSION.get() if compiles_frame() else None
    notes = [node.meta.get(MATMUL) for node in graph.nodes]
    if session is None:
        return f"{_sources()} {notes}" if any(notes) else ""
    if (number := number_to_look_up()) is not None:
        note_compiled(number)
    run = session.sites.run_of(current_node())
    root = "" if run is None else run.path
    paths = [path_of(node, session.sites, root) for node in graph.nodes]
    digest = hashlib.sha256(repr((root, paths, notes)).encode()).hexdigest()
    return f"{_sources()} {digest}"
