"""``compile``: run a module's graphs by Inductor, after all passes over them."""

from __future__ import annotations

from torch import nn

from lightning_unitscale.capture.attach import captured_forward


def compile(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose captured graphs are compiled by Inductor.

    ``torch.compile`` on a transformed module would capture the plain module again. This compiles
    what the transforms made of it, whichever of them come before or after.

    Args:
        module: A module, transformed or not, that Dynamo can capture; it is left as it is.

    Returns:
        A new module with parameters of its own and ``explain()``. It is compiled when it is first
        called, and again for inputs of another kind, as by ``torch.compile``.

    Raises:
        ValueError: If ``module`` was compiled by the user.
    """
    new, step = captured_forward(module, "compile")
    step.owner.use_executor("inductor")
    return new
