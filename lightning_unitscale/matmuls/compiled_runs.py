"""Describe the matmuls of a compiled graph, and track its runs: their session and their callers.

A graph outlives the step in which it was compiled. Dynamo reuses it for other modules of the
class, for other blocks of a model and in later fits. So each run looks up the names of its
matmuls, as eager mode does. A backward pass finds its forward run by its autograd node.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from lightning_unitscale.capture.operators import RULE_OF, MatmulRule, Sources
from lightning_unitscale.functional.scale import LARGEST_LOG2
from lightning_unitscale.matmuls.autograd_nodes import NodeKey, keys_of
from lightning_unitscale.matmuls.calls import node_key, slot_of
from lightning_unitscale.matmuls.compiler_internals import codes, pass_by_overrides
from lightning_unitscale.matmuls.measurement import FORWARD, Site
from lightning_unitscale.matmuls.owners import running_session
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.matmuls.sites import Key, frames
from lightning_unitscale.matmuls.torch_internals import MODULE_CALL, OPERATOR_CALL, current_node

# Runs have numbers. A graph has fewer matmuls than the distance between two runs' numbers.
MAX_MATMULS = 2**16
_NUMBERS = itertools.count(MAX_MATMULS, MAX_MATMULS)
_MAX_RUNS = 2**12  # limits the runs of a graph that wait for a backward pass
# Our compiled graphs by the address of their runner, and the addresses of their code. Every
# matmul of such a graph searches the addresses, so they are a set.
_OURS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_CODE: set[int] = set()
# A description of a matmul, of which JSON keeps all, since Inductor caches it with the code.
Row = Mapping[str, Any]
# Callers whose matmuls are not scaled again, since our graphs contain their factors.
OWN_CALLERS = ("ours", "compiler")


class MatmulNames(NamedTuple):
    """The names of a matmul and its module at compile time."""

    word: str  # name of the matmul
    roles: tuple[str, ...]  # names of its operands
    path: str  # of its module


@dataclass(eq=False)
class GraphMatmul:
    """A matmul of a compiled graph, forward or backward."""

    rule: MatmulRule
    matmul_names: MatmulNames  # of the forward matmul that it belongs to
    number: int  # in its graph
    forward: int  # number of that forward matmul; its own if it is a forward matmul
    sources: Sources  # which forward operand each operand is; ``None``: the output gradient
    flops: int  # for the shapes at compile time

    @property
    def is_backward(self) -> bool:
        """Return whether it belongs to a forward matmul of the graph."""
        return self.forward != self.number


@dataclass(eq=False)
class CompiledMatmul(GraphMatmul):
    """A scaled matmul of a graph."""

    dtype: torch.dtype  # of its operands
    start: int = 0  # index of its first factor among those of the graph
    part: int = 0  # which part of the factors contains its own
    offset: int = 0  # index of its first factor in this part
    is_scaled: bool = False  # already in the joint graph
    # The matmuls of its site in this graph, itself included.
    kin: list[CompiledMatmul] = field(default_factory=list)

    @property
    def slot(self) -> str:
        """Return ``"forward"``, or the name of its backward matmul."""
        return slot_of(self.sources) if self.is_backward else FORWARD

    @property
    def num_factors(self) -> int:
        """Return the number of its factors: its rule's, and one to undo a gradient's unit."""
        return self.rule.num_factors + (None in self.sources)

    @property
    def names(self) -> tuple[tuple[int, int | None], ...]:
        """Return the names that distinguish its operands' units within its graph."""
        return tuple((self.forward, source) for source in self.sources)

    def stays(self, operand: int) -> bool:
        """Check whether an operand stays unscaled."""
        # The temperature of an attention is a constant in the graph and cannot absorb a unit.
        return self.rule.temperature is not None and self.rule.temperature[operand] != 0

    def known(self, site: Site) -> tuple[int | None, ...]:
        """Return the exponents of its operands' units; ``None`` until they are measured."""
        return tuple(site.log2_gamma if k is None else site.log2_units[k] for k in self.sources)

    def why_plain(self, site: Site) -> str:
        """Return why it runs unscaled with the units in force; empty if it runs scaled."""
        # Matmuls of a site share scaled copies, so all of them run scaled or none does.
        reasons = list(site.plain.values())
        if any(
            abs(exponent) > LARGEST_LOG2 for kin in self.kin for exponent in kin._exponents(site)
        ):
            reasons.append(f"a factor beyond 2**{LARGEST_LOG2} or its inverse, in a compiled graph")
        return reasons[0] if reasons else ""

    def exponents(self, site: Site) -> list[int]:
        """Return the exponents of its factors."""
        return [0] * self.num_factors if self.why_plain(site) else self._exponents(site)

    def _exponents(self, site: Site) -> list[int]:
        known = enumerate(self.known(site))
        units = tuple(0 if self.stays(index) else unit or 0 for index, unit in known)
        back = [units[index] for index, source in enumerate(self.sources) if source is None]
        return [*self.rule.exponents(units), *back]


