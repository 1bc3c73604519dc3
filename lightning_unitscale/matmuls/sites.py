"""Which matmul is which: by module, operation and occurrence, the same in every step."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from lightning_unitscale.capture.copy_graphs import LINES, names_of_line
from lightning_unitscale.capture.name_patterns import own_path
from lightning_unitscale.matmuls.autograd_nodes import identity_of
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.torch_internals import (
    CHECKPOINT,
    ENGINE,
    FUNCTION_CALL,
    MODULE_CALLS,
    RECOMPUTATIONS,
    UNPACK,
    checkpoint_of,
    checkpoint_under_way,
    checkpointed_body,
    graph_task,
)
from lightning_unitscale.matmuls.units import Units


def frames() -> Iterator[FrameType]:
    """The frames of this thread from the caller on, within the node that the engine runs, if any.

    An accelerator's backward pass has a thread of its own, without frames.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ENGINE:
        yield frame
        frame = frame.f_back


def function_arguments() -> Iterator[Tensor]:
    """The tensors that the autograd functions were given that run what called, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (code := frame.f_code) is not ENGINE:
        if code is FUNCTION_CALL:
            yield from (arg for arg in frame.f_locals["args"] if isinstance(arg, Tensor))
        frame = frame.f_back


def recomputed_checkpoint() -> Any:
    """The checkpoint whose body is computed again by what called, ``None`` without one."""
    return next(filter(None, map(checkpoint_of, frames())), None)


class Run(NamedTuple):
    """Where a forward matmul runs."""

    path: str  # of its module
    # What occurrences are counted within: a step, or one run of a checkpoint's body.
    episode: object
    checkpoint: object = None  # whose body is computed again, if one is
    result: str = ""  # name of the tensor that it makes, where a captured graph has one for it


# Where a loop computes what no module does, after the module has returned; no module can be there.
LOSS = Run("(loss)", "(loss)")


def _occurrence(result: str, path: str, word: str) -> int | None:
    """Return how many matmuls of a word run before the one whose result has this name."""
    # A part of a cut graph does not begin with the first. ``None`` if the name does not tell.
    name = result.removeprefix(f"{path}." if path else "")
    if name == word:
        return 0
    base, _, number = name.rpartition("_")
    return int(number) if base == word and number.isdecimal() else None


class Sites:
    """The matmuls of a module's steps."""

    # A matmul's module is the innermost one whose call is on the Python stack. No hook is needed
    # for that: nothing of the user's is changed, and nothing is there to be copied, pickled or
    # traced.

    def __init__(self, module: nn.Module, boundary: CodeType, units: Units) -> None:
        # Weak: an autograd graph keeps its session, and must not keep the module.
        self._module = weakref.ref(module)
        self._boundary = boundary
        self._units = units
        self._paths: dict[int, str] = {}
        # What ran a checkpoint, by the checkpoint's body, which alone is there when it runs again.
        self._paths_of_bodies: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        # How many matmuls of a kind had run in the step before a checkpoint's body ran some.
        self._starts: WeakKeyDictionary[Any, dict[tuple[str, str], int]] = WeakKeyDictionary()
        # The matmuls of one kind in one module, in the order in which a step runs them.
        self._places: defaultdict[tuple[str, str], list[Site]] = defaultdict(list)
        self._counts: dict[tuple[tuple[str, str], object], int] = {}
        self._is_fresh = False
        self.episode = 0  # counts the calls; see :class:`Run`

    def begin(self) -> None:
        """A call begins: occurrences are counted from the first again."""
        self.episode += 1
        self._is_fresh = False
        self._counts = {key: count for key, count in self._counts.items() if key[1] is LOSS.episode}

    def end(self) -> None:
        """A step has ended, of as many calls as there were before its loss."""
        self._counts.clear()

    def find(self, word: str, roles: tuple[str, ...], run: Run) -> Site:
        """The site of the matmul that is about to run."""
        key = run.path, word
        index = _occurrence(run.result, *key) if run.result else None
        if index is None:
            count = key, run.episode
            index = self._counts.get(count)
            if index is None:
                index = self._index(key, run)
            self._counts[count] = index + 1
            if (checkpoint := checkpoint_under_way()) is not None:
                self._starts.setdefault(checkpoint, {}).setdefault(key, index)
        sites = self._places[key]
        # Those before it may run on another rank.
        while len(sites) <= index:
            number = len(sites)
            base = f"{run.path}.{word}" if run.path else word
            site = Site(base if number == 0 else f"{base}_{number}", run.path, roles, word, number)
            sites.append(site)
            self._units.add_site(site)
        return sites[index]

    def peek(self, word: str, run: Run) -> Site | None:
        """The site that :meth:`find` would give, if it has been seen before; nothing is counted."""
        sites = self._places.get((run.path, word), [])
        index = self._index((run.path, word), run)
        return sites[index] if index < len(sites) else None

    def ahead(self, word: str, roles: tuple[str, ...], run: Run, count: int) -> Site:
        """The site that :meth:`find` would give after so many more calls; nothing is counted."""
        index = self._index((run.path, word), run)
        return self.numbered(word, roles, run.path, index + count)

    def _index(self, key: tuple[str, str], run: Run) -> int:
        index = self._counts.get((key, run.episode))
        if index is not None:
            return index
        # What had run before the body was counted then.
        return self._starts.get(run.checkpoint, {}).get(key, 0) if run.checkpoint else 0

    def derive(self, site: Site, slot: str, roles: tuple[str, ...]) -> Site:
        """The matmul that a backward matmul is for the backward pass of the backward pass."""
        derived = self._units.sites.get(f"{site.name}:{slot}")
        if derived is None:
            derived = Site(f"{site.name}:{slot}", site.module, roles)
            self._units.add_site(derived)
        return derived

    def has_run(self, checkpoint: object) -> bool:
        """Whether matmuls of the body of a checkpoint are of these."""
        return checkpoint in self._starts

    def owns_caller(self) -> bool:
        """Whether a module of these runs what was called, within the node that the engine runs."""
        return any(self._path_in(frame) is not None for frame in frames())

    def is_in_other_model(self) -> bool:
        """Whether a model runs what called that is neither within the root nor around it."""
        for frame in frames():
            if id(frame.f_code) in MODULE_CALLS and self._path_in(frame) is None:
                caller = frame.f_locals["self"]
                root = self._module()
                has_root = any(child is root for child in caller.modules())
                # A loss without parameters is the loop's own.
                if not has_root and next(caller.parameters(), None) is not None:
                    return True
        return False

    def run_of(self, node: Any, frame: FrameType | None = None) -> Run | None:
        """Where the forward matmul runs that calls, within an autograd node or ``None``."""
        frame = sys._getframe(1) if frame is None else frame
        if node is None:
            return self.forward_run(frame)
        # It is a matmul that a checkpoint's body computes again, for the node that asked for it;
        # otherwise it is one of the backward pass, and there is no such place.
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
        """Where the matmul of a forward pass runs."""
        bodies: list[Any] = []
        path: str | None = None
        result = ""
        # As in frames(), without a generator: every matmul asks.
        frame = sys._getframe(1) if frame is None else frame
        while frame is not None and path is None:
            code = frame.f_code
            if id(code) in MODULE_CALLS:
                module = id(frame.f_locals["self"])
                path = self._paths.get(module) or self.path_of(module)
            elif id(code) in LINES and (names := names_of_line(frame)) is not None:
                path, result = names
            elif code is self._boundary:
                path = ""
            elif code is CHECKPOINT:
                bodies.append(checkpointed_body(frame))
            elif code is ENGINE:
                break
            frame = frame.f_back
        for body in bodies:
            # Not for a callable without a hash or weak references.
            with contextlib.suppress(TypeError):
                self._paths_of_bodies[body] = path or ""
        return Run(path or "", self.episode, None, result)

    @property
    def module(self) -> nn.Module | None:
        """The root, while somebody has it."""
        return self._module()

    def _path_in(self, frame: FrameType) -> str | None:
        if id(frame.f_code) in MODULE_CALLS:
            return self.path_of(id(frame.f_locals["self"]))
        names = names_of_line(frame)
        return None if names is None else names[0]

    def path_of(self, module: int) -> str | None:
        """Path of the module with an ``id``; a wrapped one has that of the user's own."""
        path = self._paths.get(module)
        if path is None and not self._is_fresh:
            # Modules may come while a model runs; looked for once a step at most.
            root = self._module()
            children = () if root is None else root.named_modules()
            self._paths = {id(child): own_path(name) for name, child in children}
            self._is_fresh = True
            path = self._paths.get(module)
        return path
