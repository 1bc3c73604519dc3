"""Which product is which: by module, operation and occurrence, the same in every step."""

from __future__ import annotations

import contextlib
import sys
import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_unitscale.dispatch.torch_internals import (
    CHECKPOINT,
    ENGINE,
    MODULE_CALL,
    RECOMPUTATIONS,
    checkpointed_body,
)

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.calls import Call

# Where a product runs beside the slots of its operands' gradients.
FORWARD = "forward"


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
        last_call: Its last run that autograd has recorded.
        is_settled: Whether all of its units were known when the step began.
    """

    __slots__ = (
        "derived",
        "is_settled",
        "last_call",
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
        self.last_call: Call | None = None
        self.derived: dict[str, Site] = {}


class _Place:
    """The products of one kind in one module, in the order in which a step runs them."""

    __slots__ = ("count", "episode", "sites")

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.count = 0
        self.episode: Any = None


class Sites:
    """The products of a module's steps.

    A product's module is the innermost one whose call is on the Python stack. No hook is needed for
    that: nothing of the user's is changed, and nothing is there to be copied, pickled or traced.

    Args:
        module: The root; its path is the empty string.
        boundary: Code above which nothing belongs to the step.
    """

    def __init__(self, module: nn.Module, boundary: CodeType) -> None:
        self._module = module
        self._boundary = boundary
        self._paths: dict[int, str] = {}
        # What ran a checkpoint, by the checkpoint's body, which alone is there when it runs again.
        self._paths_of_bodies: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._places: dict[tuple[str, str], _Place] = {}
        self._is_fresh = False
        self.all: dict[str, Site] = {}

    def begin(self) -> None:
        """A step begins: occurrences are counted from the first again."""
        self._is_fresh = False

    def find(
        self, word: str, roles: tuple[str, ...], path: str, episode: object
    ) -> tuple[Site, bool]:
        """The site of the product that is about to run.

        Args:
            word: What the operation is called.
            roles: What its operands are called.
            path: Of its module.
            episode: What occurrences are counted within: a step, or one run of a checkpoint's body.

        Returns:
            The site, and whether it is seen for the first time.
        """
        key = (path, word)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place()
        if place.episode != episode:
            place.episode, place.count = episode, 0
        index = place.count
        place.count = index + 1
        if index < len(place.sites):
            return place.sites[index], False
        base = f"{path}.{word}" if path else word
        site = Site(base if index == 0 else f"{base}_{index}", path, roles)
        place.sites.append(site)
        self.all[site.name] = site
        return site, True

    def peek(self, word: str, path: str, episode: object) -> Site | None:
        """The site that :meth:`find` would give, if it has been seen before; nothing is counted."""
        place = self._places.get((path, word))
        if place is None:
            return None
        index = place.count if place.episode == episode else 0
        return place.sites[index] if index < len(place.sites) else None

    def derive(self, site: Site, slot: str, roles: tuple[str, ...]) -> Site:
        """The product that a backward product is for the backward pass of the backward pass."""
        derived = site.derived.get(slot)
        if derived is None:
            derived = site.derived[slot] = Site(f"{site.name}:{slot}", site.module, roles)
            self.all[derived.name] = derived
        return derived

    def path_of_caller(self, depth: int) -> tuple[str | None, bool]:
        """Path of the module that is running, and whether the autograd engine runs it.

        Args:
            depth: Frames between the caller of this method and the kernel's own.

        Returns:
            ``None`` where no module of this step is on the stack.
        """
        frame = sys._getframe(depth)
        bodies: list[Any] = []
        path: str | None = None
        while frame is not None and path is None:
            code = frame.f_code
            if code is MODULE_CALL:
                path = self._path(frame.f_locals["self"])
            elif code is ENGINE:
                return None, True
            elif code is self._boundary:
                path = ""
            elif code is CHECKPOINT:
                bodies.append(checkpointed_body(frame))
            elif code in RECOMPUTATIONS:
                path = ""
                with contextlib.suppress(TypeError):
                    path = self._paths_of_bodies.get(checkpointed_body(frame), "")
            frame = frame.f_back  # type: ignore[assignment]
        if path is not None:
            for body in bodies:
                # Not for a callable without a hash or weak references.
                with contextlib.suppress(TypeError):
                    self._paths_of_bodies[body] = path
        return path, False

    def owns_caller(self, depth: int) -> bool:
        """Whether a module of this step is on the stack, above the engine that runs a node of it.

        Args:
            depth: Frames between the caller of this method and the kernel's own.
        """
        frame = sys._getframe(depth)
        while frame is not None and frame.f_code is not ENGINE:
            if frame.f_code is MODULE_CALL and self._path(frame.f_locals["self"]) is not None:
                return True
            if frame.f_code in RECOMPUTATIONS:
                with contextlib.suppress(TypeError):
                    if checkpointed_body(frame) in self._paths_of_bodies:
                        return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _path(self, module: nn.Module) -> str | None:
        path = self._paths.get(id(module))
        if path is None and not self._is_fresh:
            # Modules may come while a model runs; looked for once a step at most.
            self._paths = {id(child): name for name, child in self._module.named_modules()}
            self._is_fresh = True
            path = self._paths.get(id(module))
        return path
