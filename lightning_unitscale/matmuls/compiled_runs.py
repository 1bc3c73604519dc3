"""Runs of a compiled graph: whose step each belongs to, which matmuls it holds, what calls them.

A graph outlives the step that it was compiled in: Dynamo gives it to other modules of the class, to
other blocks of one model, and to later fits. So the names of its matmuls are looked up whenever it
runs, as they are in eager mode. A backward pass finds the run of its forward pass by the autograd
node that runs it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lightning_unitscale.capture.operators import MatmulRule, Sources
from lightning_unitscale.matmuls.autograd_nodes import NodeKey, keys_of
from lightning_unitscale.matmuls.calls import node_key
from lightning_unitscale.matmuls.compiler_internals import codes, pass_by_overrides
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.owners import running_session
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.matmuls.sites import frames
from lightning_unitscale.matmuls.torch_internals import MODULE_CALL, OPERATOR_CALL, current_node

# A run is known by a number. A graph has fewer matmuls than there is room for between two runs.
MAX_MATMULS = 2**16
_NUMBERS = itertools.count(MAX_MATMULS, MAX_MATMULS)
# Runs of one graph whose backward pass may still come.
_MAX_RUNS = 2**12
# Compiled graphs that are ours, by the address of what runs them, and addresses of the code made
# for them: a set, which every matmul of such a graph looks into.
_OURS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_CODE: set[int] = set()
# Callers whose matmuls are not to be met again: a graph of ours has its units.
OWN_CALLERS = ("ours", "compiler")


class Place(NamedTuple):
    """Where a matmul of a compiled graph was when it was compiled."""

    word: str  # what it is called
    roles: tuple[str, ...]  # what its operands are called
    path: str  # of its module


@dataclass(eq=False)
class GraphMatmul:
    """A matmul of a compiled graph, forward or backward."""

    rule: MatmulRule
    place: Place  # of the forward matmul that it belongs to
    number: int  # in its graph
    forward: int  # number of that forward matmul; its own, if it has a site of its own
    sources: Sources  # which forward operand each operand is; ``None``: the arriving gradient
    flops: int  # of the shapes that it was compiled with

    @property
    def is_backward(self) -> bool:
        """Whether it belongs to a forward matmul of the graph."""
        return self.forward != self.number


@dataclass(eq=False, slots=True)
class GraphRun:
    """One run of a graph."""

    number: int  # which one, a multiple of ``MAX_MATMULS``
    session: weakref.ref[MatmulSession]
    sites: dict[int, Site]  # of each matmul that has one, by its number in the graph
    exponents: list[int] = field(default_factory=list)  # of the factors that it has taken


class GraphRuns:
    """A compiled graph: where its matmuls were, what calls it, and its runs."""

    def __init__(self, root: str) -> None:
        self.callers = Callers()
        self._places: dict[int, Place] = {}
        self._root = root
        self._of_node: dict[NodeKey, GraphRun] = {}

    def add_place(self, matmul: GraphMatmul) -> None:
        """Note where a matmul was, unless it belongs to a forward one."""
        if not matmul.is_backward:
            self._places[matmul.number] = matmul.place

    def begin_run(self) -> GraphRun | None:
        """Begin a run of the forward graph; ``None`` where no session has its matmuls."""
        # Where a memory budget saves the inputs alone, the backward graph runs all of the forward
        # graph again: that is the same run.
        session, node = running_session(), current_node()
        where = None if session is None else session.sites.run_of(node)
        if where is None and node is not None:
            return self.of_node(node)
        if session is None or where is None or not session.is_open:
            return None
        sites = {}
        for number, place in self._places.items():
            path = _moved(place.path, self._root, where.path)
            sites[number] = session.sites.find(place.word, place.roles, where._replace(path=path))
        run = GraphRun(next(_NUMBERS), session.ref, sites)
        if (key := node_key(())) is not None:
            if len(self._of_node) >= _MAX_RUNS:
                del self._of_node[next(iter(self._of_node))]
            self._of_node[key] = run
        return run

    def sites_ahead(self, numbers: Container[int]) -> tuple[MatmulSession, dict[int, Site]] | None:
        """Whose matmuls a run would have that begins now, and their sites; nothing is counted."""
        session, node = running_session(), current_node()
        where = None if session is None else session.sites.run_of(node)
        if session is None or where is None or where.result or not session.is_open:
            return None
        sites, met = {}, Counter[tuple[str, str]]()
        for number, place in self._places.items():
            run = where._replace(path=_moved(place.path, self._root, where.path))
            key = run.path, place.word
            if number in numbers:
                sites[number] = session.sites.ahead(place.word, place.roles, run, met[key])
            met[key] += 1
        return session, sites

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


def is_ours(frame: FrameType | None) -> bool:
    """Return whether code that was made for a graph of ours calls from a kernel's caller."""
    if frame is not None and frame.f_code is OPERATOR_CALL:
        frame = frame.f_back
    return frame is not None and id(frame.f_code) in _CODE


def caller() -> str | None:
    """Who of Inductor calls a kernel: ``"ours"``, ``"another"`` graph, or ``"compiler"``."""
    found = codes()
    frame = None if found is None else _calling_frame(found)
    if found is None or frame is None:
        return None
    if frame.f_code is found[1]:
        return "compiler"
    return "ours" if id(frame.f_locals["self"]) in _OURS else "another"


class Callers:
    """What calls the operators of a compiled step, its forward and its backward graph."""

    def __init__(self) -> None:
        self._are_known = [False, False]

    def note(self, *, is_backward: bool) -> None:
        """Let the graph that calls be one of ours."""
        if not self._are_known[is_backward]:
            # Another thread may run the graph meanwhile: it is to be known before it is said to be.
            _mark_caller()
            self._are_known[is_backward] = True


def _mark_caller() -> None:
    found = codes()
    calling = None if found is None else _calling_frame(found[:1])
    if calling is None:
        return
    graph = calling.f_locals["self"]
    _OURS[id(graph)] = graph
    within = itertools.takewhile(lambda frame: frame is not calling, frames())
    # In the first run torch watches what operators do, and calls them twice.
    for frame in [frame for frame in within if frame.f_code is OPERATOR_CALL][-1:]:
        assert frame.f_back is not None
        code = frame.f_back.f_code
        _CODE.add(id(code))
        weakref.finalize(code, _CODE.discard, id(code)).atexit = False
        pass_by_overrides(frame.f_back.f_globals)


def _calling_frame(codes: tuple[CodeType, ...]) -> FrameType | None:
    """The innermost frame that runs one of these codes, unless a module is called before it."""
    for frame in frames():
        if frame.f_code in codes or frame.f_code is MODULE_CALL:
            return None if frame.f_code is MODULE_CALL else frame
    return None
