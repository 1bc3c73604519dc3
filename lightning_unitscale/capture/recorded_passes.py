"""Where code may take gradients of gradients, read off the code: before any of it has run."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

from lightning_unitscale.capture.growing_lists import codes_of, reachable

_OPTION = "create_graph"


def find_recorded_pass(module: nn.Module, method: Callable[..., Any]) -> str | None:
    """Where the user's code that a method reaches mentions ``create_graph``, if anywhere."""
    for function in reachable(module, method):
        for code in codes_of(function.__code__):
            if _mentions_option(code):
                return f"{code.co_filename}:{code.co_firstlineno}"
    return None


def _mentions_option(code: CodeType) -> bool:
    # Names of keyword arguments of a call are a tuple among the constants.
    keywords = [constant for constant in code.co_consts if isinstance(constant, tuple)]
    return _OPTION in code.co_consts or any(_OPTION in names for names in keywords)
