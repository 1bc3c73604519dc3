"""Make a plan from a step and one batch: record its graphs, decide on factors, measure."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy

from lightning_unitscale.capture.absent_ranks import is_wrapper
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import (
    changed_arguments,
    is_float_tensor,
    line_of,
    op_name,
    tensor_name,
    value_at,
)
from lightning_unitscale.capture.graph_recorder import GraphInterpreter
from lightning_unitscale.capture.graph_variants import Interpreter, NotOneGraphError
from lightning_unitscale.capture.rollback import detached_copy, find_once_only, restoring
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.matmuls.measurement import root_mean_square
from lightning_unitscale.rules.decide import Decider
from lightning_unitscale.rules.flow import DIVIDED, TIMES, Flow, is_operation, parameter_path
from lightning_unitscale.rules.plan import (
    Decision,
    ParameterPlan,
    RuleOptions,
    RulePlan,
    key,
)
from lightning_unitscale.rules.roles import Structure, find_structure, plan_parameters
from lightning_unitscale.rules.unit_weights import prepared_like

Joint = Callable[[float], float]
# Maximum attempts, since the first run of a step may change what the next one runs.
_MAX_ATTEMPTS = 3
_MANY_TIMES = 8  # limit on the ratio of graph runs of a scaled step to those of the unscaled step
# The names under which Dynamo captures reading a tensor's numbers, without underscores at its ends.
_NUMBERS = ("get_data_attr", "detach", "data")


def plan_step(
    step: CapturedStep,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: RuleOptions,
    prior: RulePlan,
    *,
    init_weights: bool = True,
    backward: bool = True,
    joint: Joint | None = None,
) -> RulePlan:
    """Decide on every operation of a step, on one batch."""
    # Its graphs run twice, eagerly. The first run is unscaled, to find how they are connected. The
    # second run applies each factor as it is decided, to measure tensors without a rule. If the
    # step is one graph, nothing else of it runs.
    for fqn, parameter in step.owner.module.named_parameters():
        if is_wrapper(parameter):
            raise CaptureError.by_rules(
                step.title,
                f"{fqn} is a {type(parameter).__name__}, whose numbers are other tensors",
                "Rules set parameters to RMS 1 in place",
                "Expected ordinary parameters. Use method='lossless'",
            )
    _give_shapes(step, args, kwargs)
    grad = torch.enable_grad if backward else contextlib.nullcontext
    for _ in range(_MAX_ATTEMPTS):
        recorder = Recorder()
        with grad():
            rehearse(step, recorder, args, kwargs)
        flow = recorder.result()
        _reject_new_parameters(step, flow)
        structure = _structure_of(flow, prior, step.title)
        parameters = {**plan_parameters(structure, init_weights=init_weights), **prior.parameters}
        most_calls = _MANY_TIMES * (recorder.num_calls + 1)
        run = _ScaledRun(structure, parameters, options, prior, joint, step, most_calls)
        with grad():
            rehearse(step, run, args, kwargs)
        # The second run may not have been the recorded one.
        if not run.saw_new_graph:
            decisions = run.decider.decisions
            plans = _with_output_scales(structure, parameters, decisions)
            by_key = {key(step.name, name): decision for name, decision in decisions.items()}
            return prior.updated(RulePlan(by_key, plans, _unseen(step, plans)))
    reason = f"it ran other graphs in each of {_MAX_ATTEMPTS} runs on the same batch"
    raise CaptureError.by_rules(
        step.title,
        reason,
        "Rules need a step whose graphs are the same in every call",
        "Keep counters, random Python choices and branches on the size of activations out of it",
    )


def _give_shapes(step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Call lazy modules once to give them shapes. This stays, since rules set their weights."""
    if any(map(is_lazy, step.owner.module.parameters())):
        copied_args, copied_kwargs = detached_copy((args, dict(kwargs)))
        with torch.no_grad():
            step.rehearse(
                lambda graph, inputs: graph.interpret(lambda module: module.forward, inputs),
                *copied_args,
                **copied_kwargs,
            )


def _reject_new_parameters(step: CapturedStep, flow: Flow) -> None:
    """Raise if the step makes parameters while it runs, since rules set weights before."""
    known = {fqn for fqn, _ in step.owner.module.named_parameters()}
    new = sorted(flow.parameters.keys() - known)
    if new:
        raise CaptureError.by_rules(
            step.title,
            f"it registers {new[0]} while it runs",
            "Rules set all parameters before the first call",
            "Register parameters and parametrizations earlier",
        )


