"""The module that a step calls, which runs as the pipeline if the whole step is not one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_unitscale.capture.steps import ModuleSteps, steps_of
from lightning_unitscale.patching import shadowed
from lightning_unitscale.pipeline.capture import returnable_method

# The log methods of a LightningModule.
LOGS = ("log", "log_dict")
# Positional and keyword arguments of one call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class CalledSteps(ModuleSteps):
    """Captures the user's own methods of a module, and of the modules in it: ``"net.forward"``."""

    @override
    def original(self, name: str) -> Callable[..., Any]:
        """Return the user's own method, even if callbacks have put a captured one over it."""
        path, _, method = name.rpartition(".")
        if path:
            return returnable_method(self.module.get_submodule(path), method)
        steps = steps_of(self.module)
        if steps is not None and name in steps.steps:
            return steps.original(name)
        return super().original(name)


class _ReachedError(BaseException):
    """A step has called a module. Not an ``Exception``, which the step could catch."""

    def __init__(self, path: str, call: Arguments) -> None:
        self.path = path
        self.call = call


def with_most_parameters(module: nn.Module) -> list[str]:
    """Return the paths of the modules with more than half of the parameters, outermost first."""
    total = sum(parameter.numel() for parameter in module.parameters())
    return [
        path
        for path, submodule in module.named_modules()
        if 2 * sum(parameter.numel() for parameter in submodule.parameters()) > total
    ]


def without(paths: Sequence[str], path: str) -> list[str]:
    """Return the paths without ``path`` and the modules around it."""
    return [
        other for other in paths if other and other != path and not path.startswith(f"{other}.")
    ]


def first_called(
    module: nn.Module, paths: Sequence[str], run: Callable[[], Any]
) -> tuple[str, Arguments] | None:
    """Return which of the modules at ``paths`` a step calls first, and with which arguments."""

    def reach(path: str, *args: Any, **kwargs: Any) -> Any:
        raise _ReachedError(path, (args, kwargs))

    try:
        with contextlib.ExitStack() as stack:
            for path in paths:
                stack.enter_context(
                    shadowed(module.get_submodule(path), forward=partial(reach, path))
                )
            run()
    except _ReachedError as reached:
        return reached.path, reached.call
    return None


def forward_of(path: str) -> str:
    """Return the name of a module's forward as a step of :class:`CalledSteps`."""
    return f"{path}.forward" if path else "forward"


def as_attribute(path: str) -> str:
    """Return a path as an expression in the module's code: ``self.net``."""
    return f"self.{path}" if path else "self"
