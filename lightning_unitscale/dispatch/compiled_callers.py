"""What calls a kernel: a graph of ours, another one, or Inductor, which tries kernels out."""

from __future__ import annotations

import itertools
import weakref
from types import CodeType, FrameType

from lightning_unitscale.dispatch.compiler_internals import codes, pass_by_overrides
from lightning_unitscale.dispatch.sites import frames
from lightning_unitscale.dispatch.torch_internals import MODULE_CALL, OPERATOR_CALL

# Compiled graphs that are ours, by the address of what runs them, and addresses of the code made
# for them: a set, which every product of such a graph looks into.
_OURS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_CODE: set[int] = set()


# Callers whose products are not to be met again: a graph of ours has its units.
OWN_CALLERS = ("ours", "compiler")


def is_ours(frame: FrameType | None) -> bool:
    """Return whether code that was made for a graph of ours calls from a kernel's caller."""
    if frame is not None and frame.f_code is OPERATOR_CALL:
        frame = frame.f_back
    return frame is not None and id(frame.f_code) in _CODE


def caller() -> str | None:
    """Who of Inductor calls a kernel: ``"ours"``, ``"another"`` graph, or ``"compiler"``."""
    found = codes()
    frame = None if found is None else _calling_frame(found)
    if found is None or frame is None:
        return None
    if frame.f_code is found[1]:
        return "compiler"
    return "ours" if id(frame.f_locals["self"]) in _OURS else "another"


class Callers:
    """What calls the operators of a compiled step, its forward and its backward graph."""

    def __init__(self) -> None:
        self._are_known = [False, False]

    def note(self, *, is_backward: bool) -> None:
        """Let the graph that calls be one of ours."""
        if not self._are_known[is_backward]:
            # Another thread may run the graph meanwhile: it is to be known before it is said to be.
            _mark_caller()
            self._are_known[is_backward] = True


def _mark_caller() -> None:
    found = codes()
    calling = None if found is None else _calling_frame(found[:1])
    if calling is None:
        return
    graph = calling.f_locals["self"]
    _OURS[id(graph)] = graph
    within = itertools.takewhile(lambda frame: frame is not calling, frames())
    # In the first run torch watches what operators do, and calls them twice.
    for frame in [frame for frame in within if frame.f_code is OPERATOR_CALL][-1:]:
        assert frame.f_back is not None
        code = frame.f_back.f_code
        _CODE.add(id(code))
        weakref.finalize(code, _CODE.discard, id(code)).atexit = False
        pass_by_overrides(frame.f_back.f_globals)


def _calling_frame(codes: tuple[CodeType, ...]) -> FrameType | None:
    """The innermost frame that runs one of these codes, unless a module is called before it."""
    for frame in frames():
        if frame.f_code in codes or frame.f_code is MODULE_CALL:
            return None if frame.f_code is MODULE_CALL else frame
    return None