def block_of(path: str) -> str:
    """Return the innermost module of a list or sequence that contains the module of this path."""
    names = path.split(".")
    while names and not names[-1].isdecimal():
        names.pop()
    return ".".join(names)


@dataclass(frozen=True)
class PlainMatmul:
    """An unscaled matmul of a compiled graph."""

    operator: str  # its name
    module: str  # path of its module
    reason: str  # why it is unscaled
    flops: int


@dataclass(frozen=True)
class LookedAt:
    """A matmul that is measured together with others."""

    index: int  # in its graph
    # For each operand and addend: its index among the measured tensors, and whether that tensor
    # is scaled.
    reads: tuple[tuple[int, bool], ...]


def row_of(matmul: CompiledMatmul | PlainMatmul) -> Row:
    """Return the description of a matmul."""
    if isinstance(matmul, PlainMatmul):
        return vars(matmul)
    rule = matmul.rule
    return {
        "rule": rule.operator,
        # Operands that the call does not read; see MatmulRule.reading.
        "mask": RULE_OF[rule.operator].mask_of(rule),
        "adds": bool(rule.addends),
        "names": matmul.matmul_names,
        "forward": matmul.forward,
        "sources": matmul.sources,
        "flops": matmul.flops,
        "dtype": str(matmul.dtype).removeprefix("torch."),
    }


def matmul_of(row: Row, number: int) -> CompiledMatmul | PlainMatmul:
    """Return the matmul with a number in its graph and this description."""
    if "rule" not in row:
        return PlainMatmul(**row)
    rule: MatmulRule = RULE_OF[row["rule"]]
    args: Any = {rule.mask: row["mask"]}
    word, roles, path = row["names"]
    return CompiledMatmul(
        rule.reading(args, {} if row["adds"] else {"beta": 0}),
        MatmulNames(word, tuple(roles), path),
        number,
        row["forward"],
        tuple(row["sources"]),
        row["flops"],
        getattr(torch, row["dtype"]),
    )


@dataclass(eq=False, slots=True)
class GraphRun:
    """One run of a graph."""

    number: int  # a multiple of ``MAX_MATMULS``
    session: weakref.ref[MatmulSession]
    sites: dict[int, Site]  # by the number of the forward matmul in the graph
    exponents: list[int] = field(default_factory=list)  # of its factors
    are_all_known: bool = False  # their units were measured before