def plan_graph(
    graph_module: fx.GraphModule, step: str, options: RuleOptions, prior: RulePlan
) -> RulePlan:
    """Decide on a graph that no rehearsal has run, such as a branch that the step takes later."""
    # Nothing is measured. A scale without a rule is taken for 1. Parameters that are not at unit
    # scale already are not changed.
    flow = Flow()
    flow.add_graph(graph_module, {})
    structure = _structure_of(flow, prior, step)
    unknown = plan_parameters(structure, init_weights=False)
    decider = Decider(
        structure,
        {**unknown, **prior.parameters},
        replace(options, on_unknown="keep"),
        lambda node: None,
        prior,
        step,
    )
    for node in flow.nodes:
        decider.before(node)
    decisions = {key(step, name): decision for name, decision in decider.decisions.items()}
    unseen = {
        fqn: f"first read in a branch that {step} took later, when the weights were set already"
        for fqn in structure.uses
        if fqn not in prior.parameters
    }
    return prior.updated(RulePlan(decisions, {}, unseen))


def _unseen(step: CapturedStep, plans: Mapping[str, ParameterPlan]) -> dict[str, str]:
    """Explain for each parameter that no graph of a step reads why it is not among ``plans``."""
    reason = f"{step.name} does not read it"
    if step.owner.graph_breaks:
        reason = f"in no captured graph: {reason}, or does so between two graph breaks"
    return {fqn: reason for fqn, _ in step.owner.module.named_parameters() if fqn not in plans}


def _with_output_scales(
    structure: Structure, parameters: Mapping[str, ParameterPlan], decisions: Mapping[str, Decision]
) -> dict[str, ParameterPlan]:
    """Record for each bias the factor on its matmul."""
    plans = dict(parameters)
    for fqn, uses in structure.uses.items():
        matmuls = [use.node for use in uses if use.kind == "bias" and matmul_of(use.node)]
        decided = [decisions[name] for name in map(tensor_name, matmuls) if name in decisions]
        if decided:
            info = replace(plans[fqn].info, output_scale=decided[0].output)
            plans[fqn] = replace(plans[fqn], info=info)
    return plans


def _structure_of(flow: Flow, prior: RulePlan, step: str) -> Structure:
    """Find the structure of a flow, and check that it agrees with earlier decisions."""
    structure = find_structure(flow)
    for fqn, uses in structure.uses.items():
        plan = prior.parameters.get(fqn)
        other = next((use.node for use in uses if use.kind == "other"), None)
        # A parameter at unit scale must not be read by an operation that no rule rewrites.
        if plan is not None and plan.action != "left" and other is not None:
            raise _read_unscaled(fqn, other, step)
    return structure


def _read_unscaled(fqn: str, node: fx.Node, step: str) -> CaptureError:
    line = line_of(node)
    place = "" if line is None else f" at {line[0]}:{line[1]}"
    reads = f"{op_name(node)} reads {fqn}{place}"
    advice = "Register a rule for that operation, or name its function in replace="
    if op_name(node) in _NUMBERS:
        reads = f"the step takes the numbers of {fqn} by .data or detach(){place}"
        advice = (
            "Leave it out. An adapter that is not merged into its layer computes the same. Merge "
            "it into the module that transforms.deploy returns"
        )
    return CaptureError.by_rules(
        step, reads, "An earlier step has set it to unit scale, and no rule rewrites this", advice
    )


