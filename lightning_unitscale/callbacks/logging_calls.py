"""Calls by which a step writes to its logger without ``self.log``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl

from lightning_unitscale.graph.mentioned import functions_of, names_in

_LOGGER = frozenset({"logger", "loggers"})
_EXPERIMENT = frozenset({"experiment"})
# As loggers and what is behind them (TensorBoard's writer, a run of Weights & Biases) name them.
_PREFIXES = ("log", "add_")


def logging_calls(module: pl.LightningModule, trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """The calls, as pairs of an object and the name of its method.

    Only of loggers that the module's code mentions, and of what is behind them only if that is
    mentioned too: to look there makes files.
    """
    kind: Any = type(module)
    names = _names_in_code(kind)
    if not names & _LOGGER:
        return
    for logger in trainer.loggers:
        behind = [getattr(logger, "experiment", None)] if names & _EXPERIMENT else []
        for one in (logger, *behind):
            kind = type(one)
            if hasattr(one, "__dict__"):
                yield from ((one, name) for name in _methods(kind))


@functools.cache
def _names_in_code(kind: type) -> frozenset[str]:
    """Names that the methods of a user's class and its bases mention."""
    own = (one for one in kind.__mro__ if one.__module__.partition(".")[0] != "lightning")
    return frozenset(
        name for one in own for function in functions_of(one) for name in names_in(function)
    )


@functools.cache
def _methods(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for name in dir(kind)
        if name.startswith(_PREFIXES) and inspect.isfunction(inspect.getattr_static(kind, name))
    )
