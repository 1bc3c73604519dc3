"""Leave a Trainer's run also after errors for which Lightning does not call a hook.

Lightning calls ``on_exception`` of one callback after the other, and none after one that raises.
Its searches for a learning rate and for a batch size take the callbacks out of the Trainer for as
long as they run, and the former does not put them back when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from typing_extensions import override

from lightning_unitscale.patching import StandIn, shadowed


def leaving_after(owners: Iterable[Any], leave: Callable[[], None], *, always: bool) -> ExitStack:
    """Call ``leave`` after ``on_exception`` of others, until what is returned is closed."""
    hooks = ExitStack()
    for owner in owners:
        hook = _OnException(owner.on_exception, leave, always=always)
        hooks.enter_context(shadowed(owner, on_exception=hook))
    return hooks


class _OnException(StandIn):
    """Stands in for ``on_exception`` of a callback or a strategy."""

    def __init__(self, method: Any, leave: Callable[[], None], *, always: bool) -> None:
        super().__init__(method)
        self._leave = leave
        self._always = always

    @override
    def call(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as leaving:
            leaving.callback(self._leave)
            self._method(*args, **kwargs)
            if not self._always:
                leaving.pop_all()
