"""Have Dynamo pass over a function on which it fails itself, instead of ending the run.

What it cannot capture, Dynamo lets run as it is: that is a graph break. On some code it fails by an
error of its own instead, or by one of its fake tensors, before any of the function has run. The
function can run as it is then, too, and what it calls is captured as after a graph break. An error
of the user's (shapes that do not fit) is then raised where and as it is without Dynamo.

Private names used here were checked on torch 2.13 and 2.11: ``ConvertFrame``, which is called once
per function to capture, ``ConvertFrameReturn``, whose default is to leave the function alone,
``GraphCompileReason``, and the two errors.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import warnings
from collections import Counter
from collections.abc import Iterator
from traceback import FrameSummary
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import graph_break_reasons

from lightning_unitscale.graph.graph_breaks import frames_of, short_reason
from lightning_unitscale.shadowing import shadowed

# How often a function may fail on fake tensors before it is no longer tried: each try takes time.
_MAX_FAILURES = 4
_failures: Counter[Any] = Counter()


@contextlib.contextmanager
def passed_over() -> Iterator[None]:
    """Within this context such an error of Dynamo is a graph break, and a warning."""
    convert = convert_frame.ConvertFrame.__call__
    warned: set[tuple[str, int]] = set()

    @functools.wraps(convert)
    def convert_or_pass_over(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except TorchRuntimeError as error:
            # Most often an error of the user's, which comes again when the function runs as it is;
            # whoever catches it has it captured the next time.
            _failures[frame.f_code] += 1
            is_last = _failures[frame.f_code] >= _MAX_FAILURES
            _report(frame.f_code, error, warned, warn=is_last)
            return ConvertFrameReturn(apply_to_code=is_last)
        except InternalTorchDynamoError as error:
            _report(frame.f_code, error, warned, warn=True)
            return ConvertFrameReturn()

    with shadowed(convert_frame.ConvertFrame, __call__=convert_or_pass_over):
        yield


def _report(code: Any, error: Exception, warned: set[tuple[str, int]], *, warn: bool) -> None:
    frames = frames_of(error) or [FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]
    graph_break_reasons.append(GraphCompileReason(str(error), frames))
    file, line = frames[-1].filename, frames[-1].lineno or 0
    # Each of the functions around a line fails on it.
    if not warn or (file, line) in warned:
        return
    warned.add((file, line))
    failing = linecache.getline(file, line).strip()
    warnings.warn(
        f"{file}:{line}: Dynamo fails on `{failing}` ({short_reason(str(error))}), so "
        f"{code.co_name} runs as it is, neither rewritten nor observed but for what it calls; "
        "expected code that Dynamo captures; move that line out of the step, into a hook such as "
        "on_train_batch_start.",
        stacklevel=2,
    )
