"""Explain in one line why Dynamo does not capture something, with the user's line of code.

Dynamo's own texts are pages of hints for its developers. Set ``TORCH_LOGS=graph_breaks`` to see
them.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import logging
import os
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import exc, utils
from torch._dynamo.utils import graph_break_reasons, guard_failures
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_unitscale.patching import nothing, shadowed

_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
# This includes packages of other environments that a path file or PYTHONPATH adds.
_INSTALLED_ANYWHERE = tuple(
    f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")
)
_OWN_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Code between a step and the code that it calls. Graphs have no file.
_IN_BETWEEN = (f"{torch.__path__[0]}{os.sep}", _OWN_PACKAGE, "<")
# Torch's code that traces or runs graphs, and its file that also calls uncaptured functions.
_GRAPH_CODE = tuple(
    f"{torch.__path__[0]}{os.sep}{name}{os.sep}" for name in ("_functorch", "_dynamo", "fx")
)
_ENTERS_CODE = "eval_frame.py"
# Errors that no operator raises.
_NOT_OF_TENSORS = (ArithmeticError, AssertionError, EOFError, KeyError, OSError)
_TRAINERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("lightning", "pytorch_lightning"))
_EXPLANATION = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_FAILED_WITHOUT_NUMBERS = re.compile(r"Dynamo failed to run FX node.*\): got (.*)$", re.MULTILINE)
# Hints for Dynamo's developers stand in the same sentence as the function. An operator whose result
# depends on values fails within this package's backend, and only its name is the error.
_SKIPPED = re.compile(
    r"marked that the function `([^`]+)`|Attempted to call `([^`]+)` with config|"
    r"^Backend compiler `[^`]+` failed with (\w+\.\w+\.\w+)(?=\.?$|\. )"
)
_ADDRESS = re.compile(" at 0x[0-9A-Fa-f]+")  # another one in each process
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_\d+$")
# The id of the captured code, the condition, and the line that the guard comes from.
_GUARD = re.compile(r"\d+/(\d+)\S*: ([^#\n]*)")
_MAX_REASON = 160
_MAX_REASONS = 3
# One prints errors that are also raised. The other prints graph breaks that are also reported.
_PRINTERS = ("torch._subclasses.fake_tensor", "torch._dynamo.variables.tensor")


class Reason(str):
    """One line about code that Dynamo does not capture, and where it is."""

    why: str
    lines: Sequence[Any]  # lines that Dynamo was about to trace, outermost first

    @classmethod
    def of(cls, text: str, lines: Sequence[Any] = ()) -> Reason:
        """Shorten one of Dynamo's texts, or give the line that it has no text for."""
        if lines and not short_reason(text):
            text = f"Dynamo does not capture `{_code_at(lines[-1])}`"
        reason = cls(_one_line(text, lines))
        reason.why, reason.lines = short_reason(text), lines
        return reason

    @property
    def where(self) -> str:
        """Return the user's line, or else a library's, with its code, or an empty text."""
        if not self.lines:
            return ""
        line = _users_line(self.lines) or self.lines[-1]
        code = _code_at(line)
        place = f"{line.filename}:{line.lineno}"
        return f"`{code}` at {place}" if code else place


def _code_at(line: Any) -> str:
    return linecache.getline(line.filename, line.lineno or 0).strip()


def graph_breaks_since(count: int) -> list[Reason]:
    """Return the reasons of Dynamo's graph breaks after the first ``count``."""
    breaks: dict[Any, tuple[str, Sequence[Any]]] = {}
    for graph_break in graph_break_reasons[count:]:
        frames = graph_break.user_stack or ()
        line = (frames[-1].filename, frames[-1].lineno) if frames else None
        text = str(graph_break.reason)
        # Each of the functions around a line breaks there. The outermost comes first.
        breaks.setdefault((line, short_reason(text)), (text, frames))
    return [Reason.of(text, frames) for text, frames in breaks.values()]


def num_graph_breaks() -> int:
    """Return the number of graph breaks that Dynamo has met in this process."""
    return len(graph_break_reasons)


