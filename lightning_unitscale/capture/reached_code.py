"""Read the code that a step reaches: appends to lists, and gradients of gradients."""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from lightning_unitscale.capture.breaks import is_installed_file

# These packages do not use the lists of a user's module.
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric"})
_FRAMEWORKS |= {"builtins", "abc", "typing", "collections", __name__.partition(".")[0]}
_GROWS = frozenset({"append", "extend"})
_PASSED_OVER = frozenset({"CACHE", "NOP", "EXTENDED_ARG"})


def only_appended_to(
    module: nn.Module, step: Callable[..., Any], names: Collection[str]
) -> set[str]:
    """Return the named attributes that a step only appends to.

    The code of a step is found by the names that it mentions, from the step and every ``forward``
    on. It includes methods of the module, of its submodules and of their objects, functions, and
    Python modules. Installed packages do not use a user's lists, except those that define the
    module's classes. If a step runs optimizers, the result is empty, since their hooks may read
    anything.
    """
    if not names or not getattr(module, "automatic_optimization", True):
        return set()
    mentions = {
        mention
        for function in reachable(module, step)
        for code in codes_of(function.__code__)
        if any(name in names for name in (*code.co_names, *code.co_consts) if type(name) is str)
        for mention in _mentions(code)
    }
    return {name for name in names if (name, True) in mentions and (name, False) not in mentions}


def lists_of(module: nn.Module) -> Iterator[str]:
    """Yield the names of attributes that are lists and that no other attribute shares."""
    lists = [(name, value) for name, value in vars(module).items() if type(value) is list]
    counts = Counter(id(value) for _, value in lists)
    yield from (name for name, value in lists if counts[id(value)] == 1)


def reachable(module: nn.Module, step: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield the user's functions that a method mentions by name, directly or indirectly."""
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
        waiting += [method for name in names for method in methods.get(name, ())]
        for value in values_in(function):
            held: Iterable[Any] = (value,)
            if isinstance(value, ModuleType):
                held = (vars(value).get(name) for name in names)
            elif isinstance(value, type) and value not in type(module).__mro__:
                # ``super()`` mentions its own class. Not every class takes isinstance(): typing.Any
                # does not.
                held = functions_of(value)
            functions = [function_in(value) for value in held]
            waiting += [other for other in functions if other and _may_look(other, own)]


def _may_look(value: Any, own: Collection[str]) -> bool:
    """Check whether a class or a function is the user's."""
    root = root_of(value)
    file = getattr(sys.modules.get(root), "__file__", None)
    # Code typed into a notebook has none.
    is_installed = file is not None and is_installed_file(file)
    return root not in _FRAMEWORKS and (root in own or not is_installed)


def _methods(module: nn.Module, own: Collection[str]) -> dict[str, list[FunctionType]]:
    """Return the methods that a name can call on the module, its submodules or their objects."""
    tables = [vars(owner) for owner in module.modules()]
    owners = [*module.modules(), *(value for table in tables for value in table.values())]
    kinds = {kind for owner in owners for kind in type(owner).__mro__}
    tables += [dict(vars(kind)) for kind in kinds if _may_look(kind, own)]
    methods: dict[str, list[FunctionType]] = {}
    for name, value in (item for table in tables for item in table.items()):
        function = function_in(value)
        if function is not None and _may_look(function, own):
            methods.setdefault(name, []).append(function)
    return methods


def _mentions(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the attributes that code names, and whether only to append to them."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _PASSED_OVER]
    # The last instruction returns.
    for instruction, after in pairwise(instructions):
        if instruction.opname.endswith(("_ATTR", "LOAD_METHOD")):
            is_appended = instruction.opname == "LOAD_ATTR" and (
                after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval in _GROWS
            )
            yield str(instruction.argval), is_appended
    # For ``getattr`` and the like.
    yield from ((constant, False) for constant in code.co_consts if isinstance(constant, str))


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Yield the functions that one class defines: methods and properties."""
    for value in vars(kind).values():
        function = function_in(value)
        if function is not None:
            yield function


def names_in(function: FunctionType) -> Iterator[str]:
    """Yield the globals and attributes that a function and its inner functions mention."""
    for code in codes_of(function.__code__):
        yield from code.co_names


def function_in(value: Any) -> FunctionType | None:
    """Return the function behind a method or a property's getter, or ``None``."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def values_in(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the globals and free variables that a function mentions."""
    namespace = function.__globals__
    for name in names_in(function):
        if name in namespace:
            yield namespace[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not bound yet


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code and that of the functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def root_of(value: Any) -> str:
    """Return the package that a class or a function was written in."""
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


_OPTION = "create_graph"


def find_recorded_pass(module: nn.Module, method: Callable[..., Any]) -> str | None:
    """Find ``create_graph`` in the user's code that a method reaches, and return its place."""
    for function in reachable(module, method):
        for code in codes_of(function.__code__):
            # Names of keyword arguments of a call are a tuple among the constants.
            tuples = [constant for constant in code.co_consts if isinstance(constant, tuple)]
            if any(_OPTION in constants for constants in (code.co_consts, *tuples)):
                return f"{code.co_filename}:{code.co_firstlineno}"
    return None
