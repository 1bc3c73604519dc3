"""What every transform of a plain module shares: a copy whose ``forward`` runs by other means.

Where all that is wanted are units and formats of products, these run at the dispatcher, whatever
Python code is around them. Everything else needs graphs: ``forward`` is captured then, with all
that was wanted before as passes over its graphs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_unitscale.graph.capture import is_compiled
from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.graph.passes import GraphPass
from lightning_unitscale.graph.steps import ModuleSteps, steps_of

if TYPE_CHECKING:
    from lightning_unitscale.dispatch.module_products import ModuleProducts

PRODUCTS = "_module_products"


def transformed(module: nn.Module, owner: str, *passes: GraphPass) -> nn.Module:
    """A deep copy of ``module`` with its own parameters, whose ``forward`` runs ``passes``.

    Transforms nest in any order. Passes that need no graph run at the dispatcher, unless the module
    is captured already.

    Args:
        module: The module.
        owner: Name of the transform.
        *passes: What it adds.

    Raises:
        ValueError: If ``module`` was compiled by the user.
    """
    reject_compiled(module)
    new = detached_copy(module)
    if steps_of(new) is not None or any(graph_pass.needs_graph for graph_pass in passes):
        _capture(new, owner, passes)
        return new
    # Sessions stand on the gauge, which is in this package: not to be imported along with it.
    from lightning_unitscale.dispatch.module_products import ModuleProducts

    ModuleProducts.add(new, passes)
    new.__dict__["explain"] = _Explain(new)
    return new


def captured_forward(
    module: nn.Module, owner: str, *passes: GraphPass
) -> tuple[nn.Module, CapturedStep]:
    """:func:`transformed` for what needs a graph, whatever the passes are.

    Raises:
        ValueError: If ``module`` was compiled by the user.
    """
    reject_compiled(module)
    new = detached_copy(module)
    steps = _capture(new, owner, passes)
    return new, steps.steps["forward"]


def products_of(module: nn.Module) -> ModuleProducts | None:
    """What runs the products of a transformed module at the dispatcher; ``None`` if nothing."""
    return module.__dict__.get(PRODUCTS)


def detached_copy(value: Any) -> Any:
    """A deep copy in which tensors that were computed are leaves, as no copy could be otherwise."""
    with _Detached():
        return copy.deepcopy(value)


def reject_compiled(module: nn.Module) -> None:
    """Refuse a module that has ``torch.compile`` on it: its graph is not ours to rewrite."""
    if is_compiled(module):
        raise ValueError(
            f"module={type(module).__name__}: it is compiled already; expected a plain module; "
            "leave out your torch.compile and pass compile=True here instead."
        )


def _capture(module: nn.Module, owner: str, passes: tuple[GraphPass, ...]) -> ModuleSteps:
    """Capture ``forward``, with what has run at the dispatcher so far as passes."""
    products = products_of(module)
    if products is not None:
        products.detach()
    steps = steps_of(module)
    if steps is None:
        steps = ModuleSteps(module, ("forward",))
    for graph_pass in (*(() if products is None else products.passes_beside(passes)), *passes):
        steps.add_pass(graph_pass)
    steps.attach(owner)
    if products is not None:
        products.measure_again(steps.steps["forward"])
    module.__dict__["explain"] = _Explain(module)
    return steps


class _Detached(TorchFunctionMode):
    """Within this context the deep copy of a tensor that was computed is a leaf."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            new = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)] = new
            return new
        return func(*args, **(kwargs or {}))


class _Explain:
    """``module.explain()``: an object rather than a closure, so that a copy explains itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> str:
        """What runs in units or in a format, or what was captured, and what each pass did."""
        products = products_of(self._module)
        if products is not None:
            return products.explain()
        steps = steps_of(self._module)
        return "" if steps is None else steps.explain()
