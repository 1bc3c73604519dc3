"""A session's first step compiles again what the user compiled and what was compiled without it.

Dynamo keeps what it compiles with the code of a function, for every module of the class and for
every later fit. What was compiled in a plain run has no operators of ours, so a later session would
run it as it is. What was compiled in another session serves this one as well.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_unitscale.dispatch.compiler_internals import (
    codes,
    compiled_parts,
    is_by_inductor,
    keeping_whole,
    num_compiled,
)
from lightning_unitscale.dispatch.owners import INSTALLED
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.graph.operators import RULES

# Sessions that have begun a step.
_met: weakref.WeakSet[ProductSession] = weakref.WeakSet()


class _Known:
    """The number of the next graph, if all that Dynamo keeps was compiled for sessions."""

    number = 0


def note_compiled() -> None:
    """Note that a graph is being compiled for a session."""
    _Known.number += 1


def running_compiled(session: ProductSession) -> AbstractContextManager[Any]:
    """A context for a step, in which what the user has compiled has its units and formats."""
    # For formats Inductor leaves small products whole, and so all is compiled again; what another
    # backend compiles runs uncompiled.
    is_first, module = session not in _met, session.sites.module
    _met.add(session)
    if module is None or not (session.numerics or (is_first and session.rewrites_graphs)):
        return contextlib.nullcontext()
    parts = compiled_parts(module)
    # Functions that a module calls may be compiled as well.
    has_compiled = bool(parts) or codes() is not None
    # Units need no more of another backend than that it calls torch's kernels.
    is_possible = not session.numerics or all(map(is_by_inductor, parts))
    if is_first and is_possible:
        if has_compiled:
            number = num_compiled()
            if session.numerics or number != _Known.number:
                torch.compiler.reset()
            _Known.number = number + 1
        if session.numerics:
            INSTALLED.callback(keeping_whole([rule.operator for rule in RULES]))
    if is_possible:
        return contextlib.nullcontext()
    if is_first:
        warnings.warn(
            f"{type(module).__name__} has parts that were compiled by another backend than "
            "Inductor, whose products cannot be rounded, so they run uncompiled; expected "
            "torch.compile(backend='inductor'), its default, or none.",
            stacklevel=4,
        )
    return torch.compiler.set_stance("force_eager")
