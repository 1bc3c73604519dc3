"""What Dynamo captures while a step runs: when it begins with a function, and how long it takes.

Private names used here were checked on torch 2.13 and 2.11: ``ConvertFrame``, which is called once
for each function to capture, and returns when its graph is compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

from torch._dynamo import convert_frame

from lightning_unitscale.patching import shadowed


@contextlib.contextmanager
def around_captures(enter: Callable[[CodeType], AbstractContextManager[None]]) -> Iterator[None]:
    """Within this context every function is captured within a context of ours.

    Args:
        enter: Makes that context, given the code of the function that is about to be captured.
    """
    convert = convert_frame.ConvertFrame.__call__

    @functools.wraps(convert)
    def convert_within(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        with enter(frame.f_code):
            return convert(self, frame, *args, **kwargs)

    with shadowed(convert_frame.ConvertFrame, __call__=convert_within):
        yield