def is_of_dynamo(error: BaseException) -> bool:
    """Check whether Dynamo raised the error itself, rather than code that it ran."""
    # Dynamo does not wrap its own assertions, but notes which capture has failed.
    is_passed_on = hasattr(error, "compile_id")
    return is_passed_on or isinstance(error, exc.TorchDynamoException | exc.FailOnRecompileLimitHit)


def reason_of(error: BaseException) -> Reason:
    """Return an error of Dynamo's as one line."""
    if isinstance(error, exc.FailOnRecompileLimitHit):
        error = error.__context__ or error  # the context is more specific
    return Reason.of(str(error), frames_of(error))


def reason_raised(error: BaseException) -> Reason:
    """Return any error raised during the capture of a step as one line, with the user's line."""
    if is_of_dynamo(error):
        return reason_of(error)
    raised = traceback.extract_tb(error.__traceback__)
    lines = [line for line in raised if not _is_in_between(line.filename)]
    return Reason.of(str(error).strip() or type(error).__name__, lines)


def is_users_own(error: BaseException) -> bool:
    """Check whether uncaptured code of the user's raised an error, rather than torch."""
    frames = [(frame.f_code, at) for frame, at in _raised_in(error)]
    if not frames or any(_runs_or_traces_graphs(code.co_filename) for code, _ in frames):
        return False
    code, at = frames[-1]
    if _is_in_between(code.co_filename):
        return False
    is_raise = dis.opname[code.co_code[at]] == "RAISE_VARARGS"
    is_known = is_raise and not is_installed_file(code.co_filename)
    return is_known or isinstance(error, _NOT_OF_TENSORS)


