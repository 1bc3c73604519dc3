"""Plans for a function or module from example inputs, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.graph.capture import compile_function
from lightning_unitscale.remat.budget import Budget
from lightning_unitscale.remat.costs import CostModel
from lightning_unitscale.remat.partitioner import PlanOnly, aot_backend
from lightning_unitscale.remat.planner import Planner, RematPlan
from lightning_unitscale.remat.report import plot_front


def plan_remat(
    function: Callable[..., Any],
    *args: Any,
    budget: Budget,
    cost_model: CostModel | None = None,
    resident_bytes: int = 0,
    **kwargs: Any,
) -> RematPlan:
    """The fastest plan of a training step whose peak is within the budget.

    Args:
        function: A module or function that Dynamo captures as one graph.
        *args: Its inputs; it is run once on them, without a backward pass.
        budget: Bytes (an int, or a string such as ``"600MiB"``), a fraction in (0, 1] of the peak
            without rematerialization, or ``"min_cut"``.
        cost_model: What running an operation costs; by default that of the graph's device.
        resident_bytes: Bytes alive beside the graph's inputs, such as the optimizer's state.
        **kwargs: Further inputs.

    Raises:
        ValueError: If the budget is malformed or below the floor.
        RuntimeError: If there is no gradient to compute, or several graphs.
    """
    return _planner(function, args, kwargs, cost_model, resident_bytes).plan(budget)


def pareto_front(
    function: Callable[..., Any],
    *args: Any,
    num_plans: int = 20,
    cost_model: CostModel | None = None,
    resident_bytes: int = 0,
    path: str | Path | None = None,
    **kwargs: Any,
) -> list[RematPlan]:
    """Plans of a training step from the fastest to the smallest, none beaten in time and peak.

    Args:
        function: A module or function that Dynamo captures as one graph.
        *args: Its inputs; it is run once on them, without a backward pass.
        num_plans: Budgets to plan for.
        cost_model: What running an operation costs; by default that of the graph's device.
        resident_bytes: Bytes alive beside the graph's inputs, such as the optimizer's state.
        path: Where to write a plot, if one is wanted; needs matplotlib.
        **kwargs: Further inputs.

    Raises:
        RuntimeError: If there is no gradient to compute, or several graphs.
        ModuleNotFoundError: If a plot is asked for and matplotlib is not installed.
    """
    plans = _planner(function, args, kwargs, cost_model, resident_bytes).front(num_plans)
    if path is not None:
        plot_front(plans, path)
    return plans


def _planner(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cost_model: CostModel | None,
    resident_bytes: int,
) -> Planner:
    partitioner = PlanOnly(cost_model, resident_bytes)
    target = function.forward if isinstance(function, nn.Module) else function

    # A function of its own: Dynamo's cache of the user's stays as it is.
    def step(*given: Any, **named: Any) -> Any:
        return target(*given, **named)

    outputs = compile_function(step, aot_backend(partitioner))(*args, **kwargs)
    if len(partitioner.planners) != 1:
        trains = any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(outputs))
        reason = "it breaks into several graphs" if trains else "nothing in it requires a gradient"
        raise RuntimeError(
            f"function={getattr(function, '__name__', type(function).__name__)}: {reason} "
            f"({len(partitioner.planners)} joint graphs); expected one graph with gradients; keep "
            "printing and .item() out of it, and give it parameters that require gradients."
        )
    return partitioner.planners[0]
