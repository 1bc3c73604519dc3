"""Plans from example inputs, and ``remat``: a module that trains within a memory budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from lightning_unitscale.capture.attach import captured_forward
from lightning_unitscale.capture.steps import steps_of
from lightning_unitscale.dynamo.capture import compile_function
from lightning_unitscale.graph.nodes import tensors_in
from lightning_unitscale.profiler.costs import CostModel
from lightning_unitscale.remat.attach import StepPartitioner
from lightning_unitscale.remat.budget import Budget, check_budget
from lightning_unitscale.remat.partitioner import PlanOnly, aot_backend
from lightning_unitscale.remat.planner import Planner, RematPlan
from lightning_unitscale.remat.report import RematReport, plot_front


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
    def step(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    outputs = compile_function(step, aot_backend(partitioner))(*args, **kwargs)
    if len(partitioner.planners) != 1:
        trains = any(tensor.requires_grad for tensor in tensors_in(outputs))
        reason = "it breaks into several graphs" if trains else "nothing in it requires a gradient"
        raise RuntimeError(
            f"function={getattr(function, '__name__', type(function).__name__)}: {reason} "
            f"({len(partitioner.planners)} joint graphs); expected one graph with gradients; keep "
            "printing and .item() out of it, and give it parameters that require gradients."
        )
    return partitioner.planners[0]


def remat(module: nn.Module, budget: Budget) -> nn.Module:
    """A copy of ``module`` that computes the same bits in less memory.

    Its forward and backward graph are planned together when it is first called with gradients: what
    is kept between them and what runs again, at the least estimated time within the budget::

        model = remat(model, "600MiB")
        model(inputs).sum().backward()
        print(model.remat_table())

    Args:
        module: A module, transformed or not, that Dynamo can capture; it is left as it is.
        budget: Limit on all tensor bytes alive at once in a step of the module: parameters,
            buffers, inputs, activations and gradients. An int or a string such as ``"600MiB"`` is
            in bytes, a float in (0, 1] a fraction of the peak without rematerialization;
            ``"min_cut"`` keeps as little as no further matrix product allows.

    Returns:
        A new module with parameters of its own, ``remat_table()``, ``remat_reports()`` and
        ``explain()``. Its graphs run op by op, or by Inductor after ``transforms.compile``.

    Raises:
        ValueError: If the budget is malformed or ``module`` was compiled by the user; at the first
            call, if the budget is below the floor, which the message names.
    """
    budget = check_budget(budget)
    new, step = captured_forward(module, "remat")
    step.owner.partition_by(StepPartitioner(budget, new))
    # Partial functions rather than closures, so that a copy shows its own.
    new.__dict__["remat_table"] = partial(_table, new)
    new.__dict__["remat_reports"] = partial(_reports, new)
    return new


def _partitioner_of(module: nn.Module) -> StepPartitioner:
    steps = steps_of(module)
    assert steps is not None
    partitioner = steps.partition_fn
    assert isinstance(partitioner, StepPartitioner)
    return partitioner


def _table(module: nn.Module) -> str:
    """What was planned for each graph, as text."""
    return _partitioner_of(module).table()


def _reports(module: nn.Module) -> list[RematReport]:
    """What was planned for each graph, in the order of capture."""
    return list(_partitioner_of(module).reports)
