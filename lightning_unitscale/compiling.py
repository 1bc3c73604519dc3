"""Check whether a compiler or an export traces the current thread, and define operators for it.

torch's own functions describe the process: while one thread compiles,
``torch.compiler.is_compiling`` and ``torch.compiler.is_exporting`` hold for every other thread too.
A step that relied on them would run unscaled. The state of a thread is in its own contexts:
``CompileContext`` of Dynamo and of a backward pass that is compiled late, ``TracingContext`` of an
export as well. Both names, and the flag of exports, were checked on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext

_LIBRARY = torch.library.Library("lightning_unitscale", "FRAGMENT")


def define_operator(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag
) -> torch._ops.OpOverload:
    """Define an operator on all devices, which compilers, fake tensors and modes see as one."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightning_unitscale::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.lightning_unitscale, name).default


def is_compiling() -> bool:
    """Check whether a compiler or an export traces this thread. Dynamo folds it to true."""
    # Dynamo has constant answers to both conditions, and traces no further.
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling()
        or compiles_frame()
        or TracingContext.try_get() is not None
    )


def is_exporting() -> bool:
    """Check whether ``torch.export`` traces. torch 2.11 reports any tracing here."""
    return torch.compiler._is_exporting_flag and is_compiling()


def compiles_frame() -> bool:
    """Check whether this thread compiles a frame, or the backward pass of one."""
    return CompileContext.current_compile_id() is not None
