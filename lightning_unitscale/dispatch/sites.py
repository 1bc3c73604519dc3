"""Which product is which: by module, operation and occurrence, the same in every step."""

from __future__ import annotations

import contextlib
import sys
import weakref
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from lightning_unitscale.dispatch.torch_internals import (
    CHECKPOINT,
    ENGINE,
    MODULE_CALL,
    RECOMPUTATIONS,
    checkpoint_of,
    checkpoint_under_way,
    checkpointed_body,
    graph_task,
    sequence_number,
)

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.session import ProductSession

# Where a product runs beside the slots of its operands' gradients.
FORWARD = "forward"
# Under which torch.compile keeps the module that it was given.
_COMPILED = "_orig_mod"


def frame_at(depth: int) -> FrameType | None:
    """The frame that many calls above the caller of this function, if the stack is that deep."""
    try:
        return sys._getframe(depth + 1)
    except ValueError:
        return None


def running_module() -> nn.Module | None:
    """The innermost module whose call is on the Python stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            module: nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Site:
    """One product of a module's step, with the units of what it reads.

    Attributes:
        name: Such as ``blocks.0.up.linear``, with ``_1``, ``_2`` for further calls.
        module: Path of the module that runs it.
        roles: What its operands are called.
        operand_names: Their names in the gauge.
        log2_units: Exponents of the units of its operands; ``None`` while nobody has measured.
        log2_gamma: Exponent of the unit of the arriving gradient.
        plain: Which of its products run as they are, and why: ``"forward"``, or a backward one.
        is_settled: Whether all of its units were known when the step began.
    """

    __slots__ = (
        "derived",
        "is_settled",
        "log2_gamma",
        "log2_units",
        "module",
        "name",
        "operand_names",
        "plain",
        "roles",
    )

    def __init__(self, name: str, module: str, roles: tuple[str, ...]) -> None:
        self.name = name
        self.module = module
        self.roles = roles
        self.operand_names = tuple(f"{name}:{role}" for role in roles)
        self.log2_units: tuple[int, ...] | None = None
        self.log2_gamma: int | None = None
        self.plain: dict[str, str] = {}
        self.is_settled = False
        self.derived: dict[str, Site] = {}


@dataclass(frozen=True, slots=True)
class Run:
    """Where a forward product runs.

    Attributes:
        path: Of its module.
        episode: What occurrences are counted within: a step, or one run of a checkpoint's body.
        checkpoint: Whose body is computed again, if one is.
    """

    path: str
    episode: object
    checkpoint: object = None


# Whose products the body of a checkpoint runs.
SITES_OF_CHECKPOINTS: WeakKeyDictionary[Any, Sites] = WeakKeyDictionary()


def sites_of_checkpoint() -> Sites | None:
    """Whose the products are that a checkpoint on the Python stack computes again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ENGINE:
        if (checkpoint := checkpoint_of(frame)) is not None:
            return SITES_OF_CHECKPOINTS.get(checkpoint)
        frame = frame.f_back
    return None


