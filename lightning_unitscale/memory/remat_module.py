"""Plan a training step from example inputs, and train a module within a memory budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from lightning_unitscale.arguments import check_callable, check_count, check_instance, check_picture
from lightning_unitscale.capture.breaks import num_graph_breaks
from lightning_unitscale.capture.dynamo_capture import (
    forget_captures,
    frame_being_captured,
)
from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.module_steps import capture, own_copy
from lightning_unitscale.capture.rollback import held_values
from lightning_unitscale.memory.budgets import Budget, BudgetError, check_budget
from lightning_unitscale.memory.costs import CostModel
from lightning_unitscale.memory.gpus import DeviceType, parse_device
from lightning_unitscale.memory.offload import Offload, check_offload, gpu_cost_model, link_of
from lightning_unitscale.memory.partitioner import RematPartitioner, aot_backend, is_kept
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.problem import NodeRegion
from lightning_unitscale.memory.real_memory import gradient_bytes, storages_of
from lightning_unitscale.memory.remat_plan import RematPlan, RematReport, plot_front, reports_table
from lightning_unitscale.memory.traced_planner import traced_problem

# Planned steps before a warning: the first batch, another size of it, and a smaller last batch are
# usual.
_MANY_STEPS = 5


def plan_remat(
    function: Callable[..., Any],
    *args: Any,
    budget: Budget,
    cost_model: CostModel | None = None,
    resident_bytes: int = 0,
    offload: Offload = None,
    device: DeviceType | None = None,
    **kwargs: Any,
) -> RematPlan:
    """Return the fastest plan of a training step whose peak is within the budget.

    Args:
        function: A module or function that Dynamo captures as one graph. With ``device``, a module
            that returns its loss.
        *args: Its inputs. It is run once on them, without a backward pass. With ``device``, only
            the metadata of tensors is read, and all may be on ``meta``.
        budget: Bytes (an int, or a string such as ``"600MiB"``), or a float from 0 (the smallest
            peak that can be planned, also ``"min"``) to 1 (the peak without rematerialization),
            linearly in bytes. Or ``"min_cut"``.
        cost_model: Cost of running an operator. The default is that of the graph's device.
        resident_bytes: Bytes alive besides the graph's inputs, such as the optimizer's state.
        offload: ``"host"`` for plans that also move saved values to host memory over the device's
            link, or the :class:`HostLink` that they assume.
        device: Device whose kernels, speed and link to the host are simulated, such as
            ``"cuda:h100"``. The default is the one that the inputs are on.
        **kwargs: Further inputs.

    Raises:
        ValueError: If the budget is malformed, or in bytes and below the floor, or if the device is
            unknown.
        RuntimeError: If there is no gradient to compute, or several graphs.
    """
    budget = check_budget(budget)
    offload = check_offload(offload, budget)
    given = tensors_in((args, kwargs))
    if device is None:
        planner = _planner(function, args, kwargs, cost_model, resident_bytes)
    else:
        check_instance("function", function, nn.Module, "a module", "leave device out")
        _check_costs(cost_model, resident_bytes)
        gpu = parse_device(device)[1]
        if gpu is not None and cost_model is None:
            cost_model = gpu_cost_model(gpu)
        assert isinstance(function, nn.Module)
        problem = traced_problem(function, *args, device=device, cost_model=cost_model, **kwargs)
        planner = Planner(problem, resident_bytes=resident_bytes)
    where: str = device or next((tensor.device.type for tensor in given), "cpu")
    link = link_of(where) if offload == "host" else offload
    return replace(planner, link=link).plan(budget)


def pareto_front(
    function: Callable[..., Any],
    *args: Any,
    num_plans: int = 20,
    cost_model: CostModel | None = None,
    resident_bytes: int = 0,
    path: str | Path | None = None,
    **kwargs: Any,
) -> list[RematPlan]:
    """Return the Pareto-optimal plans of a training step, from the fastest to the smallest.

    Args:
        function: A module or function that Dynamo captures as one graph.
        *args: Its inputs. It is run once on them, without a backward pass.
        num_plans: Number of budgets to plan for.
        cost_model: As for :func:`plan_remat`.
        resident_bytes: As for :func:`plan_remat`.
        path: File for a plot (needs matplotlib). ``None`` draws none.
        **kwargs: Further inputs.

    Raises:
        RuntimeError: If there is no gradient to compute, or several graphs.
        ModuleNotFoundError: If ``path`` is given and matplotlib is not installed.
    """
    check_count("num_plans", num_plans)
    if path is not None:
        check_picture("path", path)
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
    expected = "a module, or a function of tensors"
    check_callable("function", function, expected, "pass what computes the loss")
    _check_costs(cost_model, resident_bytes)
    plans: list[RematPlan] = []
    partitioner = RematPartitioner("default", cost_model=cost_model, on_plan=plans.append)
    target = function.forward if isinstance(function, nn.Module) else function

    # A separate function leaves Dynamo's cache of the user's unchanged.
    def step(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    # All such functions share one code object, which Dynamo gives up on after a few captures.
    forget_captures(step)
    outputs = torch.compile(step, backend=aot_backend(partitioner))(*args, **kwargs)
    if len(plans) != 1:
        trains = any(tensor.requires_grad for tensor in tensors_in(outputs))
        reason = "it breaks into several graphs" if trains else "nothing in it requires a gradient"
        raise RuntimeError(
            f"function={getattr(function, '__name__', type(function).__name__)}: {reason} "
            f"({len(plans)} joint graphs). Expected one graph with gradients. Keep "
            "printing and .item() out of it, and give it parameters that require gradients."
        )
    return Planner(plans[0].problem, resident_bytes=resident_bytes)


def _check_costs(cost_model: CostModel | None, resident_bytes: int) -> None:
    check_count("resident_bytes", resident_bytes, least=0)
    if cost_model is not None:
        advice = "leave it out for the device's"
        check_instance("cost_model", cost_model, CostModel, "a CostModel", advice)


class StepPartitioner(RematPartitioner):
    """Planner of every graph of a module's steps. It keeps the reports, in the order of capture."""

    def __init__(
        self,
        budget: Budget,
        module: nn.Module,
        around: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        offload: Offload = None,
    ) -> None:
        super().__init__(budget, on_plan=self._keep, offload=offload)
        self.reports: list[RematReport] = []
        self._module = module
        self._around = around
        self._num_planned_steps = 0
        self._puts_off = False
        self._refusal: BudgetError | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step, which all later captures belong to until the next call."""
        self._breaks_before = num_graph_breaks()
        self._kept_bytes = self._static_bytes = 0
        # Bytes of inputs that earlier graphs of the step keep, by storage.
        self._held: dict[int, int] = {}
        self._has_planned = False
        self.begin_variant(0)

    def begin_variant(self, number: int) -> None:
        """Plan a variant of a graph. The first counts, and another one, with probes, runs alone."""
        self._is_first = number == 0
        if self._is_first:
            self._before = self._kept_bytes, self._static_bytes, dict(self._held)
        else:
            self._kept_bytes, self._static_bytes, self._held = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> StepPartitioner:
        """Return a planner for the copied module, which the callback does not know."""
        module = memo.get(id(self._module), self._module)
        return StepPartitioner(self.budget, module, offload=self.offload)

    def table(self) -> str:
        """Return the reports as text."""
        if not self.reports:
            return self.given_up or "Nothing has been planned yet: run a step with gradients."
        return reports_table(self.reports)

    def give_up(self, reason: str) -> None:
        """Forget the plans of a step that is not captured."""
        super().give_up(reason)
        self.reports.clear()

    def begin_call(self, *, puts_off: bool, is_captured_again: bool) -> None:
        """Keep the budget as far as the parts of a step allow, or raise an error at once."""
        self._puts_off, self._refusal = puts_off, None
        if is_captured_again:
            self.reports.clear()

    def refuse(self) -> None:
        """Raise the error that was postponed for a step that stays in parts."""
        if self._refusal is not None:
            raise self._refusal

    def reports_so_far(self) -> list[RematReport]:
        """Return the report of each graph, in the order of capture."""
        return list(self.reports)

    def __call__(
        self, gm: fx.GraphModule, *args: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of a joint graph."""
        before = self.planning_seconds
        graphs = super().__call__(gm, *args, **kwargs)
        self._num_planned_steps += not self._has_planned
        if not self._has_planned and self._num_planned_steps == _MANY_STEPS:
            seconds = self.planning_seconds - before
            fixed = "" if self.reports[-1].sizes else ", and its code fixes the sizes"
            warnings.warn(
                f"budget={self.budget!r}: {type(self._module).__name__} has been captured and "
                f"planned in {_MANY_STEPS} steps, the last time in {seconds:.1f} s. Its input has "
                f"changed each time{fixed}. TORCH_LOGS=recompiles,dynamic names the line that "
                "depends on the input. Change that line, or pad the batches to a few sizes.",
                stacklevel=2,
            )
        self._has_planned = True
        return graphs

    def choose(self, planner: Planner) -> RematPlan:
        """Return the plan of one graph."""
        try:
            return super().choose(planner)
        except BudgetError as error:
            if self._is_first:
                self._refuse_parts(error)
            return planner.floor

    def changing_inputs(self, graph: fx.Graph) -> list[fx.Node]:
        """Return inputs that code after the graph may change, so nothing is computed again."""
        # The step may update a queue of keys after a graph break, and a hook before the backward
        # pass. Autograd keeps what it read of them, not the tensors themselves.
        held = (value for _, value in held_values(self._module))
        state = storages_of([value for value in held if isinstance(value, Tensor)])

        def may_change(node: fx.Node) -> bool:
            tensor = self.inputs.get(node.name)
            if tensor is None or isinstance(tensor, nn.Parameter):
                return False
            # A later part may write into a result of this step. If autograd keeps that itself, the
            # write is an error without a plan as well.
            return bool(storages_of(tensor).keys() & state.keys()) or (
                self._has_planned and not is_kept(node)
            )

        return [node for node in graph.find_nodes(op="placeholder") if may_change(node)]

    def resident_bytes(self, static_bytes: int) -> tuple[int, int, int]:
        """Return the bytes of the module, of earlier graphs of the step, and of others."""
        breaks = num_graph_breaks() > self._breaks_before
        if isinstance(self.budget, int) and breaks:
            self._refuse_parts(
                BudgetError(
                    f"budget={self.budget!r}: the step breaks into several graphs. They are "
                    "planned one by one, so no plan can guarantee a limit in bytes for all of "
                    "them together. Remove the breaks that explain() shows, or pass a float such "
                    "as budget=0.6, which applies to each graph."
                )
            )
        always, forward, stepping = self._around()
        inputs = storages_of(list(self.inputs.values()))
        own = storages_of([*self._module.parameters(), *self._module.buffers()])
        if inputs:
            static_bytes = sum(inputs[key] for key in inputs.keys() & own.keys())
        # The graphs before this one in a step keep theirs until their own backward passes.
        always += self._kept_bytes
        always += sum(self._held[key] for key in self._held.keys() - inputs.keys() - own.keys())
        self._static_bytes += static_bytes
        if breaks and forward:
            # The gradients of later graphs are alive in its backward pass.
            later = max(0, gradient_bytes(self._module) - self._static_bytes)
            always, forward = always + later, forward - later
        if breaks or self._held:
            stepping = 0  # the parts of a step are not alive together in the optimizer's step
        return always + max(0, sum(own.values()) - static_bytes), forward, stepping

    def _refuse_parts(self, error: BudgetError) -> None:
        """Raise the error, or keep the first one of a step that may yet become one graph."""
        if not (self._puts_off and num_graph_breaks() > self._breaks_before):
            raise error
        self._refusal = self._refusal or error

    def _keep(self, plan: RematPlan) -> None:
        if not self._is_first:
            return
        self._kept_bytes += plan.saved_bytes - plan.host_bytes
        problem = plan.problem
        # The step's caller holds its batch. Graphs that saved later inputs hold those.
        holds = (problem.region == NodeRegion.INPUT) & (plan.saved | (not self._has_planned))
        names = [problem.nodes[i].name for i in holds.nonzero()[0]]
        self._held |= storages_of([self.inputs[name] for name in names if name in self.inputs])
        read = {id(tensor) for tensor in self.inputs.values()}
        params = (name for name, value in self._module.named_parameters() if id(value) in read)
        part = (frame_being_captured(), *params)
        self.reports.append(replace(RematReport.of(plan), part=part))


