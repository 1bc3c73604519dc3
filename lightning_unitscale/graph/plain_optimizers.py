"""Have a captured step that reads an optimizer leave it as it is.

When traced code reads ``param_groups`` (the learning rate, to log it or to set it), Dynamo prepares
for tracing the optimizer's step as well: each group is given ``capturable=True``. On a GPU the
update then takes another algorithm, with other last bits; on a CPU it refuses to run. Nothing here
traces the step of an optimizer, so there is nothing to prepare.

Private names used here were checked on torch 2.13 and 2.11: ``OptimizerVariable._set_capturable``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._dynamo.variables.optimizer import OptimizerVariable

from lightning_unitscale.shadowing import nothing, shadowed


@contextlib.contextmanager
def plain_optimizers() -> Iterator[None]:
    """Within this context Dynamo changes nothing in an optimizer that traced code reads."""
    with shadowed(OptimizerVariable, _set_capturable=nothing):
        yield