class GraphRuns:
    """The runs of a compiled graph, its callers and the names of its matmuls."""

    def __init__(self, root: str) -> None:
        self._matmul_names: dict[int, MatmulNames] = {}
        self._root = root
        # The keys of its matmuls and the names of their operands, below each module that calls it.
        self._named: dict[str, list[tuple[Key, tuple[str, ...]]]] = {}
        self._of_node: dict[NodeKey, GraphRun] = {}

    def add_names(self, matmul: GraphMatmul) -> None:
        """Record the names of a forward matmul."""
        if not matmul.is_backward:
            self._matmul_names[matmul.number] = matmul.matmul_names
            self._named.clear()

    def begin_run(self) -> GraphRun | None:
        """Begin a run of the forward graph; return ``None`` if it belongs to no session."""
        # If a memory budget saves only the inputs, the backward graph repeats the whole forward
        # graph. That is the same run.
        session, node = running_session(), current_node()
        where = None if session is None else session.sites.run_of(node)
        if where is None and node is not None:
            return self.of_node(node)
        if session is None or where is None or not session.is_open:
            return None
        found = session.sites.find_all(self._named_below(where.path), where)
        sites = dict(zip(self._matmul_names, found, strict=True))
        run = GraphRun(next(_NUMBERS), session.ref, sites)
        if (key := node_key(())) is not None:
            if len(self._of_node) >= _MAX_RUNS:
                del self._of_node[next(iter(self._of_node))]
            self._of_node[key] = run
        return run

    def sites_ahead(self, numbers: Container[int]) -> tuple[MatmulSession, dict[int, Site]] | None:
        """Return the session of a run that would begin now, and its sites, without counting."""
        session, node = running_session(), current_node()
        where = None if session is None else session.sites.run_of(node)
        if session is None or where is None or where.result or not session.is_open:
            return None
        sites, met = {}, Counter[Key]()
        named = self._named_below(where.path)
        for number, (key, roles) in zip(self._matmul_names, named, strict=True):
            if number in numbers:
                path, word = key
                run = where._replace(path=path)
                sites[number] = session.sites.ahead(word, roles, run, met[key])
            met[key] += 1
        return session, sites

    def _named_below(self, path: str) -> list[tuple[Key, tuple[str, ...]]]:
        """Return the keys of the matmuls, and the names of their operands, where a module calls."""
        if (named := self._named.get(path)) is None:
            named = self._named[path] = [
                ((_moved(names.path, self._root, path), names.word), names.roles)
                for names in self._matmul_names.values()
            ]
        return named

    def of_node(self, node: Any) -> GraphRun | None:
        """Return the run of the forward graph that an autograd node belongs to."""
        known = (self._of_node[key] for key in keys_of(node) if key in self._of_node)
        return next(known, None)


def _moved(path: str, root: str, new_root: str) -> str:
    """Return a path below ``root`` as the same path below ``new_root``."""
    if path != root and not path.startswith(f"{root}." if root else ""):
        return path
    rest = path[len(root) :].lstrip(".")
    return ".".join(filter(None, (new_root, rest)))


def is_ours(frame: FrameType | None) -> bool:
    """Check whether a kernel's caller is the code of one of our graphs."""
    if not _CODE:
        return False
    if frame is not None and frame.f_code is OPERATOR_CALL:
        frame = frame.f_back
    return frame is not None and id(frame.f_code) in _CODE


def caller() -> str | None:
    """Return which part of Inductor calls: ``"ours"``, ``"another"`` graph, or ``"compiler"``."""
    found = codes()
    frame = None if found is None else _calling_frames(found)[0]
    if found is None or frame is None:
        return None
    if frame.f_code is found[1]:
        return "compiler"
    return "ours" if id(frame.f_locals["self"]) in _OURS else "another"


def note_caller() -> None:
    """Register the compiled graph that calls one of our operators as one of ours."""
    # Inductor's caches give the code of one graph to others, so look at both in each run.
    found = codes()
    frame, calling = (None, None) if found is None else _calling_frames(found[:1])
    if frame is None:
        return
    graph = frame.f_locals["self"]
    _OURS[id(graph)] = graph
    if calling is not None and id(code := calling.f_code) not in _CODE:
        _CODE.add(id(code))
        weakref.finalize(code, _CODE.discard, id(code)).atexit = False
        pass_by_overrides(calling.f_globals)


def _calling_frames(codes: tuple[CodeType, ...]) -> tuple[FrameType | None, FrameType | None]:
    """Return the innermost frame with one of these codes, and the one in it that calls operators.

    Both are ``None`` if a module call is nearer.
    """
    calling = None
    for frame in frames():
        if frame.f_code in codes:
            return frame, calling
        if frame.f_code is MODULE_CALL:
            break
        if frame.f_code is OPERATOR_CALL:
            # In the first run torch checks what operators do, and calls them twice.
            calling = frame.f_back
    return None, None