def remat(
    module: nn.Module, budget: Budget, *, offload: Literal["host"] | None = None
) -> nn.Module:
    """Return a copy of ``module`` that computes the same bits in less memory.

    Its forward and backward graph are planned together when you first call it with gradients. The
    plan decides what to keep and what to recompute, with the least estimated time within the
    budget::

        model = remat(model, "600MiB")
        model(inputs).sum().backward()
        print(model.remat_table())

    Args:
        module: A module, transformed or not, that Dynamo can capture. It is not changed.
        budget: Limit on all tensor bytes alive at once in a step of the module: parameters,
            buffers, inputs, activations and gradients. An int or a string such as ``"600MiB"`` is
            in bytes. A float is linear in bytes, from 0, the smallest achievable peak (also
            ``"min"``), to 1, the peak without rematerialization, so it can always be met.
            ``"min_cut"`` keeps as few bytes as possible without recomputing a matmul.
        offload: ``"host"`` also moves kept values to pinned host memory, where that costs less time
            than recomputing them. The budget is for the device's memory. On a CPU they
            are copied outside torch's allocator, which saves nothing and is for tests.

    Returns:
        A new module with its own parameters, ``remat_table()``, ``remat_reports()`` and
        ``explain()``. Its graphs run op by op, or by Inductor after ``transforms.compile``.

    Raises:
        ValueError: If the budget is malformed, the user compiled ``module``, or ``offload`` is
            unknown or cannot be used with the budget. At the first call, if the budget is in bytes
            and too small. The message names the smallest achievable peak.
    """
    budget = check_budget(budget)
    check_offload(offload, budget)
    new = own_copy(module)
    partitioner = StepPartitioner(budget, new, offload=offload)
    steps = capture(new, "remat")
    steps.partition_by(partitioner)
    # A copy of the module shows its own plans, since methods are copied with their objects.
    new.__dict__["remat_table"] = partitioner.table
    new.__dict__["remat_reports"] = partitioner.reports_so_far
    return new
