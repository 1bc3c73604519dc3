"""Whether a compiler or an export traces what this thread runs.

torch's own answer is one of the process: while one thread compiles, ``torch.compiler.is_compiling``
says so to every other thread that asks, and ``torch.compiler.is_exporting`` likewise. A step that
believed it would run without its units. What a thread traces is in contexts of that thread alone:
``CompileContext`` of Dynamo and of a backward pass that is compiled late, ``TracingContext`` of an
export as well. Both names, and the flag of exports, were checked on torch 2.13.
"""

from __future__ import annotations

import torch
from torch._guards import CompileContext, TracingContext


def is_compiling() -> bool:
    """Whether a compiler or an export traces what this thread runs; Dynamo folds it to true."""
    # Dynamo knows the answers to both questions, and looks no further.
    return torch.compiler.is_compiling() and (
        torch.compiler.is_dynamo_compiling()
        or compiles_frame()
        or TracingContext.try_get() is not None
    )


def is_exporting() -> bool:
    """Whether ``torch.export`` traces; torch 2.11's own says so of all that is traced."""
    return torch.compiler._is_exporting_flag and is_compiling()


def compiles_frame() -> bool:
    """Whether this thread compiles a frame, or the backward pass of one."""
    return CompileContext.current_compile_id() is not None
