"""How a tensor of a step was made: the call as a node of FX, and the names of its results."""

from __future__ import annotations

import dis
import functools
import operator
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import handle_torch_function


@dataclass(frozen=True)
class Made:
    """How a tensor was made.

    Attributes:
        op: As of a node of FX: ``"call_function"`` or ``"call_method"``.
        target: The function, or the method's name.
        args: Its arguments, with rows in place of tensors.
        kwargs: Those by keyword.
        variables: The variables that the caller has assigned the results to.
        name: Name of the call, if it returns several tensors.
        index: Which of several tensors it is.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    variables: tuple[str, ...] = ()
    name: str = ""
    index: int | None = None


class Use(NamedTuple):
    """What a caller does with a function."""

    instruction: str
    variables: tuple[str, ...]


def how_made(
    function: Any, word: str, args: tuple[Any, ...], kwargs: dict[str, Any], use: Use
) -> Made:
    """Describe a call of a torch function; operators and methods are those that the caller has."""
    name = getattr(function, "__name__", word)
    if name == "__get__":
        return Made("call_function", getattr, (*args[:1], word), {}, use.variables)
    if getattr(Tensor, name, None) is not function:
        return Made("call_function", function, args, kwargs, use.variables)
    if name[:2] == "__" or not use.instruction.startswith("CALL"):
        target = getattr(operator, word, None) or getattr(operator, f"{word}_", None)
        if target is not None:
            args = args[::-1] if name.startswith("__r") and len(args) == 2 else args
            return Made("call_function", target, args, kwargs, use.variables)
    return Made("call_method", name, args, kwargs, use.variables)


def use_of(function: Any, frame: FrameType | None, top: CodeType) -> Use:
    """Find out what a caller, below the code that calls the step, does with a torch function.

    As Dynamo names the nodes of a graph, variables are the first ones, also of a caller to whom the
    results are returned.
    """
    own, first = getattr(function, "__code__", None), ""
    while frame is not None and frame.f_code is not top:
        code = frame.f_code
        if code is not own and code is not handle_torch_function.__code__:
            instruction, following, variables = _instructions(code).get(frame.f_lasti, ("", "", ()))
            first = first or instruction
            if following != "RETURN_VALUE":
                return Use(first, variables)
        frame = frame.f_back
    return Use(first, ())


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> dict[int, tuple[str, str, tuple[str, ...]]]:
    """By its offset, each instruction, the one behind it, and the variables that it stores in."""
    every = list(dis.get_instructions(code))
    # Python 3.11 may run a call together with what prepares it.
    kept = [one for one in every if one.opname != "PRECALL"]
    found = {}
    for index, (one, after) in enumerate(pairwise(kept)):
        count = (after.arg or 0) if after.opname == "UNPACK_SEQUENCE" else 0
        stores = kept[index + 2 : index + 2 + count] if count else [after]
        names = [name for store in stores for name in _stored_by(store)]
        found[one.offset] = one.opname, after.opname, tuple(names[: max(count, 1)])
    for one, after in pairwise(every):
        entry = found[after.offset if one.opname == "PRECALL" else one.offset]
        # A call of Python's own has the caller's frame behind the instruction, in its cache.
        found.update(dict.fromkeys(range(one.offset, after.offset, 2), entry))
    return found


def _stored_by(instruction: dis.Instruction) -> tuple[str, ...]:
    if not instruction.opname.startswith("STORE_") or instruction.argval is None:
        return ()
    value = instruction.argval
    return value if isinstance(value, tuple) else (str(value),)
