"""``deploy``: a module that was unit-scaled by rules, as plain torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.graph.exported import export_forward
from lightning_unitscale.graph.nodes import NAME
from lightning_unitscale.graph.passes import StepGraph
from lightning_unitscale.graph.steps import ModuleSteps, steps_of
from lightning_unitscale.transforms.rules.fold import factors_left, fold_factors
from lightning_unitscale.transforms.rules.plan import RulePlan, key
from lightning_unitscale.transforms.rules.rewrite import RuleRewrite

# Where UnitScaleCallback leaves the plan under which the weights of a LightningModule are what they
# are: a second fit, or a test after it, by another Trainer must not scale them again.
PLAN_ATTRIBUTE = "_unit_scale_plan"
_RTOL = 1e-5


def deploy(
    module: nn.Module, *example_args: Any, fold: bool = False, **example_kwargs: Any
) -> fx.GraphModule:
    """The ``forward`` of a module that was unit-scaled by rules, as a module of plain torch.

    The result needs nothing of this package: its factors are multiplications by numbers. It is
    called as ``module`` is, holds copies of its parameters under the same names, can be saved, and
    can be given to ``torch.export.export``. A module in evaluation mode is what one deploys.

    Args:
        module: What ``transforms.unit_scale`` returned, after its first call, or a LightningModule
            that ``UnitScaleCallback`` has trained by rules.
        *example_args: Arguments of one call.
        fold: Whether factors around linear maps and convolutions go into their weights, as far as
            the function allows: a weight that is used twice keeps its factors.
        **example_kwargs: Keyword arguments of that call.

    Returns:
        A graph module, whose attribute ``unfolded`` names the factors that are left in the graph.
        Without any, its ``state_dict()`` is one for the user's own, unscaled module.

    Raises:
        ValueError: If the module was not unit-scaled by rules.
        RuntimeError: If ``forward`` is no single graph, or its outputs are not those of ``module``.
    """
    rules = _rules_of(module)
    expected: list[Any] | None = None
    if steps_of(module) is not None and "forward" in module.__dict__:
        # Before the export, which has Dynamo capture anew: another graph would have other names.
        expected = _outputs(module, example_args, example_kwargs)
    plain = _plain_copy(module)
    graph_module = export_forward(plain, example_args, example_kwargs)
    _name_parameters(graph_module, plain)
    graph = StepGraph(graph_module, observed=False, step="forward")
    rules.run(graph)
    if fold:
        fold_factors(graph_module)
    graph_module.graph.lint()
    graph_module.recompile()
    graph_module.train(module.training)
    vars(graph_module)["unfolded"] = factors_left(graph_module)
    if expected is not None:
        found = _outputs(graph_module, example_args, example_kwargs)
        _require_equal(type(module).__name__, expected, found)
    return graph_module


def _rules_of(module: nn.Module) -> RuleRewrite:
    steps = steps_of(module)
    passes = steps.passes if steps is not None else []
    known = [one.plan for one in passes if isinstance(one, RuleRewrite)]
    plan = known[0] if known else module.__dict__.get(PLAN_ATTRIBUTE, RulePlan())
    if not plan:
        raise ValueError(
            f"module={type(module).__name__}: it has not been unit-scaled by rules, or not been "
            "called since; expected the result of transforms.unit_scale after a call, or a "
            "LightningModule after a fit with UnitScaleCallback('u-mup'); a lossless one is the "
            "plain module already."
        )
    replace = next((one.replace for one in passes if isinstance(one, RuleRewrite)), None)
    rules = RuleRewrite(replace=replace)
    for_forward = RulePlan(parameters=plan.parameters)
    for name, one in plan.items():
        # Other steps' decisions on forward's operations, which have the same names there.
        decision = {key("forward", name.partition(":")[2].partition("~")[0]): one}
        for_forward = for_forward.updated(RulePlan(decision))
    rules.set_plan(for_forward)
    return rules


def _name_parameters(graph_module: fx.GraphModule, module: nn.Module) -> None:
    """Name the nodes of parameters by their paths, as those of a step are named."""
    paths = {id(one): path for path, one in module.named_parameters()}
    given = dict(graph_module.named_parameters(remove_duplicate=False))
    for node in graph_module.graph.find_nodes(op="get_attr"):
        parameter = given.get(str(node.target))
        if parameter is not None:
            node.meta[NAME] = paths.get(id(parameter), str(node.target))


def _plain_copy(module: nn.Module) -> nn.Module:
    """A copy without captured steps."""
    new = copy.deepcopy(module)
    steps = steps_of(new)
    if isinstance(steps, ModuleSteps):
        for owner in list(steps.owners):
            steps.detach(owner)
    new.__dict__.pop("explain", None)
    return new


def _outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a module returns in evaluation mode."""
    mode = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            return list(tree_leaves(module(*args, **kwargs)))
    finally:
        module.train(mode)


def _require_equal(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """Compare the outputs of both in evaluation mode; names alone prove nothing."""
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor) and not torch.allclose(
            one.double(), other.double(), rtol=_RTOL, atol=_RTOL * float(one.double().abs().max())
        ):
            difference = float((one.double() - other.double()).abs().max())
            raise RuntimeError(
                f"module={name}: the exported graph differs from the captured one by "
                f"{difference:.3g}; expected equal outputs; report this with the model."
            )
