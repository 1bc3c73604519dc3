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
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import graph_break_reasons

from lightning_unitscale.shadowing import shadowed

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in ')
# How often a function may fail on fake tensors before it is no longer tried: each try takes time.
_MAX_FAILURES = 4
_failures: Counter[Any] = Counter()


@contextlib.contextmanager
def passed_over() -> Iterator[None]:
    """Within this context such an error of Dynamo is a graph break, and a warning."""
    convert = convert_frame.ConvertFrame.__call__

    @functools.wraps(convert)
    def convert_or_pass_over(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except TorchRuntimeError as error:
            # Most often an error of the user's, which comes again when the function runs as it is;
            # whoever catches it has it captured the next time.
            _failures[frame.f_code] += 1
            is_last = _failures[frame.f_code] >= _MAX_FAILURES
            _report(frame.f_code, error, warn=is_last)
            return ConvertFrameReturn(apply_to_code=is_last)
        except InternalTorchDynamoError as error:
            _report(frame.f_code, error, warn=True)
            return ConvertFrameReturn()

    with shadowed(convert_frame.ConvertFrame, __call__=convert_or_pass_over):
        yield


def _report(code: Any, error: Exception, *, warn: bool) -> None:
    text = str(error)
    # Dynamo ends its message with the lines of the user that it was about to trace.
    places = _PLACE.findall(text) or [(code.co_filename, str(code.co_firstlineno))]
    file, line = places[-1][0], int(places[-1][1])
    reason = text.splitlines()[0]
    graph_break_reasons.append(
        GraphCompileReason(reason, [traceback.FrameSummary(file, line, code.co_name)])
    )
    if not warn:
        return
    warnings.warn(
        f"{file}:{line}: Dynamo fails on `{linecache.getline(file, line).strip()}` ({reason}), so "
        f"{code.co_name} runs as it is, neither rewritten nor observed but for what it calls; "
        "expected code that Dynamo captures; move that line out of the step, into a hook such as "
        "on_train_batch_start.",
        stacklevel=2,
    )
