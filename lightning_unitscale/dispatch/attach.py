"""The methods of a module, standing aside for ones that run within a session."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_unitscale.dispatch.kernels import close_session, open_session
from lightning_unitscale.dispatch.session import LOCAL, Numerics, ProductSession

_MISSING = object()


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
        self.before_call: Callable[[], None] | None = None
        functools.update_wrapper(self, self._method)
        # Lightning reads parameters one wrapping down: where a decorator of the user's leads.
        self.__wrapped__ = getattr(self._method, "__wrapped__", self._method)

    @property
    def __code__(self) -> Any:
        """The user's own code, by which Lightning tells whether a method is overridden."""
        return self._method.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        if torch.compiler.is_compiling() or LOCAL.session is self._session:
            return self._method(*args, **kwargs)
        if self.before_call is not None:
            self.before_call()
        self._session.begin_step(is_training=self._is_training())
        with self._session.running():
            return self._method(*args, **kwargs)

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
    ) -> None:
        self.session = ProductSession(module, SessionMethod.__call__.__code__, numerics)
        self._module = module
        self._before: dict[str, Any] = {}
        self.methods: dict[str, SessionMethod] = {}
        device_types = device_types_of(module)
        open_session(self.session, device_types)
        self._overrides = [] if numerics is None else numerics.overrides(self.session, device_types)
        for name in names:
            self._before[name] = vars(module).get(name, _MISSING)
            method = SessionMethod(module, name, self.session, functools.partial(is_training, name))
            self.methods[name] = vars(module)[name] = method

    def detach(self) -> None:
        """Put the methods and torch's kernels back. May be called more than once."""
        close_session(self.session)
        for overrides in self._overrides:
            overrides.remove()
        self._overrides = []
        for name, before in self._before.items():
            # Whoever has put something over it since takes it away himself.
            if vars(self._module).get(name) is self.methods[name]:
                del vars(self._module)[name]
                if before is not _MISSING:
                    vars(self._module)[name] = before
        self._before = {}


def device_types_of(module: nn.Module) -> set[str]:
    """Kinds of devices that a module may run on: where it is now, and an accelerator's if any."""
    types = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    types.add("cpu")
    if torch.cuda.is_available():
        types.add("cuda")
    return types