def _raised_in(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that an error has left, outermost first, and the instruction in each."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lasti
        step = step.tb_next


def _runs_or_traces_graphs(file: str) -> bool:
    is_graph = file.startswith("<eval_with_key>")
    return is_graph or (file.startswith(_GRAPH_CODE) and not file.endswith(_ENTERS_CODE))


def last_recapture(function: CodeType) -> str:
    """Return the guard that failed last, which made Dynamo recapture a function."""
    # All captures of the function are checked. The last has the highest number.
    reasons = filter(None, map(_GUARD.match, guard_failures.get(function, ())))
    last = max(reasons, key=lambda match: int(match.group(1)), default=None)
    text = last.group(2).strip() if last else ""
    return f"`{textwrap.shorten(text, _MAX_REASON, placeholder=' ...')}`" if text else ""


def calling_line() -> str:
    """Return the calling line: the user's, or else of a library other than torch and Lightning."""
    frames = [frame for frame in traceback.extract_stack() if not _is_in_between(frame.filename)]
    line = _users_line(frames) or (frames[-1] if frames else None)
    return "" if line is None else f"{line.filename}:{line.lineno}"


def frames_of(error: BaseException) -> list[FrameSummary]:
    """Return the lines that Dynamo was about to trace, from the end of its message."""
    return [
        FrameSummary(file, int(line), function)
        for file, line, function in _FRAME.findall(str(error))
    ]


def short_reason(text: str) -> str:
    """Return the sentence of Dynamo's text that names the code that it does not capture."""
    match = _FAILED_WITHOUT_NUMBERS.search(text) or _EXPLANATION.search(text)
    lines = (match.group(1) if match else text).strip().splitlines() or [""]
    if (skipped := _SKIPPED.search(lines[0])) is not None:
        return f"Dynamo does not capture `{skipped.group(skipped.lastindex or 0)}`"
    line = _ADDRESS.sub("", lines[0])
    return textwrap.shorten(line.rstrip(".: "), _MAX_REASON, placeholder=" ...")


def joined_reasons(reasons: Sequence[str]) -> str:
    """Join the first few reasons for a message, each once."""
    # Breaks in this package's own code follow from others, and the user cannot change them.
    several = list(dict.fromkeys(one for one in reasons if not _is_ours(one)) or reasons)
    more = len(several) - _MAX_REASONS
    return "; ".join(several[:_MAX_REASONS]) + (f"; and {more} more" if more > 0 else "")


def joined_lines(breaks: Sequence[str]) -> str:
    """Join the lines of the first few graph breaks for a message, each once."""
    placed = [one for one in breaks if " at " in one and not _is_ours(one)]
    return joined_reasons([one.rsplit(" at ", 1)[-1] for one in placed or breaks])


def _is_ours(reason: str) -> bool:
    lines = reason.lines if isinstance(reason, Reason) else ()
    return bool(lines) and all(line.filename.startswith(_OWN_PACKAGE) for line in lines)


def wants_dynamos_texts() -> bool:
    """Check whether the user has asked for Dynamo's own texts."""
    return bool(os.environ.get("TORCH_LOGS"))


@contextlib.contextmanager
def without_dynamos_texts() -> Iterator[None]:
    """Stop Dynamo from printing errors that are raised or reported anyway."""
    with contextlib.ExitStack() as stack:
        if not wants_dynamos_texts():
            stack.enter_context(shadowed(utils, warn_once=nothing))
            for name in _PRINTERS:
                stack.enter_context(shadowed(logging.getLogger(name), disabled=True))
        yield


def is_watched() -> bool:
    """Check whether a mode such as ``FlopCounterMode`` sees every operation of the calling code."""
    return torch._C._len_torch_dispatch_stack() > 0


unwatched = _disable_current_modes  # a context without these modes


_is_followed: dict[type, bool] = {}  # the cached result for each class


def not_followed(inputs: Any) -> str | None:
    """Return the class of an input whose ``__torch_function__`` Dynamo does not capture."""
    # It would be traced in pieces, with other results or errors: MONAI's `MetaTensor`.
    for value in tree_leaves(inputs):
        kind = type(value)
        if kind is Tensor or not isinstance(value, Tensor) or not _takes_part(kind):
            continue
        if kind not in _is_followed:
            _is_followed[kind] = _can_follow(value)
        if not _is_followed[kind]:
            return kind.__name__
    return None


def _takes_part(kind: type) -> bool:
    # For parameters, and for classes that switch it off, this is a function written in C.
    function = getattr(kind.__torch_function__, "__func__", None)  # type: ignore[attr-defined]
    return function not in {None, getattr(Tensor.__torch_function__, "__func__", None)}


def _can_follow(tensor: Tensor) -> bool:
    before = _attributes(type(tensor))
    try:
        with torch.no_grad():
            torch.compile(_some_operations, backend="eager", fullgraph=True)(tensor)
    except Exception:
        return False
    # Dynamo (2.14) calls ``__torch_function__`` more often than a step does, also when it writes
    # into its class.
    return [*map(id, before)] == [*map(id, _attributes(type(tensor)))]


def _attributes(kind: type) -> list[Any]:
    classes = kind.__mro__[: kind.__mro__.index(Tensor)]
    return [value for each in classes for value in vars(each).values()]


def _some_operations(x: Tensor) -> Tensor:
    doubled = (x * 2).view(x.shape)
    return torch.stack([doubled, doubled]).clone()


def _one_line(text: str, frames: Sequence[Any]) -> str:
    reason = short_reason(text)
    if not frames:
        return reason
    inner = frames[-1]
    users = _users_line(frames)
    if users is None or users is inner:
        return f"{reason} at {inner.filename}:{inner.lineno}"
    file = "/".join(Path(inner.filename).parts[-3:])
    return f"{reason} at {users.filename}:{users.lineno} (in {file}:{inner.lineno})"


def _users_line(frames: Sequence[Any]) -> Any:
    """Return the innermost line of the user's own code, if there is one."""
    for frame in reversed(frames):
        file = frame.filename
        if not is_installed_file(file) and not file.startswith((_OWN_PACKAGE, "<frozen")):
            return frame
    return None


def _is_in_between(file: str) -> bool:
    return file.startswith(_IN_BETWEEN) or any(name in file for name in _TRAINERS)


def written_name(function: str) -> str:
    """Return the name of a function, also of its rest after a break, which Dynamo names anew."""
    return _RESUMED.sub(r"\1", function)


def is_installed_file(file: str) -> bool:
    """Check whether a file belongs to Python or an installed package, and not to the user."""
    return file.startswith(_INSTALLED) or any(part in file for part in _INSTALLED_ANYWHERE)
