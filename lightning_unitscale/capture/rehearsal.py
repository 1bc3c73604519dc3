"""Run a captured step to learn of it, and undo what it did."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.compiled_graph import Interpreter, NotOneGraphError
from lightning_unitscale.capture.rollback import detached_copy, find_once_only, restoring


def rehearse(
    step: CapturedStep,
    interpreter: Interpreter,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Run a step with ``interpreter`` running its graphs, and undo what it did.

    A step that is one graph is not called: the graph runs on the inputs of the call. Where it is
    several, the user's code runs on copies.
    """
    module = step.owner.module
    with restoring(module, parameters=False):
        try:
            call = step.graph_call(*args, **kwargs)
        except NotOneGraphError as error:
            reason = str(error)
        else:
            with call.rehearsing() as (run, _):
                run(interpreter)
            return
    if (once_only := find_once_only(module)) is not None:
        warnings.warn(
            f"{type(module).__name__}.{step.name}: its first call runs twice, once to decide, "
            f"since it is not one graph ({reason}), and what it reads from "
            f"{once_only} cannot be put back; expected a step that takes its data from the batch; "
            "let train_dataloader return all loaders.",
            stacklevel=2,
        )
    with restoring(module):
        copied_args, copied_kwargs = detached_copy((args, dict(kwargs)))
        step.rehearse(interpreter, *copied_args, **copied_kwargs)
