"""Replace attributes of objects for a while, and wait for modules to be imported.

Several replacements of an attribute stack in the order of their creation, and may be removed in any
order. If one in the middle is removed, the one above skips it. When the last one is removed, the
original value is back. An attribute that other code has put over ours stays. If it calls ours, that
call goes to the original.

Waiting is done by a finder at the front of ``sys.meta_path`` that loads one module, once.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec
from types import FrameType, MethodType, ModuleType
from typing import Any, Self

_MISSING = object()
# The stack of an attribute, lowest first, by the identity of its owner and by its name. The
# reference is weak: an unused owner is freed with its stack.
_SHADOWS: dict[tuple[int, str], tuple[weakref.ref[Shadow], ...]] = {}
# Threads may add and remove at the same time, and a garbage collection may remove in between.
_CHANGING = threading.RLock()


class Shadow:
    """An attribute that replaces an object's attribute of that name, until :meth:`remove`."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value
        if isinstance(value, StandIn):
            value.is_removed = False
        with _CHANGING:
            self._below = vars(owner).get(name, _MISSING)
            key = id(owner), name
            _SHADOWS[key] = (*_SHADOWS.get(key, ()), weakref.ref(self, partial(_forget, key)))
            self._put(value)

    @property
    def below(self) -> Any:
        """Return the object's attribute below this one, or ``None``."""
        return None if self._below is _MISSING else self._below

    def remove(self) -> None:
        """Restore the attribute below. May be called more than once."""
        with _CHANGING:
            key = id(self._owner), self._name
            refs = _SHADOWS.get(key, ())
            own = next((ref for ref in refs if ref() is self), None)
            if own is None:
                return
            _forget(key, own)
            later = filter(None, (ref() for ref in refs[refs.index(own) + 1 :]))
            above = next((shadow for shadow in later if shadow._below is self._value), None)
            if above is not None:
                above._below = self._below
                if isinstance(above._value, StandIn) and isinstance(self._value, StandIn):
                    above._value.skip(self._value)
            # Otherwise other code has replaced or removed this value.
            elif vars(self._owner).get(self._name, _MISSING) is self._value:
                self._put(self._below)
        if isinstance(self._value, StandIn):
            self._value.is_removed = True

    def _put(self, value: Any) -> None:
        owner, name = self._owner, self._name
        if isinstance(owner, type):
            # The dictionary of a class is read-only.
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
        elif value is _MISSING:
            vars(owner).pop(name, None)
        else:
            # Avoid a __setattr__ such as that of a torch module, which registers its values.
            vars(owner)[name] = value


def _forget(key: tuple[int, str], forgotten: weakref.ref[Shadow]) -> None:
    """Remove one from a list, when it is removed or no longer referenced."""
    with _CHANGING:
        kept = tuple(ref for ref in _SHADOWS.pop(key, ()) if ref is not forgotten)
        if kept:
            _SHADOWS[key] = kept


@contextlib.contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of ``owner`` within this context. See :class:`Shadow`."""
    with contextlib.ExitStack() as shadows:
        for name, value in attributes.items():
            shadows.callback(Shadow(owner, name, value).remove)
        yield


@contextlib.contextmanager
def shadowed_here(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of ``owner`` within this context, for calls of this thread."""
    thread, is_within = threading.get_ident(), True

    def chosen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        below = getattr(owner, name)

        @functools.wraps(below)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A later replacement may still refer to it after this context.
            is_here = is_within and threading.get_ident() == thread
            return (function if is_here else below)(*args, **kwargs)

        is_static = isinstance(vars(owner).get(name), staticmethod)
        return staticmethod(call) if is_static else call

    try:
        with shadowed(owner, **{name: chosen(name, run) for name, run in functions.items()}):
            yield
    finally:
        is_within = False


class StandIn(abc.ABC):
    """A stand-in for a method of an object. Copies of the object get the plain method."""

    def __init__(self, method: Any) -> None:
        # First, because it copies the attributes of the method, which may be a stand-in too.
        functools.update_wrapper(self, method)
        self._method = method
        # True once it has been removed. Other code may still refer to it and call it.
        self.is_removed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        return (self._method if self.is_removed else self.call)(*args, **kwargs)

    @abc.abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method while this stands in for it."""

    def skip(self, removed: StandIn) -> None:
        """Skip a removed stand-in below this one."""
        if self._method is removed:
            self._method = removed._method
        if vars(self).get("__wrapped__") is removed:
            self.__wrapped__ = removed._method

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the method, such as its code for scripting or export."""
        if name == "_method":  # not set yet
            raise AttributeError(name)
        return getattr(self._method, name)

    @property
    def __func__(self) -> Callable[..., Any]:
        """Return a function that follows the method of any object that it is bound to."""
        own, method = self._own().__func__, self._own()

        @functools.wraps(own)
        def function(owner: Any, *args: Any, **kwargs: Any) -> Any:
            run = self if owner is method.__self__ else MethodType(own, owner)
            return run(*args, **kwargs)

        return function

    def called_by(self, frame: FrameType | None) -> Callable[..., Any]:
        """Return the stand-in for the method of a calling copy of the object, or this one."""
        # ``copy.copy`` copies all attributes, and so do packages that make a module with other
        # weights. If such a copy calls itself, it needs its own method.
        caller = None if frame is None else frame.f_locals.get("self")
        method = self._own()
        if not isinstance(method, MethodType) or caller is method.__self__:
            return self
        name = self._name_in(caller)
        if not name or method.__func__ is not getattr(type(method.__self__), name, None):
            return self  # not a copy, or one that has the user's own attribute too
        own = MethodType(getattr(type(caller), name), caller)
        # Replicas of ``nn.DataParallel`` run at the same time, so their matmuls are not scaled.
        return own if getattr(caller, "_is_replica", False) else self._for(own)

    def _name_in(self, owner: Any) -> str:
        """Return the attribute of an object that holds this. The function may have another name."""
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
        return partial, (method,)

    def _own(self) -> Any:
        method = self._method
        while isinstance(method, StandIn):
            method = method._method
        return method


class Replacement(StandIn):
    """A stand-in that runs a function."""

    def __init__(self, method: Any, run: Callable[..., Any]) -> None:
        super().__init__(method)
        self._run = run

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self._run(*args, **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """Ignore a call."""


def when_imported(name: str, run: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or when it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        run(module)
    elif not any(
        isinstance(finder, _WaitFor) and finder.awaits == (name, run) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _WaitFor(name, run))


def base_when_imported(name: str, *modules: str) -> type:
    """Return a base class that later includes other packages' classes of the same name."""
    # No package is imported for it, so derived classes can be imported without them.
    # The bases of a class can be changed if one of them is not ``object`` itself.
    base: type = type(name, (type(f"_{name}", (), {}),), {})

    def derive(module: ModuleType) -> None:
        new = getattr(module, name)
        # A later class may derive from an earlier one, and then stands for both.
        kept = tuple(kind for kind in base.__bases__ if not issubclass(new, kind))
        base.__bases__ = (*kept, new)

    for module in modules:
        when_imported(module, derive)
    return base


class _WaitFor:
    """A finder that loads a module as others do, and calls a function after it has run."""

    def __init__(self, name: str, run: Callable[[ModuleType], None]) -> None:
        self.awaits = (name, run)
        self._searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec with a loader that calls the function, ``None`` for others."""
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

        # Only on the object that loads this module.
        loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
