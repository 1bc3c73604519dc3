"""Runs of a compiled graph: whose step each belongs to, and which matmuls of that step it holds.

A graph outlives the step that it was compiled in: Dynamo gives it to other modules of the class, to
other blocks of one model, and to later fits. So the names of its matmuls are looked up whenever it
runs, as they are in eager mode. A backward pass finds the run of its forward pass by the autograd
node that runs it.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

from lightning_unitscale.dispatch.calls import node_key
from lightning_unitscale.dispatch.measurement import Site
from lightning_unitscale.dispatch.nodes import NodeKey, keys_of
from lightning_unitscale.dispatch.owners import running_session
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.torch_internals import current_node

# A run is known by a number. A graph has fewer matmuls than there is room for between two runs.
MAX_PRODUCTS = 2**16
_NUMBERS = itertools.count(MAX_PRODUCTS, MAX_PRODUCTS)
# Runs of one graph whose backward pass may still come.
_MAX_RUNS = 2**12


@dataclass(frozen=True)
class Place:
    """Where a matmul of a compiled graph was when it was compiled.

    Attributes:
        word: What it is called.
        roles: What its operands are called.
        path: Path of its module.
    """

    word: str
    roles: tuple[str, ...]
    path: str


@dataclass(eq=False, slots=True)
class GraphRun:
    """One run of a graph.

    Attributes:
        number: Which one, a multiple of ``MAX_PRODUCTS``.
        session: Whose it is.
        sites: The site of each matmul that has a place, by its index in the graph.
        exponents: Of the factors that it has taken, where the graph has some.
    """

    number: int
    session: weakref.ref[ProductSession]
    sites: dict[int, Site]
    exponents: list[int] = field(default_factory=list)


class GraphRuns:
    """The runs of one compiled graph.

    Attributes:
        places: Of its forward matmuls, by their index in the graph.
    """

    def __init__(self, root: str) -> None:
        self.places: dict[int, Place] = {}
        self._root = root
        self._of_node: dict[NodeKey, GraphRun] = {}

    def begin(self) -> GraphRun | None:
        """Begin a run of the forward graph; ``None`` where no session has its matmuls.

        Where a memory budget saves the inputs alone, the backward graph runs all of the forward
        graph again: that is the same run.
        """
        session, node = running_session(), current_node()
        where = None if session is None else session.sites.run_of(node)
        if where is None and node is not None:
            return self.of_node(node)
        if session is None or where is None or not session.is_open:
            return None
        sites = {}
        for index, place in self.places.items():
            path = _moved(place.path, self._root, where.path)
            sites[index] = session.sites.find(place.word, place.roles, where._replace(path=path))
        run = GraphRun(next(_NUMBERS), session.ref, sites)
        if (key := node_key(())) is not None:
            if len(self._of_node) >= _MAX_RUNS:
                del self._of_node[next(iter(self._of_node))]
            self._of_node[key] = run
        return run

    def of_node(self, node: Any) -> GraphRun | None:
        """The run of the forward graph that an autograd node belongs to."""
        known = (self._of_node[key] for key in keys_of(node) if key in self._of_node)
        return next(known, None)


def _moved(path: str, root: str, new_root: str) -> str:
    """The path below one module, below another one."""
    if path != root and not path.startswith(f"{root}." if root else ""):
        return path
    rest = path[len(root) :].lstrip(".")
    return ".".join(filter(None, (new_root, rest)))
