"""From a step and one batch to a plan: record, find the structure, decide, measure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.nn.parameter import is_lazy

from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.graph.compiled_graph import CompiledGraph
from lightning_unitscale.graph.nodes import tensor_name
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.transforms.copied_inputs import copied_inputs
from lightning_unitscale.transforms.restoring import restoring
from lightning_unitscale.transforms.rules.decide import Decider
from lightning_unitscale.transforms.rules.flow import Flow, Recorder
from lightning_unitscale.transforms.rules.plan import (
    Decision,
    ParameterPlan,
    RuleOptions,
    RulePlan,
    key,
)
from lightning_unitscale.transforms.rules.rehearsal import Rehearsal, prepared_like
from lightning_unitscale.transforms.rules.residuals import branch_weights, find_residuals
from lightning_unitscale.transforms.rules.roles import Structure, find_structure, plan_parameters

# The first run of a step may change what the next one runs.
_MAX_ATTEMPTS = 3


def plan_step(
    step: CapturedStep,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: RuleOptions,
    known: RulePlan,
    *,
    init_weights: bool = True,
    backward: bool = True,
) -> RulePlan:
    """Decide on every operation of a step, on one batch.

    The step runs twice, eagerly and without a trace: once as it is, to see its graphs and how they
    hang together; once with the factors in place as they are decided, to measure what no rule
    knows.

    Args:
        step: The captured step; its graphs must not be reparametrized yet.
        args: Positional arguments; the step gets a copy.
        kwargs: Keyword arguments; the step gets a copy.
        options: The user's choices.
        known: What is decided already: operations of other steps keep their factors, and
            parameters are scaled once.
        init_weights: Whether parameters are set to unit scale.
        backward: Whether the step will be run with gradients.

    Returns:
        ``known`` and what is new. Parameters are not touched yet.
    """
    _give_shapes(step, args, kwargs)
    for _ in range(_MAX_ATTEMPTS):
        found = _plan_once(step, args, kwargs, options, known, init_weights, backward)
        if found is not None:
            return known.updated(found)
    raise RuntimeError(
        f"{type(step.owner.module).__name__}.{step.name}: it ran other graphs in each of "
        f"{_MAX_ATTEMPTS} runs on the same batch; expected a step that is captured alike each "
        "time; keep counters and random Python choices out of it."
    )


def _give_shapes(step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Let lazy modules be called once, which nothing undoes: the rules set their weights."""
    if any(map(is_lazy, step.owner.module.parameters())):
        given, named = copied_inputs(args, kwargs)
        with torch.no_grad():
            step.rehearse(_run_as_it_is, *given, **named)


def _run_as_it_is(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
    return graph.interpret(lambda graph_module: graph_module.forward, inputs)


def _plan_once(
    step: CapturedStep,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: RuleOptions,
    known: RulePlan,
    init_weights: bool,
    backward: bool,
) -> RulePlan | None:
    """One attempt; ``None`` if the second run was not the recorded one."""
    recorder = Recorder()
    with _rehearsing(step, backward):
        given, named = copied_inputs(args, kwargs)
        step.rehearse(recorder, *given, **named)
    flow = recorder.result()
    structure = _structure_of(flow, known)
    parameters = {**plan_parameters(structure, init_weights=init_weights), **known.parameters}
    fresh = {fqn: one for fqn, one in parameters.items() if fqn not in known.parameters}
    rehearsal = Rehearsal(flow, prepared_like(fresh))
    decider = Decider(
        structure,
        parameters,
        _branch_weights(structure, options),
        options,
        rehearsal.measure,
        prior=known,
    )
    rehearsal.decider = decider
    with _rehearsing(step, backward):
        given, named = copied_inputs(args, kwargs)
        step.rehearse(rehearsal, *given, **named)
    if rehearsal.saw_new_graph:
        return None
    decisions = {key(step.name, name): one for name, one in decider.decisions.items()}
    plans = _with_output_scales(structure, parameters, decider.decisions)
    return RulePlan(decisions, plans, _unseen(step, plans))


def plan_graph(
    graph_module: fx.GraphModule, step: str, options: RuleOptions, known: RulePlan
) -> RulePlan:
    """Decide on a graph that no rehearsal has run: a branch that the step takes later on.

    Nothing is measured; where no rule knows a scale it is taken for 1. Parameters that are not at
    unit scale already stay as they are.

    Returns:
        ``known`` and what is new.
    """
    flow = Flow()
    flow.add_graph(graph_module, [])
    flow.finish([])
    structure = _structure_of(flow, known)
    unknown = plan_parameters(structure, init_weights=False)
    decider = Decider(
        structure,
        {**unknown, **known.parameters},
        _branch_weights(structure, options),
        replace(options, on_unknown="keep"),
        lambda node: None,
        prior=known,
    )
    for node in flow.nodes:
        decider.before(node)
    decisions = {key(step, name): one for name, one in decider.decisions.items()}
    unseen = {
        fqn: f"first read in a branch that {step} took later, when the weights were set already"
        for fqn in structure.uses
        if fqn not in known.parameters
    }
    return known.updated(RulePlan(decisions, {}, unseen))


def _unseen(step: CapturedStep, plans: Mapping[str, ParameterPlan]) -> dict[str, str]:
    """Why each parameter of the module that no graph of a step reads is not among ``plans``."""
    reason = f"{step.name} does not read it"
    if step.owner.graph_breaks:
        reason = f"in no captured graph: {reason}, or does so between two graph breaks"
    return {fqn: reason for fqn, _ in step.owner.module.named_parameters() if fqn not in plans}


def _with_output_scales(
    structure: Structure,
    parameters: Mapping[str, ParameterPlan],
    decisions: Mapping[str, Decision],
) -> dict[str, ParameterPlan]:
    """Tell each bias by what the product that it is part of is multiplied."""
    plans = dict(parameters)
    for fqn, uses in structure.uses.items():
        inside = [one.node for one in uses if one.kind == "bias" and product_of(one.node)]
        found = [decisions[name] for one in inside if (name := tensor_name(one)) in decisions]
        if found:
            info = replace(plans[fqn].info, output_scale=found[0].output)
            plans[fqn] = replace(plans[fqn], info=info)
    return plans


def _structure_of(flow: Flow, known: RulePlan) -> Structure:
    """What a flow consists of, if it is in accord with what is decided already."""
    structure = find_structure(flow, find_residuals(flow))
    _check_known_parameters(structure, known)
    return structure


def _branch_weights(structure: Structure, options: RuleOptions) -> dict[fx.Node, float]:
    return branch_weights(
        structure.residuals,
        fixed=options.residual,
        residual_mult=options.residual_mult,
        residual_attn_ratio=options.residual_attn_ratio,
    )


@contextlib.contextmanager
def _rehearsing(step: CapturedStep, backward: bool) -> Any:
    grad = torch.enable_grad() if backward else contextlib.nullcontext()
    with restoring(step.owner.module), grad:
        yield


def _check_known_parameters(structure: Structure, known: RulePlan) -> None:
    """A parameter that is at unit scale already must not be read by what no rule rewrites."""
    for fqn, uses in structure.uses.items():
        plan = known.parameters.get(fqn)
        other = [one.node for one in uses if one.kind == "other"]
        if plan is not None and plan.action != "left" and other:
            raise RuntimeError(
                f"{fqn}: it was set to unit scale for an earlier step, but {other[0].name} of this "
                "one reads it, which no rule rewrites; expected every step to use it alike; "
                "register a rule for that operation, or name its function in replace=."
            )
