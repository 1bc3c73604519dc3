"""Hold back what a step appends to a module's lists, and append it once the step has run.

Dynamo guards on the length of a list that a step appends to (``self.outputs.append(loss)``), so
that the step would be captured anew at every call; and a rehearsal would leave its stand-ins there.
"""

from __future__ import annotations

import contextlib
import dis
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from lightning_unitscale.graph.mentioned import (
    bindings_of,
    codes_of,
    function_in,
    functions_of,
    is_installed,
    names_in,
    root_of,
)
from lightning_unitscale.shadowing import shadowed

# They do not know the lists of a user's module.
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric"})
_FRAMEWORKS |= {"builtins", "abc", "typing", "collections", __name__.partition(".")[0]}
_GROWS = frozenset({"append", "extend"})
_PASSED_OVER = frozenset({"CACHE", "NOP", "EXTENDED_ARG"})


class GrowingLists:
    """Records what a step appends to lists that it does not look at, and appends it later.

    Args:
        module: The module; lists are attributes of its own.
        step: The method that appends.

    Attributes:
        given: What was recorded: the name of a list, and what it is to have.
    """

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        self.module = module
        self.step = step
        self.given: list[tuple[str, Any]] = []
        self._known: frozenset[str] = frozenset()
        # Kept, since Dynamo guards on them.
        self._recorders: dict[str, _Recorder] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context stand-ins take what is appended; the lists are back afterwards."""
        self.given.clear()
        found = frozenset(_lists_of(self.module))
        if found != self._known:
            self._known = found
            names = only_appended_to(self.module, self.step, found)
            before = self._recorders
            self._recorders = {
                name: before.get(name) or _Recorder(name, self.given) for name in sorted(names)
            }
        with shadowed(self.module, **self._recorders):
            yield

    def replay(self) -> None:
        """Append what was recorded."""
        given = list(self.given)
        self.given.clear()
        for name, value in given:
            getattr(self.module, name).append(value)

    def discard(self) -> None:
        """Forget what was recorded: the step was a rehearsal, or failed."""
        self.given.clear()


class _Recorder:
    """In place of a list: Dynamo traces a plain append to one that is empty before every step."""

    def __init__(self, name: str, given: list[tuple[str, Any]]) -> None:
        self.name = name
        self.given = given

    def append(self, value: Any) -> None:
        self.given.append((self.name, value))

    def extend(self, values: Iterable[Any]) -> None:
        for one in values:
            self.given.append((self.name, one))


def only_appended_to(
    module: nn.Module, step: Callable[..., Any], names: Collection[str]
) -> set[str]:
    """Those of the named attributes that a step appends to, and does nothing else with.

    What a step does is in the code that is mentioned by name, from the step and from every
    ``forward`` on: methods of the module, of its submodules and of objects that they hold,
    functions, and what modules of Python hold. Installed packages do not look at a user's lists,
    but for those that the module's classes are from. Where a step runs optimizers, whose hooks may
    look at anything, there are none.
    """
    if not names or not getattr(module, "automatic_optimization", True):
        return set()
    appended: set[str] = set()
    others: set[str] = set()
    for function in _reachable(module, step):
        for code in codes_of(function.__code__):
            if any(one in names for one in (*code.co_names, *code.co_consts) if type(one) is str):
                for name, is_appended in _mentions(code):
                    (appended if is_appended else others).add(name)
    return appended.intersection(names) - others


def _lists_of(module: nn.Module) -> Iterator[str]:
    """Attributes that are lists, each of which no other attribute is."""
    lists = [(name, one) for name, one in vars(module).items() if type(one) is list]
    counts = Counter(id(one) for _, one in lists)
    yield from (name for name, one in lists if counts[id(one)] == 1)


def _reachable(module: nn.Module, step: Callable[..., Any]) -> Iterator[FunctionType]:
    own = frozenset(root_of(kind) for kind in type(module).__mro__)
    methods = _methods(module, own)
    start = function_in(step)
    waiting = [*methods.get("forward", ()), *([] if start is None else [start])]
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function
        names = set(names_in(function))
        waiting += [one for name in names for one in methods.get(name, ())]
        for binding in bindings_of(function):
            held: Iterable[Any] = (binding.value,)
            if isinstance(binding.value, ModuleType):
                held = (vars(binding.value).get(name) for name in names)
            elif isinstance(binding.value, type) and binding.value not in type(module).__mro__:
                # Its own class is what ``super()`` mentions. Not every class takes isinstance():
                # typing.Any does not.
                held = functions_of(binding.value)
            found = [function_in(one) for one in held]
            waiting += [one for one in found if one and _may_look(one, own)]


def _may_look(value: Any, own: Collection[str]) -> bool:
    """Whether a class or a function is the user's."""
    root = root_of(value)
    return root not in _FRAMEWORKS and (root in own or not is_installed(root))


def _methods(module: nn.Module, own: Collection[str]) -> dict[str, list[FunctionType]]:
    """What a name can call on the module, its submodules and the objects that these hold."""
    tables = [vars(one) for one in module.modules()]
    owners = [*module.modules(), *(value for one in tables for value in one.values())]
    kinds = {kind for one in owners for kind in type(one).__mro__}
    tables += [dict(vars(one)) for one in kinds if _may_look(one, own)]
    methods: dict[str, list[FunctionType]] = {}
    for name, value in (one for table in tables for one in table.items()):
        function = function_in(value)
        if function is not None and _may_look(function, own):
            methods.setdefault(name, []).append(function)
    return methods


def _mentions(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Attributes that a piece of code names, and whether only to append to them."""
    found = [one for one in dis.get_instructions(code) if one.opname not in _PASSED_OVER]
    for place, one in enumerate(found):
        if one.opname.endswith(("_ATTR", "LOAD_METHOD")):
            after = found[place + 1] if place + 1 < len(found) else None
            yield (
                str(one.argval),
                one.opname == "LOAD_ATTR"
                and after is not None
                and after.opname in ("LOAD_ATTR", "LOAD_METHOD")
                and after.argval in _GROWS,
            )
    # For ``getattr`` and the like.
    yield from ((one, False) for one in code.co_consts if isinstance(one, str))
