"""Who calls a torch function: the modules whose ``forward`` is running, told by Python's frames.

Nothing is hung on the modules for it, so that there is nothing to take away.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

_MODULE_CALL = nn.Module.__call__.__code__
_CHECKPOINT = CheckpointFunction.forward.__code__
_CHECKPOINT_AGAIN = CheckpointFunction.backward.__code__
_BACKWARD = frozenset({torch.autograd.backward.__code__, torch.autograd.grad.__code__})


@dataclass(frozen=True)
class Caller:
    """Where in a step a torch function is called.

    Attributes:
        path: Path of the innermost module; empty for the root.
        checkpoints: The reentrant checkpoints around the call, innermost first, by identity.
        again: The reentrant checkpoint that runs the call a second time, for its gradients.
    """

    path: str
    checkpoints: tuple[int, ...] = ()
    again: int | None = None


class Callers:
    """Finds the caller of a torch function.

    Args:
        module: The root module.
        top: Code of the function that calls the step: a call that is not below it is no part of
            the step.
        ignored: Code of functions whose calls are no part of the model either: an optimizer's
            step, a logger. What they call by an argument of theirs, a closure, is part of it.
    """

    def __init__(self, module: nn.Module, top: CodeType, ignored: Collection[CodeType]) -> None:
        self._paths = {id(one): path for path, one in module.named_modules()}
        self._top = top
        self._ignored = frozenset(ignored)

    def find(self, frame: FrameType | None) -> Caller | None:
        """The caller whose code runs in ``frame``; ``None`` for what is no part of the step."""
        path: str | None = None
        checkpoints: list[int] = []
        first = frame
        while frame is not None:
            code = frame.f_code
            if code is _MODULE_CALL:
                if path is None:
                    path = self._paths.get(id(frame.f_locals["self"]))
            elif code is self._top:
                return Caller(path or "", tuple(checkpoints))
            elif code is _CHECKPOINT:
                checkpoints.append(_context(frame))
            elif code is _CHECKPOINT_AGAIN:
                return Caller(path or "", tuple(checkpoints), _context(frame))
            elif code in _BACKWARD:
                # Autograd functions in Python, and checkpoints that keep their first results.
                return None
            elif code in self._ignored and not _is_below_closure(first, frame):
                return None
            frame = frame.f_back
        return None


def _context(frame: FrameType) -> int:
    context: Any = frame.f_locals["ctx"]
    return id(context)


def _is_below_closure(frame: FrameType | None, outer: FrameType) -> bool:
    """Whether ``frame`` runs for a function that ``outer`` was given to call."""
    given = outer.f_locals
    arguments = (given.get("closure"), *given.get("args", ()), *given.get("kwargs", {}).values())
    closures = {code for code in map(_code_of, arguments) if code is not None}
    while closures and frame is not None and frame is not outer:
        if frame.f_code in closures:
            return True
        frame = frame.f_back
    return False


def _code_of(value: Any) -> CodeType | None:
    """The code of a function, a method, a partial call of them, or an object that is called."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, (FunctionType, MethodType)) and callable(value):
        value = type(value).__call__
    code: CodeType | None = getattr(value, "__code__", None)
    return code