class Recorder:
    """Interpreter that runs the graphs of a step unscaled, and records which reads which."""

    def __init__(self) -> None:
        self.flow = Flow()
        self.num_calls = 0
        self._made: dict[int, tuple[Tensor, fx.Node]] = {}
        self._read: set[fx.Node] = set()

    def __call__(self, graph: Any, inputs: tuple[Any, ...]) -> Any:
        """Run one graph, as the interpreter that ``CapturedStep`` expects."""

        def run_with(captured: fx.GraphModule) -> Any:
            graph_module = self.flow.first_capture(captured)

            def run(*values: Any) -> Any:
                self.num_calls += 1
                outputs = GraphInterpreter(graph_module, self._visit).run(*values)
                self._record(graph_module, values, outputs)
                return outputs

            return run

        return graph.interpret(run_with, inputs)

    def result(self) -> Flow:
        """Return the flow of all graphs that ran."""
        outputs = [node for _, node in self._made.values() if node not in self._read]
        self.flow.outputs = [self.flow.resolve(node) for node in outputs]
        return self.flow

    def _visit(self, interpreter: GraphInterpreter, node: fx.Node) -> Any:
        """Record the sizes of factors."""
        if is_operation(node) and op_name(node) in TIMES | DIVIDED:
            for factor in node.all_input_nodes:
                value = interpreter.env[factor]
                if not getattr(value, "requires_grad", False):
                    self.flow.note_size(factor, value)
        return interpreter.evaluate(node)

    def _record(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        links = {
            position: self._made[id(value)][1]
            for position, value in enumerate(inputs)
            if id(value) in self._made
        }
        self._read.update(links.values())
        if not self.flow.has_graph(graph_module.graph):
            self.flow.add_graph(graph_module, links)
        returned: Any = graph_module.graph.output_node().args[0]
        for node, value in zip(returned, outputs, strict=False):
            # The tensor is kept, since its identity is valid only as long as it lives.
            if isinstance(value, Tensor) and isinstance(node, fx.Node) and is_float_tensor(node):
                self._made[id(value)] = (value, node)


class _ScaledRun:
    """Interpreter that runs the graphs of a step with every factor as soon as it is decided."""

    def __init__(
        self,
        structure: Structure,
        parameters: Mapping[str, ParameterPlan],
        options: RuleOptions,
        prior: RulePlan,
        joint: Joint | None,
        step: CapturedStep,
        most_calls: int,
    ) -> None:
        self.flow = structure.flow
        self._title, self._most_calls, self._num_calls = step.title, most_calls, 0
        self._joint = joint
        self.decider = Decider(structure, parameters, options, self.measure, prior, step.name)
        # The first run of a step may change what the next one runs (a setting, a cache).
        self.saw_new_graph = False
        # Parameters that were planned before have their values already.
        self._prepare = prepared_like(
            {fqn: plan for fqn, plan in parameters.items() if fqn not in prior.parameters}
        )
        self._values: dict[fx.Node, Tensor] = {}
        self._measured: dict[fx.Node, float | None] = {}

    def __call__(self, graph: Any, inputs: tuple[Any, ...]) -> Any:
        """Run one graph, as the interpreter that ``CapturedStep`` expects."""
        self._num_calls += 1
        if self._num_calls > self._most_calls:
            raise CaptureError.by_rules(
                self._title,
                f"scaled, it runs its graphs over {_MANY_TIMES} times as often",
                "Rules need a step that does the same work at any scale",
                "Keep solvers with adaptive step sizes out of it",
            )

        def run_with(captured: fx.GraphModule) -> Callable[..., Any]:
            graph_module = self.flow.first_capture(captured)
            if not self.flow.has_graph(graph_module.graph):
                self.saw_new_graph = True
                return fx.Interpreter(graph_module).run
            return GraphInterpreter(graph_module, self._visit).run

        return graph.interpret(run_with, inputs)

    def measure(self, node: fx.Node) -> float | None:
        """Return the RMS of a node's tensor once it is computed."""
        for alias in (node, self.flow.resolve(node)):
            value = self._values.get(alias)
            if value is not None:
                if alias not in self._measured:
                    has_numbers = value.numel() and not value.is_meta
                    rms = float(root_mean_square(value)) if has_numbers else None
                    if self._joint is not None:
                        rms = self._joint(rms or 0.0)
                    self._measured[alias] = rms
                return self._measured[alias]
        return None

    def _visit(self, interpreter: GraphInterpreter, node: fx.Node) -> Any:
        if node.op == "placeholder":
            value, fqn = interpreter.evaluate(node), parameter_path(node)
            if fqn is not None and isinstance(value, Tensor):
                value = self._prepare(fqn, value)
            return self._keep(node, value)
        decision = self.decider.before(node)
        if decision is None:
            return self._keep(node, interpreter.evaluate(node))
        args, kwargs = interpreter.fetch_args_kwargs_from_env(node)
        for argument in decision.arguments:
            scaled = value_at(args, kwargs, argument.path) * argument.factor
            args, kwargs = changed_arguments(args, kwargs, argument.path, scaled)
        kwargs = {**kwargs, **dict(decision.kwargs)}
        result = getattr(interpreter, node.op)(node.target, args, kwargs)
        self._keep(node, result)
        decision = self.decider.after(node, decision)
        if decision.output != 1.0:
            result = result * decision.output
            self._measured.pop(node, None)
        return self._keep(node, result)

    def _keep(self, node: fx.Node, value: Any) -> Any:
        """Remember a node's tensor, in case it must be measured."""
        if isinstance(value, Tensor) and value.is_floating_point():
            self._values[node] = value.detach()
        return value


def rehearse(
    step: CapturedStep, interpreter: Interpreter, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Run a step with its graphs in ``interpreter``, and undo its effects."""
    # A step that is one graph is not called: the graph runs on the inputs of the call. Otherwise
    # the user's code runs on copies.
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
            f"since it is not one graph ({reason}). The data that it reads from "
            f"{once_only} cannot be put back. Expected a step that takes its data from the batch. "
            "Let train_dataloader return all loaders.",
            stacklevel=2,
        )
    with restoring(module):
        copied_args, copied_kwargs = detached_copy((args, dict(kwargs)))
        step.rehearse(interpreter, *copied_args, **copied_kwargs)
