"""Name the matmuls of a step by module, operation and occurrence, the same in every step."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lightning_unitscale.capture.copy_graphs import LINES, names_of_line
from lightning_unitscale.capture.graph_variants import Variant
from lightning_unitscale.capture.name_patterns import own_path
from lightning_unitscale.matmuls.autograd_nodes import identity_of
from lightning_unitscale.matmuls.gauge import UNSCALED
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.torch_internals import (
    CHECKPOINT,
    ENGINE,
    FUNCTION_NAME,
    MODULE_CALLS,
    RECOMPUTATIONS,
    UNPACK,
    checkpoint_of,
    checkpoint_under_way,
    checkpointed_body,
    function_call,
    graph_task,
)
from lightning_unitscale.matmuls.units import Units

_RUN_GRAPH = Variant.__call__.__code__


def frames() -> Iterator[FrameType]:
    """Yield the frames from the caller outwards, up to the engine that runs the current node."""
    # An accelerator's backward pass runs on its own thread, which has no such frames.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ENGINE:
        yield frame
        frame = frame.f_back


def runs_in_graph() -> bool:
    """Check whether the code of a captured graph is on the stack."""
    # AOTAutograd's graphs have no known lines.
    return any(id(frame.f_code) in LINES or frame.f_code is _RUN_GRAPH for frame in frames())


def function_arguments() -> Iterator[Tensor]:
    """Yield the tensor arguments of the autograd functions on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ENGINE:
        if frame.f_code.co_name == FUNCTION_NAME:
            yield from (arg for arg in function_call(frame) or () if isinstance(arg, Tensor))
        frame = frame.f_back


Key = tuple[str, str]  # the path of a matmul's module, and the matmul's name


class Run(NamedTuple):
    """The place of a running forward matmul."""

    path: str  # of its module
    episode: object  # the scope for counting occurrences: a step, or one run of a checkpoint's body
    checkpoint: object = None  # the recomputed checkpoint, if there is one
    result: str = ""  # name of its result, in a captured graph that has one


# The place of a loss that the loop computes after the module's call. No module has this path.
LOSS = Run("(loss)", "(loss)")


def _occurrence(result: str, path: str, word: str) -> int | None:
    """Return the index that a result's name gives a matmul, or ``None`` if it gives none."""
    # A part of a split graph may begin with a later matmul.
    name = result.removeprefix(f"{path}." if path else "").removesuffix(UNSCALED)
    if name == word:
        return 0
    base, _, number = name.rpartition("_")
    return int(number) if base == word and number.isdecimal() else None


@dataclass(eq=False, slots=True)
class Kind:
    """The matmuls of one kind in one module, in the order in which a step runs them."""

    sites: list[Site] = field(default_factory=list)
    # The number of the latest call, how far its matmuls were counted, and the names of the results
    # that captured graphs gave to others of its matmuls, by index.
    episode: int = -1
    count: int = 0
    named: dict[int, str] = field(default_factory=dict)

    def next_index(self, episode: int) -> int:
        """Return the index of the next one to run in a call."""
        if self.episode != episode:
            self.episode, self.count = episode, 0
            self.named.clear()
        index = self.count
        while index in self.named:
            index += 1
        return index

    def index_of(self, result: str, number: int, episode: int | None) -> int:
        """Return the index of the one with a result, whose name has a number."""
        # Without an ``episode``, it runs once more for the latest call.
        following = number if episode is None else self.next_index(episode)
        if (known := self.named.get(number)) == result:
            return number
        # Another graph of the call, or code between two graphs, may have run one of this number.
        if known is None and number >= self.count:
            return number
        return next((index for index, each in self.named.items() if each == result), following)