class Sites:
    """The products of a module's steps.

    A product's module is the innermost one whose call is on the Python stack. No hook is needed for
    that: nothing of the user's is changed, and nothing is there to be copied, pickled or traced.

    Args:
        module: The root; its path is the empty string.
        boundary: Code above which nothing belongs to the step.
        session: The session that they are for, weakly.
    """

    def __init__(
        self, module: nn.Module, boundary: CodeType, session: weakref.ref[ProductSession]
    ) -> None:
        self.session = session
        # Weak: an autograd graph keeps its session, and must not keep the module.
        self._module = weakref.ref(module)
        self._boundary = boundary
        self._paths: dict[int, str] = {}
        # What ran a checkpoint, by the checkpoint's body, which alone is there when it runs again.
        self._paths_of_bodies: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        # How many products of a kind had run in the step before a checkpoint's body ran some.
        self._starts: WeakKeyDictionary[Any, dict[tuple[str, str], int]] = WeakKeyDictionary()
        # The products of one kind in one module, in the order in which a step runs them.
        self._places: dict[tuple[str, str], list[Site]] = {}
        self._counts: dict[tuple[tuple[str, str], object], int] = {}
        self._is_fresh = False
        self.all: dict[str, Site] = {}

    def begin(self) -> None:
        """A step begins: occurrences are counted from the first again."""
        self._is_fresh = False
        self._counts.clear()

    def settle(self) -> None:
        """Note for the step that begins which sites have all of their units."""
        for site in self.all.values():
            site.is_settled = site.log2_units is not None and site.log2_gamma is not None

    def find(self, word: str, roles: tuple[str, ...], run: Run) -> tuple[Site, bool]:
        """The site of the product that is about to run.

        Args:
            word: What the operation is called.
            roles: What its operands are called.
            run: Where it runs.

        Returns:
            The site, and whether it is seen for the first time.
        """
        key = (run.path, word)
        index = self._index(key, run)
        self._counts[key, run.episode] = index + 1
        if (checkpoint := checkpoint_under_way()) is not None:
            self._starts.setdefault(checkpoint, {}).setdefault(key, index)
            SITES_OF_CHECKPOINTS[checkpoint] = self
        return self.numbered(word, roles, run.path, index)

    def numbered(
        self, word: str, roles: tuple[str, ...], path: str, index: int
    ) -> tuple[Site, bool]:
        """The site of one occurrence, for who counts them himself; see :meth:`find`."""
        sites = self._places.setdefault((path, word), [])
        if index < len(sites):
            return sites[index], False
        base = f"{path}.{word}" if path else word
        site = Site(base if index == 0 else f"{base}_{index}", path, roles)
        sites.append(site)
        self.all[site.name] = site
        return site, True

    def peek(self, word: str, run: Run) -> Site | None:
        """The site that :meth:`find` would give, if it has been seen before; nothing is counted."""
        sites = self._places.get((run.path, word), [])
        index = self._index((run.path, word), run)
        return sites[index] if index < len(sites) else None

    def _index(self, key: tuple[str, str], run: Run) -> int:
        index = self._counts.get((key, run.episode))
        if index is not None:
            return index
        # What had run before the body was counted then.
        return self._starts.get(run.checkpoint, {}).get(key, 0) if run.checkpoint else 0

    def derive(self, site: Site, slot: str, roles: tuple[str, ...]) -> Site:
        """The product that a backward product is for the backward pass of the backward pass."""
        derived = site.derived.get(slot)
        if derived is None:
            derived = site.derived[slot] = Site(f"{site.name}:{slot}", site.module, roles)
            self.all[derived.name] = derived
        return derived

    def owns_caller(self) -> bool:
        """Whether a module of these runs what was called, within the node that the engine runs."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not ENGINE:
            if frame.f_code is MODULE_CALL and self.path_of(id(frame.f_locals["self"])) is not None:
                return True
            frame = frame.f_back
        return False

    def forward_run(self, depth: int, episode: object) -> Run:
        """Where the product of a forward pass runs.

        Args:
            depth: Frames between the caller of this method and the kernel's own.
            episode: The step.
        """
        frame: FrameType | None = sys._getframe(depth)
        bodies: list[Any] = []
        path: str | None = None
        while frame is not None and path is None:
            code = frame.f_code
            if code is MODULE_CALL:
                path = self.path_of(id(frame.f_locals["self"]))
            elif code is self._boundary:
                path = ""
            elif code is CHECKPOINT:
                bodies.append(checkpointed_body(frame))
            frame = frame.f_back
        for body in bodies:
            # Not for a callable without a hash or weak references.
            with contextlib.suppress(TypeError):
                self._paths_of_bodies[body] = path or ""
        return Run(path or "", episode)

    def backward_run(self, depth: int, episode: object, node: Any) -> Run | None:
        """Where a product that runs within an autograd node is one of a forward pass again.

        Args:
            depth: Frames between the caller of this method and the kernel's own.
            episode: The step.
            node: The node.

        Returns:
            ``None`` for a product of the backward pass.
        """
        path: str | None = None
        checkpoint = None
        frame = frame_at(depth)
        # An accelerator's backward pass has a thread of its own, without frames.
        while frame is not None and frame.f_code is not ENGINE:
            if path is None and frame.f_code is MODULE_CALL:
                path = self.path_of(id(frame.f_locals["self"]))
            elif path is None and frame.f_code in RECOMPUTATIONS:
                path = ""
                with contextlib.suppress(TypeError):
                    path = self._paths_of_bodies.get(checkpointed_body(frame), "")
            elif checkpoint is None:
                checkpoint = checkpoint_of(frame)
            frame = frame.f_back
        if checkpoint is not None:
            return Run(path or "", (episode, id(checkpoint), graph_task()), checkpoint)
        return None if path is None else Run(path, (episode, sequence_number(node)))

    @property
    def module(self) -> nn.Module | None:
        """The root, while somebody has it."""
        return self._module()

    def path_of(self, module: int) -> str | None:
        """Path of the module with an ``id``; a compiled one has that of the user's own."""
        path = self._paths.get(module)
        if path is None and not self._is_fresh:
            # Modules may come while a model runs; looked for once a step at most.
            root = self._module()
            children = () if root is None else root.named_modules()
            self._paths = {
                id(child): ".".join(part for part in name.split(".") if part != _COMPILED)
                for name, child in children
            }
            self._is_fresh = True
            path = self._paths.get(module)
        return path
