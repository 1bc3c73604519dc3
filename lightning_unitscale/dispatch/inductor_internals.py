"""Private names of Inductor and of what calls it; checked on torch 2.13.

``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass`` run on the forward and on the
backward graph of AOTAutograd, before and after Inductor decides whether a product and a sum run as
one; its decisions should be those of a graph without units. A pass without a ``uuid`` keeps both of
Inductor's caches out, so that nobody else is handed a rewritten graph and no rewritten one is
missed. The identifier of a compilation is the same for a graph and its backward graph, which may
be compiled much later, by another thread. Frames of ``CompiledFxGraph.__call__`` tell which
compiled graph calls a kernel, and those of ``_compile_fx_inner`` that Inductor is only trying
kernels out.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext, detect_fake_mode
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

fake_mode_of: Callable[[Any], Any] = detect_fake_mode


class GraphPass(CustomGraphPass):
    """A pass over what Inductor compiles, after the passes that the user has set.

    Args:
        setting: Which of Inductor's settings it belongs to.
        rewrite: Called with each graph.
    """

    def __init__(self, setting: str, rewrite: Callable[[fx.Graph], None]) -> None:
        self._setting = setting
        self._rewrite = rewrite
        self._before: Any = None

    def install(self) -> None:
        """Put it into Inductor's configuration."""
        self._before = getattr(config, self._setting)
        setattr(config, self._setting, self)

    def remove(self) -> None:
        """Put the user's own back, unless he has set another one meanwhile."""
        if getattr(config, self._setting) is self:
            setattr(config, self._setting, self._before)

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes, then this one."""
        before = self._before
        for user_pass in before if isinstance(before, (list, tuple)) else [before]:
            if user_pass is not None:
                user_pass(graph)
        self._rewrite(graph)

    def uuid(self) -> None:
        """None: what is compiled with it is not cached."""


def compile_id() -> tuple[int | None, int | None] | None:
    """Numbers of the frame that is being compiled, and of its compilation."""
    current = CompileContext.current_compile_id()
    return None if current is None else (current.frame_id, current.frame_compile_id)


def codes() -> tuple[CodeType, CodeType] | None:
    """Code that calls a compiled graph, and code that compiles; ``None`` where none ever has."""
    if "torch._inductor.compile_fx" not in sys.modules:
        return None
    return _codes()


@functools.cache
def _codes() -> tuple[CodeType, CodeType]:
    from torch._inductor import compile_fx, output_code

    calls: CodeType = output_code.CompiledFxGraph.__call__.__code__
    return calls, inspect.unwrap(compile_fx._compile_fx_inner).__code__


def frame_of(depth: int, wanted: tuple[CodeType, ...]) -> FrameType | None:
    """The innermost frame of the caller that runs some code.

    Args:
        depth: Frames to leave out.
        wanted: The code.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code not in wanted:
        frame = frame.f_back
    return frame


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module, or a part or a method of it, is one that the user has compiled."""
    for child in module.modules():
        if hasattr(child, "_orig_mod") or child._compiled_call_impl is not None:
            return True
    methods = vars(module).values()
    return any(hasattr(method, "_torchdynamo_orig_callable") for method in methods)
