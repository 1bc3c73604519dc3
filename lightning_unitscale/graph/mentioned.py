"""What the code of a module's methods mentions outside of the module: globals and closures."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

_INSTALLED = tuple({sysconfig.get_path(one) for one in ("stdlib", "purelib", "platlib")})


class Binding(NamedTuple):
    """A global name and what it stands for."""

    namespace: dict[str, Any]
    name: str
    value: Any

    def restore(self) -> None:
        """Let the name stand for it again."""
        if self.namespace.get(self.name) is not self.value:
            self.namespace[self.name] = self.value


def mentioned(module: nn.Module) -> list[Binding]:
    """Globals that methods of the module and of its submodules mention, and free variables.

    Functions that they mention are followed, as long as they come from the same package as one of
    the classes. Installed packages are left out: what they keep in globals (registries, caches) is
    not part of a step. So are modules, classes and functions. A free variable has no name here.
    """
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    own = [one for one in kinds if not is_installed(root_of(one))]
    roots = {root_of(one) for one in own}
    waiting = [function for kind in own for function in functions_of(kind)]
    seen: dict[FunctionType, None] = {}
    bindings: dict[tuple[int, str], Binding] = {}
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen[function] = None
        for binding in bindings_of(function):
            other = function_in(binding.value)
            if other is not None and root_of(other) in roots:
                waiting.append(other)
            elif not isinstance(binding.value, (ModuleType, FunctionType, type)):
                key = (id(binding.namespace), binding.name) if binding.name else (id(binding), "")
                bindings[key] = binding
    return list(bindings.values())


def functions_of(kind: type) -> Iterator[FunctionType]:
    """The functions that one class defines: methods, and what is behind its properties."""
    for value in vars(kind).values():
        function = function_in(value)
        if function is not None:
            yield function


def names_in(function: FunctionType) -> Iterator[str]:
    """Globals and attributes that a function and the functions inside of it mention, by name."""
    for code in codes_of(function.__code__):
        yield from code.co_names


def function_in(value: Any) -> FunctionType | None:
    """The function that a method, or the getter of a property, is made of; ``None`` of others."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def bindings_of(function: FunctionType) -> Iterator[Binding]:
    """Globals that a function mentions, and its free variables."""
    namespace = function.__globals__
    for name in names_in(function):
        if name in namespace:
            yield Binding(namespace, name, namespace[name])
    for cell in function.__closure__ or ():
        try:
            yield Binding({}, "", cell.cell_contents)
        except ValueError:
            continue  # not bound yet


def codes_of(code: Any) -> Iterator[Any]:
    """The code and that of the functions and comprehensions inside."""
    yield code
    for one in code.co_consts:
        if isinstance(one, type(code)):
            yield from codes_of(one)


def is_installed_file(file: str) -> bool:
    """Whether a file is Python's own or an installed package's, and not the user's."""
    return file.startswith(_INSTALLED)


def is_installed(root: str) -> bool:
    """Whether a package is Python's own or an installed one, and not the user's."""
    file = getattr(sys.modules.get(root), "__file__", None)
    # Without a file: built in, or what was typed into a notebook.
    return root == "builtins" if file is None else is_installed_file(file)


def root_of(value: Any) -> str:
    """The package that a class or a function was written in."""
    return str(getattr(value, "__module__", None) or "").partition(".")[0]
