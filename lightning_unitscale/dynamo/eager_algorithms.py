"""Have traced code take the algorithm that it takes when nobody traces it.

Some code asks whether it is being compiled and then computes the same thing in another way: by a
parallel scan instead of a loop, by an explicit mask instead of a flag, without a check. The result
has other last bits, or there is none, so that a captured step would no longer be the plain step. So
only torch itself and this package are told that they are compiled, and code that otherwise runs
into something on which Dynamo fails, which is what it asked for.

Torch 2.11 says of whatever it traces that it is exported, for which Hugging Face's models give
attention an explicit mask; from 2.12 on, and here, only an export is.

Private names used here were checked on torch 2.13 and 2.11: ``tracing_state_functions``, ``tx`` in
the handler that answers the question, ``ConvertFrame``, which is called once per function to
capture, the three errors, and ``_is_exporting_flag``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._dynamo import convert_frame
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError, Unsupported
from torch._dynamo.variables import torch as torch_variables

from lightning_unitscale.patching import shadowed

# All the names of the question; torch's old ones are functions that ask it by the first.
_QUESTION = "is_compiling"
_IS_COMPILING = frozenset({_QUESTION, "is_dynamo_compiling"})
# torch's code (its checkpointing) knows what it needs to be told, and so does ours.
_KNOWING = (f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_\d+$")

_Traced = TypeVar("_Traced")
_FAILURES = (InternalTorchDynamoError, TorchRuntimeError)

# The innermost functions that asked, as (file, function): it is often done through a helper or two.
_Asker = tuple[tuple[str, str], ...]
# Who was told no since the function that is being captured was begun, and who is told yes.
_told_no: list[_Asker] = []
_told_yes: set[_Asker] = set()


@contextlib.contextmanager
def plain_answers() -> Iterator[None]:
    """Within this context Dynamo tells the code of users and libraries that nobody compiles."""
    usual = torch_variables.tracing_state_functions
    convert = convert_frame.ConvertFrame.__call__

    @functools.wraps(convert)
    def convert_or_tell(*args: Any, **kwargs: Any) -> Any:
        return _tell_until_traced(lambda: convert(*args, **kwargs), _FAILURES)

    with (
        # Dynamo looks this function up whenever traced code asks.
        shadowed(torch_variables, tracing_state_functions=lambda: _Answers(usual())),
        shadowed(convert_frame.ConvertFrame, __call__=convert_or_tell),
    ):
        yield


def trace_one_graph(trace: Callable[[], _Traced]) -> _Traced:
    """The result of ``trace``, which captures a function as one graph under ``plain_answers``.

    Where a step would break its graph, one graph fails: then too the last asker is told yes, but
    only here, so that the capture of a step does not depend on what was exported before it.
    """
    before = set(_told_yes)
    try:
        return _tell_until_traced(trace, (*_FAILURES, Unsupported))
    finally:
        _told_yes.intersection_update(before)


def _tell_until_traced(
    trace: Callable[[], _Traced], failures: tuple[type[Exception], ...]
) -> _Traced:
    """Trace, and after each failure tell the last asker yes and trace again."""
    told: list[_Asker] = []
    while True:
        _told_no.clear()
        try:
            return trace()
        except failures:
            if not _told_no:
                _told_yes.difference_update(told)
                raise
            # Nothing of the function has run by now.
            told.append(_told_no[-1])
            _told_yes.add(_told_no[-1])


class _Answers(dict[Any, Any]):
    """What Dynamo tells traced code about the state of tracing."""

    def __getitem__(self, function: Any) -> Any:
        if function is torch.compiler.is_exporting:
            return torch.compiler._is_exporting_flag
        answer = super().__getitem__(function)
        if getattr(function, "__name__", "") not in _IS_COMPILING:
            return answer
        asker = _asker(sys._getframe(1))
        if asker in _told_yes or asker[0][0].startswith(_KNOWING):
            return answer
        _told_no.append(asker)
        return False


def _asker(frame: Any) -> _Asker:
    """Those who ask among the functions that Dynamo is inlining, innermost first.

    Args:
        frame: That of Dynamo's handler.
    """
    translator = frame.f_locals.get("tx")
    callers: list[tuple[str, str]] = []
    while translator is not None and len(callers) < 3:
        code = translator.f_code
        if code.co_name != _QUESTION:
            callers.append((str(code.co_filename), _RESUMED.sub(r"\1", code.co_name)))
        translator = getattr(translator, "parent", None)
    return tuple(callers) or (("", ""),)
