"""Have traced code that asks for a package that is not installed get Python's own error.

Dynamo runs ``importlib.metadata.version`` while it traces, and takes its PackageNotFoundError for a
failure of its own, even where the code catches it: torchmetrics asks so for ``torch_xla`` wherever
it counts classes.

Private names used here were checked on torch 2.13 and 2.11: ``SkipFunctionVariable.call_function``,
which runs it, and ``raise_observed_exception``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any

from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.variables import SkipFunctionVariable

from lightning_unitscale.shadowing import shadowed


@contextlib.contextmanager
def absent_packages() -> Iterator[None]:
    """Within this context such an error is one of the traced code."""
    call = SkipFunctionVariable.call_function

    @functools.wraps(call)
    def call_or_raise(self: Any, tx: Any, *args: Any) -> Any:
        try:
            return call(self, tx, *args)
        except importlib.metadata.PackageNotFoundError as error:
            raise_observed_exception(type(error), tx, args=list(error.args))

    with shadowed(SkipFunctionVariable, call_function=call_or_raise):
        yield
