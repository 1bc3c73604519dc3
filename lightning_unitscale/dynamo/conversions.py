"""What Dynamo captures while a step runs: when it begins with a function, and where it gives up.

Private names used here were checked on torch 2.13 and 2.11: ``ConvertFrame``, which is called once
for each function to capture, and returns when its graph is compiled; ``ConvertFrameAssert``, which
it asks; ``guarded_code`` of what it returns, ``frame_exec_strategy`` of an
error by which it gives up on a function, and ``GraphCompileReason``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.utils import graph_break_reasons

from lightning_unitscale.dynamo.breaks import frames_of
from lightning_unitscale.patching import shadowed_here


@contextlib.contextmanager
def around_captures(enter: Callable[[CodeType], AbstractContextManager[None]]) -> Iterator[None]:
    """Within this context every function is captured within a context of ours."""
    convert = convert_frame.ConvertFrame.__call__
    attempt = convert_frame.ConvertFrameAssert.__call__
    refusals: list[Unsupported] = []

    @functools.wraps(convert)
    def convert_within(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        refusals.clear()
        with enter(frame.f_code):
            result = convert(self, frame, *args, **kwargs)
        if refusals and result.guarded_code is None:
            # Of what breaks a graph and cannot be resumed, Dynamo itself notes nothing.
            error = refusals.pop()
            graph_break_reasons.append(GraphCompileReason(str(error), frames_of(error)))
        return result

    @functools.wraps(attempt)
    def attempt_and_note(*args: Any, **kwargs: Any) -> Any:
        try:
            return attempt(*args, **kwargs)
        except Unsupported as error:
            # In a function that was captured too often, nothing breaks the graph.
            if getattr(error, "frame_exec_strategy", None) is None:
                refusals.append(error)
            raise

    with (
        shadowed_here(convert_frame.ConvertFrame, __call__=convert_within),
        shadowed_here(convert_frame.ConvertFrameAssert, __call__=attempt_and_note),
    ):
        yield
