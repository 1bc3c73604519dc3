"""The methods of a module, standing aside for ones that run within a session."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_unitscale.dispatch.inductor_internals import is_compiled
from lightning_unitscale.dispatch.kernels import close_session, open_session
from lightning_unitscale.dispatch.numerics import Numerics
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.threads import LOCAL
from lightning_unitscale.dispatch.torch_internals import current_node


class _Missing:
    """Of a method that a module does not have by itself; the same in a copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Missing:
        return self


MISSING = _Missing()


class SessionMethod:
    """Stands in for one method of a module: the same call, with its products in the session.

    Args:
        module: The module.
        name: Of the method.
        session: Whose products they are.
        is_training: Says whether a call is one of training.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        session: ProductSession,
        is_training: Callable[[], bool],
    ) -> None:
        self._method = getattr(module, name)
        self._session = session
        self._is_training = is_training
        self._has_warned = False
        self.before_call: Callable[[], None] | None = None
        self.after_call: Callable[[Any], None] | None = None
        functools.update_wrapper(self, self._method)
        # Lightning reads parameters one wrapping down: where a decorator of the user's leads.
        self.__wrapped__ = getattr(self._method, "__wrapped__", self._method)

    @property
    def __code__(self) -> Any:
        """The user's own code, by which Lightning tells whether a method is overridden."""
        return self._method.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        if torch.compiler.is_compiling():
            if self._session.numerics is None or torch.compiler.is_exporting():
                return self._method(*args, **kwargs)
            # What the compiler made of it would not be rounded.
            return torch.compiler.disable(self.run)(*args, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method within the session, if it is not within it already."""
        if LOCAL.session is self._session:
            return self._method(*args, **kwargs)
        if self.before_call is not None:
            self.before_call()
        # Within a checkpoint that is computed again it is the same step of training.
        is_new = current_node() is None
        self._session.begin_step(is_training=is_new and self._is_training())
        with self._session.running(), self._uncompiled():
            result = self._method(*args, **kwargs)
        if self.after_call is not None:
            self.after_call(result)
        return result

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Formats round at the dispatcher only, so what the user compiled runs as it was written.

        A context for the step, which does nothing where nothing is rounded or compiled.
        """
        module = self._session.module
        if self._session.numerics is None or module is None or not is_compiled(module):
            return contextlib.nullcontext()
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(module).__name__} has parts that were compiled by "
                "torch.compile: formats are rounded in uncompiled steps only, so they run "
                "uncompiled; leave out torch.compile, or let UnitScaleCallback(compile=True) "
                "compile the steps.",
                stacklevel=3,
            )
        return torch.compiler.set_stance("force_eager")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copied module's own method: a copy made in the middle of a training is plain."""
        method = self._method
        if isinstance(method, MethodType):
            owner = memo.get(id(method.__self__), method.__self__)
            return MethodType(method.__func__, owner)
        return method

    def __reduce__(self) -> Any:
        method = self._method
        if isinstance(method, MethodType):
            return getattr, (method.__self__, method.__name__)
        return super().__reduce__()


class AttachedSession:
    """A session with the methods of its module that run in it, until :meth:`detach`.

    Args:
        module: The module.
        names: Methods that are steps.
        numerics: What rounds products, if anything does.
        is_training: By the method's name, whether a call is one of training.
        uses_units: Whether products run in units.

    Attributes:
        session: The session.
        methods: What stands in for each method.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Iterable[str],
        numerics: Numerics | None = None,
        is_training: Callable[[str], bool] = lambda _: True,
        *,
        uses_units: bool = True,
    ) -> None:
        self.session = ProductSession(
            module, SessionMethod.run.__code__, numerics, uses_units=uses_units
        )
        self._module = module
        self._before: dict[str, Any] = {}
        self.methods: dict[str, SessionMethod] = {}
        open_session(self.session, _device_types())
        for name in names:
            self._before[name] = vars(module).get(name, MISSING)
            method = self._method(name, functools.partial(is_training, name))
            self.methods[name] = vars(module)[name] = method

    def _method(self, name: str, is_training: Callable[[], bool]) -> SessionMethod:
        return SessionMethod(self._module, name, self.session, is_training)

    def detach(self) -> None:
        """Put the methods and torch's kernels back. May be called more than once."""
        close_session(self.session)
        for name, before in self._before.items():
            # Whoever has put something over it since takes it away himself.
            if vars(self._module).get(name) is self.methods[name]:
                del vars(self._module)[name]
                if before is not MISSING:
                    vars(self._module)[name] = before
        self._before = {}


def _device_types() -> set[str]:
    """Kinds of devices that a module may run on."""
    return {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
