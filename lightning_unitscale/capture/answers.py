"""Control Dynamo's answer to traced code that asks whether it is being compiled.

Some code asks, and then computes the same result in another way: by a parallel scan instead of a
loop, by an explicit mask instead of a flag, or without a check. A captured step must compute what
the uncaptured step does. So only torch and this package get the true answer. Other code gets no.

The answer no must never break a graph. Then transformers, for example, keeps its state in a
``ContextVar``, which Dynamo cannot trace. So after a no, a graph break is an error, before any of
the function has run. If the trace breaks or fails, the last asker gets yes, and the function is
traced again. The yes is kept if the trace gets further than before. Otherwise it is revoked. A
function that still breaks is captured with its break. Answers are remembered by asker.

Torch 2.11 treats all traced code as exported. From 2.12 on, and here, only exported code is.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._dynamo import convert_frame, symbolic_convert
from torch._dynamo.exc import InternalTorchDynamoError, TorchRuntimeError, Unsupported
from torch._dynamo.symbolic_convert import SpeculationLogDivergence
from torch._dynamo.variables import torch as torch_variables

from lightning_unitscale.capture.breaks import frames_of, written_name
from lightning_unitscale.compiling import is_exporting
from lightning_unitscale.patching import shadowed, shadowed_here

# The functions that answer the question. torch's old ones call the first.
_QUESTION = "is_compiling"
_IS_COMPILING = frozenset({_QUESTION, "is_dynamo_compiling"})
# torch's code (its checkpointing) and ours need the true answer.
_KNOWING = (f"{torch.__path__[0]}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")

_Traced = TypeVar("_Traced")
_FAILURES = (InternalTorchDynamoError, TorchRuntimeError, Unsupported)

# The innermost functions that asked, as (file, function), since helpers often ask for others.
_Asker = tuple[tuple[str, str], ...]
# The end of a trace: (file, line) of the functions around, outermost first.
_Place = tuple[tuple[str, int], ...]


class _Told(threading.local):
    """Answers given so far. Threads wait for each other in Dynamo, not around it."""

    def __init__(self) -> None:
        self.no: list[_Asker] = []  # given since the capture of the current function began
        self.yes: set[_Asker] = set()
        # This context is left with that function. Without it, graphs break as usual.
        self.strictness: contextlib.ExitStack | None = None
        self.insists = False  # on one graph for the current function


_TOLD = _Told()


def telling(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that captures as ``convert`` does, once for each answer that it needs."""

    def convert_or_tell(*args: Any, **kwargs: Any) -> Any:
        try:
            return _tell_until_traced(lambda: convert(*args, **kwargs))
        except Unsupported:
            # The state that Dynamo keeps of the attempt would turn its next error into a fatal one.
            if (box := getattr(args[0]._inner_convert, "_box", None)) is not None:
                box.error_on_graph_break = None
            return convert(*args, **kwargs)

    return convert_or_tell


@contextlib.contextmanager
def plain_answers() -> Iterator[None]:
    """Let Dynamo answer the code of users and libraries that it is not being compiled."""
    usual = torch_variables.tracing_state_functions
    # Dynamo calls this function whenever traced code asks.
    with shadowed_here(torch_variables, tracing_state_functions=lambda: _Answers(usual())):
        yield


def trace_one_graph(trace: Callable[[], _Traced]) -> _Traced:
    """Return the result of ``trace``, which captures one graph, and forget its yes answers."""
    before = set(_TOLD.yes)
    try:
        return _tell_until_traced(trace)
    finally:
        _TOLD.yes.intersection_update(before)


def insist_on_one_graph() -> bool:
    """Turn breaks of the traced graph into errors, and return whether that was possible."""
    if _TOLD.strictness is None:
        return False
    if not _TOLD.insists:
        # Dynamo's own setting is one for all threads, and other threads write it meanwhile.
        for asks in (symbolic_convert, convert_frame):
            strict = shadowed_here(asks, _get_error_on_graph_break=lambda: True)
            _TOLD.strictness.enter_context(strict)
        _TOLD.strictness.enter_context(shadowed(_TOLD, insists=True))
    return True


def _tell_until_traced(trace: Callable[[], _Traced]) -> _Traced:
    """Trace, and while that fails answer yes to another asker and trace again."""
    ended: _Place | None = None
    tried: set[_Asker] = set()
    last: _Asker | None = None
    is_strict = False
    while True:
        _TOLD.no.clear()
        try:
            with contextlib.ExitStack() as strictness, shadowed(_TOLD, strictness=strictness):
                if is_strict:  # even if no remaining asker gets no
                    insist_on_one_graph()
                return trace()
        except SpeculationLogDivergence:
            # Dynamo restarted the function, and breaks became errors at another line.
            if is_strict:
                raise
            is_strict = True
        except _FAILURES as error:
            is_strict = True
            # The message of an export's error of fake tensors does not have the lines.
            frames = getattr(error, "real_stack", None) or frames_of(error)
            place = tuple((frame.filename, frame.lineno or 0) for frame in frames)
            if ended is None or _is_further(place, ended):
                ended = place
            elif last is not None:
                _TOLD.yes.discard(last)
            last = next((asker for asker in reversed(_TOLD.no) if asker not in tried), None)
            if last is None:
                raise
            tried.add(last)
            _TOLD.yes.add(last)


def _is_further(place: _Place, before: _Place) -> bool:
    """Check whether a trace that ended at ``place`` got past the one that ended at ``before``."""
    for (file, line), (file_before, line_before) in zip(place, before, strict=False):
        if (file, line) != (file_before, line_before):
            return file == file_before and line > line_before
    # Within the same call, a trace got further if it ends outside the code that failed before.
    return len(place) < len(before)


class _Answers(dict[Any, Any]):
    """Dynamo's answers to traced code about the state of tracing."""

    def __getitem__(self, function: Any) -> Any:
        if function is torch.compiler.is_exporting:
            return is_exporting()
        answer = super().__getitem__(function)
        if getattr(function, "__name__", "") not in _IS_COMPILING:
            return answer
        asker = _asker(sys._getframe(1))
        if asker in _TOLD.yes or asker[0][0].startswith(_KNOWING):
            return answer
        _TOLD.no.append(asker)
        # From here on breaks are errors: nothing of the function has run when one is raised.
        insist_on_one_graph()
        return False


def _asker(frame: Any) -> _Asker:
    """Return the askers among the functions that Dynamo is inlining, innermost first."""
    translator = frame.f_locals.get("tx")
    callers: list[tuple[str, str]] = []
    while translator is not None and len(callers) < 3:
        code = translator.f_code
        if code.co_name != _QUESTION:
            callers.append((str(code.co_filename), written_name(code.co_name)))
        translator = getattr(translator, "parent", None)
    return tuple(callers) or (("", ""),)
