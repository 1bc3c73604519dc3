"""Give objects other attributes for a while, and wait for modules to be imported.

What waits is a finder at the front of ``sys.meta_path`` that answers for one module, once.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any, Self

_MISSING = object()


@contextlib.contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context ``owner`` has these attributes; what it had itself is back afterwards."""
    before = {name: vars(owner).get(name, _MISSING) for name in attributes}
    _put(owner, attributes)
    try:
        yield
    finally:
        _put(owner, before)


def _put(owner: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(owner, type):
            # The dictionary of a class is read-only.
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        elif value is _MISSING:
            vars(owner).pop(name, None)
        else:
            # Past a __setattr__ such as that of a torch module, which files what it is given.
            vars(owner)[name] = value


class StandIn(abc.ABC):
    """Stands in for a method of an object, and looks like it; copies of the object are plain.

    Args:
        method: The object's own, or what stands in for it already.
    """

    def __init__(self, method: Any) -> None:
        # First: it takes over the attributes of what it wraps, which may stand in as well.
        functools.update_wrapper(self, method)
        self._method = method

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""

    def __getattr__(self, name: str) -> Any:
        """What else a method has, such as its code: packages read it to script or export it."""
        if name == "_method":  # there is none yet
            raise AttributeError(name)
        return getattr(self._method, name)

    @property
    def __func__(self) -> Callable[..., Any]:
        """A function, as that of a method: bound to another object it is that one's."""
        own, method = self._own().__func__, self._own()

        @functools.wraps(own)
        def function(owner: Any, *args: Any, **kwargs: Any) -> Any:
            run = self if owner is method.__self__ else MethodType(own, owner)
            return run(*args, **kwargs)

        return function

    def called_by(self, caller: Any) -> Callable[..., Any]:
        """What stands in for the caller's own method, if that is a copy of the object; else this.

        ``copy.copy`` hands all attributes on, and so do packages that make a module of other
        weights. What an object calls itself is the copy's own method then.

        Args:
            caller: Whoever calls: the object whose method it is, a copy of it, or somebody else.
        """
        method = self._own()
        if not isinstance(method, MethodType) or caller is method.__self__:
            return self
        name = self._name_in(caller)
        if not name or method.__func__ is not getattr(type(method.__self__), name, None):
            return self  # no copy, or one that was given the user's own attribute as well
        own = MethodType(getattr(type(caller), name), caller)
        # Replicas of ``nn.DataParallel`` run at the same time: nobody's products.
        return own if getattr(caller, "_is_replica", False) else self._for(own)

    def _name_in(self, owner: Any) -> str:
        """The attribute that this is of an object; the function may have another name."""
        attributes = getattr(owner, "__dict__", {}).items()
        return next((name for name, value in attributes if value is self), "")

    def _for(self, method: Any) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        inner = self._method
        other._method = inner._for(method) if isinstance(inner, StandIn) else method
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        method = self._own()
        if isinstance(method, MethodType):
            return MethodType(method.__func__, memo.get(id(method.__self__), method.__self__))
        return method

    def __reduce__(self) -> Any:
        method = self._own()
        if isinstance(method, MethodType):
            return getattr, (method.__self__, self._name_in(method.__self__) or method.__name__)
        return functools.partial, (method,)

    def _own(self) -> Any:
        method = self._method
        while isinstance(method, StandIn):
            method = method._method
        return method


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for a call that is left out."""


def when_imported(name: str, run: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or as soon as somebody has imported it.

    Args:
        name: Full name of the module.
        run: The function; the same one waits once.
    """
    module = sys.modules.get(name)
    if module is not None:
        run(module)
    elif not any(
        isinstance(finder, _WaitFor) and finder.awaits == (name, run) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _WaitFor(name, run))


def base_when_imported(name: str, *modules: str) -> type:
    """A base class that becomes a subclass of other packages' classes of the same name.

    Neither package is imported for it, so whoever derives from it can be imported without them.

    Args:
        name: Of the classes.
        modules: Full names of the modules that have them, each as soon as it is imported.
    """
    # The bases of a class can be changed if one of them is not ``object`` itself.
    base: type = type(name, (type(f"_{name}", (), {}),), {})

    def derive(module: ModuleType) -> None:
        base.__bases__ = (*base.__bases__, getattr(module, name))

    for module in modules:
        when_imported(module, derive)
    return base


class _WaitFor:
    """Finds a module as the other finders do, and calls a function once it has run.

    Args:
        name: Full name of the module.
        run: The function.
    """

    def __init__(self, name: str, run: Callable[[ModuleType], None]) -> None:
        self.awaits = (name, run)
        self._searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, whose loader calls the function; nothing for other modules."""
        name, call = self.awaits
        if fullname != name or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        loader, run = spec.loader, spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            call(module)

        # On the one object that loads this module: whoever asks it for more gets its own answers.
        loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