class Sites:
    """The matmuls of a module's steps."""

    # A matmul's module is the innermost one whose call is on the Python stack. That needs no hooks,
    # which would change the module and would be copied, pickled and traced with it.

    def __init__(self, module: nn.Module, boundary: CodeType, units: Units) -> None:
        # Weak, because an autograd graph keeps its session alive and must not keep the module.
        self._module = weakref.ref(module)
        self.boundary = boundary  # the module's method, whose calls are the outermost
        self._units = units
        self.paths: dict[int, str] = {}  # by the identity of a module, as of the last search
        # The module of a checkpoint, by its body. A recomputation has only the body on the stack.
        self._paths_of_bodies: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        # For each checkpoint that ran matmuls of this session, how many of a kind ran before it.
        self.starts: WeakKeyDictionary[Any, dict[Key, int]] = WeakKeyDictionary()
        self.kinds: defaultdict[Key, Kind] = defaultdict(Kind)  # by path and word
        # The same by the identity of the module and the instruction of its code (``steady.py``).
        self.called: dict[tuple[int, int], Kind] = {}
        # The numbers of matmuls in the other episodes than calls.
        self._counts: dict[tuple[Key, object], int] = {}
        self._is_fresh = False
        self.episode = 0  # counts the calls; see :class:`Run`

    def begin(self) -> None:
        """Begin a call, and restart the count of occurrences."""
        self.episode += 1
        self._is_fresh = False
        self._counts = {key: count for key, count in self._counts.items() if key[1] is LOSS.episode}

    def end(self) -> None:
        """End a step, which may have had several calls before its loss."""
        self.episode += 1
        self._counts.clear()

    def find(self, word: str, roles: tuple[str, ...], run: Run) -> Site:
        """Return the site of the matmul that is about to run."""
        key = run.path, word
        index, is_named = self._index(key, run)
        if run.episode == self.episode:
            kind = self.kinds[key]
            if is_named:
                kind.named[index] = run.result
            else:
                kind.count = index + 1
        elif not is_named:
            self._counts[key, run.episode] = index + 1
        if not is_named and (checkpoint := checkpoint_under_way()) is not None:
            self.starts.setdefault(checkpoint, {}).setdefault(key, index)
        return self._site(key, roles, index)

    def find_all(self, matmuls: Sequence[tuple[Key, tuple[str, ...]]], run: Run) -> list[Site]:
        """Return the sites of matmuls below a module that are about to run, in their order."""
        episode = self.episode
        if run.result or run.episode != episode or checkpoint_under_way() is not None:
            return [
                self.find(word, roles, run._replace(path=path)) for (path, word), roles in matmuls
            ]
        found = []
        for key, roles in matmuls:
            kind = self.kinds[key]
            index = kind.next_index(episode)
            kind.count = index + 1
            sites = kind.sites
            found.append(sites[index] if index < len(sites) else self._site(key, roles, index))
        return found

    def _site(self, key: Key, roles: tuple[str, ...], index: int) -> Site:
        sites = self.kinds[key].sites
        path, word = key
        # Earlier ones may run on another rank.
        while len(sites) <= index:
            number = len(sites)
            base = f"{path}.{word}" if path else word
            site = Site(base if number == 0 else f"{base}_{number}", path, roles, word, number)
            sites.append(site)
            self._units.add_site(site)
        return sites[index]

    def peek(self, word: str, run: Run) -> Site | None:
        """Return the site that :meth:`find` would return, if it exists, without counting."""
        index, _ = self._index((run.path, word), run)
        sites = self.kinds[run.path, word].sites
        return sites[index] if index < len(sites) else None

    def ahead(self, word: str, roles: tuple[str, ...], run: Run, count: int) -> Site:
        """Return the site that :meth:`find` would return after more calls, without counting."""
        key = run.path, word
        return self._site(key, roles, self._index(key, run)[0] + count)

    def _index(self, key: Key, run: Run) -> tuple[int, bool]:
        """Return the index of the matmul, and whether the name of its result gives it."""
        number = _occurrence(run.result, *key) if run.result else None
        episode = self.episode if run.episode == self.episode else None
        if number is not None:
            return self.kinds[key].index_of(run.result, number, episode), True
        if episode is not None:
            return self.kinds[key].next_index(episode), False
        index = self._counts.get((key, run.episode))
        if index is None:
            # A checkpoint's body continues the count from its first run.
            index = self.starts.get(run.checkpoint, {}).get(key, 0) if run.checkpoint else 0
        return index, False

    def owns_caller(self) -> bool:
        """Check whether a module of this session is on the stack of the current node."""
        return any(self._path_in(frame) is not None for frame in frames())

    def run_of(self, node: Any, frame: FrameType | None = None) -> Run | None:
        """Return the place of the calling forward matmul, or ``None`` for a backward matmul."""
        frame = sys._getframe(1) if frame is None else frame
        if node is None:
            return self.forward_run(frame)
        # Within a node, a forward matmul comes from a recomputed checkpoint or from a module that
        # the node calls.
        path: str | None = None
        checkpoint = None
        at: FrameType | None = frame
        while at is not None and (code := at.f_code) is not ENGINE:
            if path is None and (id(code) in MODULE_CALLS or id(code) in LINES):
                path = self._path_in(at)
            elif path is None and id(code) in RECOMPUTATIONS:
                path = ""
                with contextlib.suppress(TypeError):
                    path = self._paths_of_bodies.get(checkpointed_body(at), "")
            elif checkpoint is None and code.co_name == UNPACK:
                checkpoint = checkpoint_of(at)
            at = at.f_back
        if checkpoint is not None:
            return Run(path or "", (self.episode, id(checkpoint), graph_task()), checkpoint)
        return None if path is None else Run(path, (self.episode, identity_of(node)))

    def forward_run(self, frame: FrameType | None = None) -> Run:
        """Return the place of the calling matmul in a forward pass."""
        bodies: list[Any] = []
        path: str | None = None
        result = ""
        # Every matmul calls this, so avoid the generator of frames().
        frame = sys._getframe(1) if frame is None else frame
        while frame is not None and path is None:
            code = frame.f_code
            if id(code) in MODULE_CALLS:
                module = id(frame.f_locals["self"])
                path = self.paths.get(module) or self.path_of(module)
            elif id(code) in LINES and (names := names_of_line(frame)) is not None:
                # A graph of a module without parameters may not know its path.
                path, result = names[0] or None, result or names[1]
            elif code is self.boundary:
                path = ""
            elif code is CHECKPOINT:
                bodies.append(checkpointed_body(frame))
            elif code is ENGINE:
                break
            frame = frame.f_back
        for body in bodies:
            # A callable may lack a hash or weak references.
            with contextlib.suppress(TypeError):
                self._paths_of_bodies[body] = path or ""
        return Run(path or "", self.episode, None, result)

    @property
    def module(self) -> nn.Module | None:
        """Return the root module, or ``None`` after it was freed."""
        return self._module()

    def _path_in(self, frame: FrameType) -> str | None:
        if id(frame.f_code) in MODULE_CALLS:
            return self.path_of(id(frame.f_locals["self"]))
        names = names_of_line(frame)
        return None if names is None else names[0]

    def path_of(self, module: int) -> str | None:
        """Return the path of the module with an ``id``, without the names of wrappers."""
        path = self.paths.get(module)
        if path is None and not self._is_fresh:
            # A model may add modules while it runs. Search for them once a step at most.
            root = self._module()
            children = () if root is None else root.named_modules()
            paths = {id(child): own_path(name) for name, child in children}
            if paths != self.paths:
                self.paths = paths
                self.called.clear()
            self._is_fresh = True
            path = self.paths.get(module)
        return path
