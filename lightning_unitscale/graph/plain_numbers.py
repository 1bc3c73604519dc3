"""Have a captured step compute its numbers as the plain step does: by NumPy and by Python.

* Dynamo traces NumPy as torch operations, and makes a 0-d FP64 tensor of a NumPy number. In the
  plain step it is a number: ``loss * np.exp(-x)`` stays FP32 there and would be FP64 when traced,
  other last bits of ``tanh`` and random numbers of torch's aside. So calls of NumPy run as they
  are, and break the graph; their results enter the graphs as Python's numbers.
* Dynamo takes an array for a constant then, computes ``array *= 2`` while it traces, and gives up:
  the array would be doubled twice.
* Dynamo takes ``addcmul_`` and ``addcdiv_`` with ``value`` apart, and until torch 2.11 ``add_``
  with ``alpha``, which rounds in another place than their kernels do.
* Dynamo draws from a ``random.Random`` of the user's when it traces, and guards on nothing: every
  later step would get the same number. So these calls run as they are, too.

Private names used here were checked on torch 2.13: ``VariableBuilder``'s ``wrap_numpy_ndarray``, to
which it hands every NumPy number, ``wrap_symfloat``, ``wrap_symint``; ``NumpyVariable``, which
an array is; ``RandomVariable``, and ``RandomClassVariable``, which makes one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch._dynamo.config
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import NumpyVariable, RandomClassVariable, RandomVariable

from lightning_unitscale.shadowing import shadowed


@contextlib.contextmanager
def plain_numbers() -> Iterator[None]:
    """Within this context NumPy and generators are not traced, and updates not taken apart."""
    with (
        shadowed(VariableBuilder, wrap_numpy_ndarray=_as_number),
        shadowed(NumpyVariable, is_python_constant=_is_constant),
        shadowed(RandomVariable, is_supported_random_obj=staticmethod(lambda _: False)),
        shadowed(RandomClassVariable, call_function=_refuse_generator),
        torch._dynamo.config.patch(trace_numpy=False, enable_dynamo_decompositions=False),
    ):
        yield


def _is_constant(variable: NumpyVariable) -> bool:
    return not isinstance(variable.value, np.ndarray)


def _refuse_generator(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    unimplemented(
        gb_type="random.Random() in a step",
        context=str(args),
        explanation="What it draws would be drawn once and kept.",
        hints=["Make it before, or draw from torch."],
    )


def _as_number(builder: Any, value: np.ndarray[Any, Any]) -> Any:
    # Others round or wrap around where Python's numbers do not, so their arithmetic stays NumPy's.
    if value.dtype == np.float64:
        return builder.wrap_symfloat(value.item())
    if value.dtype == np.int64:
        return builder.wrap_symint(value.item())
    unimplemented(
        gb_type="NumPy number",
        context=f"{value.dtype} {value}",
        explanation=f"Arithmetic of {value.dtype} is not that of Python's numbers.",
        hints=["Convert it by float() or int() before it meets a tensor."],
    )
