"""Give objects other attributes for a while, and wait for modules to be imported.

Attributes of ours stand over each other in the order in which they were put, and go in any order.
One that goes from between two others is skipped by the one above it. What there was before the
first of them is back when the last one goes. An attribute that someone else has put over ours
stays: what it holds of ours then only calls what was there before.

What waits is a finder at the front of ``sys.meta_path`` that answers for one module, once.
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
# What stands over an attribute, the lowest first, by the identity of its owner and by its name.
# Weakly: an owner that nothing else refers to goes with all that stands on it.
_SHADOWS: dict[tuple[int, str], tuple[weakref.ref[Shadow], ...]] = {}
# Two threads may put and remove at once, and a garbage collection removes in the middle of either.
_CHANGING = threading.RLock()


class Shadow:
    """Put one attribute over what an object has under that name, until :meth:`remove`."""

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
        """What the object itself has below; ``None`` if it has nothing there."""
        return None if self._below is _MISSING else self._below

    def remove(self) -> None:
        """Let the object have what is below. May be called more than once."""
        with _CHANGING:
            later = self._taken_out()
            if later is None:
                return
            above = next((shadow for shadow in later if shadow._below is self._value), None)
            if above is not None:
                above._skip(self)
            # Otherwise someone else has put another value there, or has removed this one.
            elif vars(self._owner).get(self._name, _MISSING) is self._value:
                self._put(self._below)
        if isinstance(self._value, StandIn):
            self._value.is_removed = True

    def _taken_out(self) -> list[Shadow] | None:
        """Take it off the list; returns those put later, or ``None`` if it was off already."""
        key = id(self._owner), self._name
        refs = _SHADOWS.get(key, ())
        own = next((ref for ref in refs if ref() is self), None)
        if own is None:
            return None
        _forget(key, own)
        later = (ref() for ref in refs[refs.index(own) + 1 :])
        return [shadow for shadow in later if shadow is not None]

    def _skip(self, removed: Shadow) -> None:
        """Stand over what is below another one, which goes."""
        self._below = removed._below
        if isinstance(self._value, StandIn) and isinstance(removed._value, StandIn):
            self._value.skip(removed._value)

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
            # Past a __setattr__ such as that of a torch module, which files what it is given.
            vars(owner)[name] = value


def _forget(key: tuple[int, str], forgotten: weakref.ref[Shadow]) -> None:
    """Take one off a list, when it is removed or nothing refers to it any more."""
    with _CHANGING:
        kept = tuple(ref for ref in _SHADOWS.pop(key, ()) if ref is not forgotten)
        if kept:
            _SHADOWS[key] = kept


@contextlib.contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within this context ``owner`` has these attributes; see :class:`Shadow`."""
    with contextlib.ExitStack() as shadows:
        for name, value in attributes.items():
            shadows.callback(Shadow(owner, name, value).remove)
        yield


@contextlib.contextmanager
def shadowed_here(owner: Any, **functions: Callable[..., Any]) -> Iterator[None]:
    """Within this context ``owner`` has these functions for what this thread calls."""
    thread, is_within = threading.get_ident(), True

    def chosen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        below = getattr(owner, name)

        @functools.wraps(below)
        def call(*args: Any, **kwargs: Any) -> Any:
            # What was put over it meanwhile may still hold it when this context has ended.
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
    """Stands in for a method of an object, and looks like it; copies of the object are plain."""

    def __init__(self, method: Any) -> None:
        # First: it takes over the attributes of what it wraps, which may stand in as well.
        functools.update_wrapper(self, method)
        self._method = method
        # Whether it has been removed. Something else may still hold it, and call it.
        self.is_removed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        return (self._method if self.is_removed else self.call)(*args, **kwargs)

    @abc.abstractmethod
    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method as long as this stands in for it."""

    def skip(self, removed: StandIn) -> None:
        """Stand in for what another one stood in for, that was in between."""
        if self._method is removed:
            self._method = removed._method
        if vars(self).get("__wrapped__") is removed:
            self.__wrapped__ = removed._method

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

    def called_by(self, frame: FrameType | None) -> Callable[..., Any]:
        """What stands in for the caller's own method, if that is a copy of the object; else this.

        ``copy.copy`` hands all attributes on, and so do packages that make a module of other
        weights. What an object calls itself is the copy's own method then.
        """
        caller = None if frame is None else frame.f_locals.get("self")
        method = self._own()
        if not isinstance(method, MethodType) or caller is method.__self__:
            return self
        name = self._name_in(caller)
        if not name or method.__func__ is not getattr(type(method.__self__), name, None):
            return self  # no copy, or one that was given the user's own attribute as well
        own = MethodType(getattr(type(caller), name), caller)
        # Replicas of ``nn.DataParallel`` run at the same time: nobody's matmuls.
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
        return partial, (method,)

    def _own(self) -> Any:
        method = self._method
        while isinstance(method, StandIn):
            method = method._method
        return method


class Replacement(StandIn):
    """Runs a function in place of a method."""

    def __init__(self, method: Any, run: Callable[..., Any]) -> None:
        super().__init__(method)
        self._run = run

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self._run(*args, **kwargs)


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for a call that is left out."""


def when_imported(name: str, run: Callable[[ModuleType], None]) -> None:
    """Call a function with a module, now or as soon as somebody has imported it."""
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
    """
    # The bases of a class can be changed if one of them is not ``object`` itself.
    base: type = type(name, (type(f"_{name}", (), {}),), {})

    def derive(module: ModuleType) -> None:
        base.__bases__ = (*base.__bases__, getattr(module, name))

    for module in modules:
        when_imported(module, derive)
    return base


class _WaitFor:
    """Finds a module as the other finders do, and calls a function once it has run."""

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
