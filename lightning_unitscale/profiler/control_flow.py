"""``torch.cond``, ``scan`` and ``while_loop`` without data: one way through them is run.

Checked on torch 2.13 and 2.11: the arguments that these operators are dispatched with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def run_control_flow(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The first branch of a ``cond``, every step of a ``scan``, one round of a ``while_loop``."""
    run = _RUNS.get(function.name())
    return function(*args, **kwargs) if run is None else run(*args, **kwargs)


def _cond(
    predicate: Any, taken: Callable[..., Any], other: Callable[..., Any], operands: Any
) -> Any:
    return taken(*operands)


def _while_loop(
    goes_on: Callable[..., Any], body: Callable[..., Any], carried: Any, given: Any
) -> tuple[Any, ...]:
    goes_on(*carried, *given)
    return tuple(body(*carried, *given))


def _scan(combine: Callable[..., Any], initial: Any, rows: Any, given: Any = ()) -> list[Any]:
    carried, results = list(initial), []
    for place in range(len(rows[0])):
        made = combine(*carried, *[one[place] for one in rows], *given)
        carried = list(made[: len(carried)])
        results.append(made[len(carried) :])
    return [*carried, *(torch.stack(column) for column in zip(*results, strict=True))]


_RUNS = {"cond": _cond, "while_loop": _while_loop, "scan": _scan}
