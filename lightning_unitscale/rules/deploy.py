"""Turn a module that was unit-scaled by rules into an ordinary torch module."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.arguments import check_flag, check_instance
from lightning_unitscale.capture.captured_copy import export_forward, matmuls_of
from lightning_unitscale.capture.graph_nodes import NAME, tensor_name
from lightning_unitscale.capture.module_steps import ModuleSteps, steps_of
from lightning_unitscale.capture.passes import StepGraph
from lightning_unitscale.matmuls.gauge import FACTOR
from lightning_unitscale.rules.flow import handed_on
from lightning_unitscale.rules.plan import RulePlan, key
from lightning_unitscale.rules.rewrite import RuleRewrite

# Attribute for the plan by which UnitScaleCallback scaled a LightningModule's weights. A second
# fit, or a test after it, by another Trainer must not scale them again.
PLAN_ATTRIBUTE = "_unit_scale_plan"
_RTOL = 1e-5
_LINEAR_MAPS = (torch.nn.functional.linear, torch.conv1d, torch.conv2d, torch.conv3d)


def fold_factors(graph_module: fx.GraphModule) -> None:
    """Fold every factor into the weights where possible, in place."""
    # A factor on a result is folded into the weight and the bias of its linear map. A factor on an
    # argument is folded into the weights of the linear maps that read it. In both cases no other
    # operation may read these parameters.
    parameters = dict(graph_module.named_parameters())
    graph = graph_module.graph
    with torch.no_grad():
        for node in [node for node in graph.nodes if FACTOR in node.meta]:
            source = node.args[0]
            maker = _maker(source, node)
            if maker is not None and _are_free(maker, parameters):
                for weight in _weights(maker):
                    parameters[str(weight.target)].mul_(node.meta[FACTOR])
            elif node.users and all(_reads_as_input(user, node, parameters) for user in node.users):
                for reader in node.users:
                    parameters[str(_weights(reader)[0].target)].mul_(node.meta[FACTOR])
            else:
                continue
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _maker(node: Any, reader: fx.Node) -> fx.Node | None:
    """Return the linear map that made a tensor read only by ``reader``, through views."""
    while isinstance(node, fx.Node) and list(node.users) == [reader]:
        if node.target in _LINEAR_MAPS:
            return node
        node, reader = handed_on(node), node
    return None


def _weights(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of weight and bias of a linear map."""
    values = [*node.args[1:3], node.kwargs.get("weight"), node.kwargs.get("bias")]
    return [value for value in values if isinstance(value, fx.Node)]


def _are_free(node: fx.Node, parameters: dict[str, nn.Parameter]) -> bool:
    """Check that weight and bias are parameters that nothing else in the graph reads."""
    weights = _weights(node)
    reads = [get_attr.target for get_attr in node.graph.find_nodes(op="get_attr")]
    return bool(weights) and all(
        weight.op == "get_attr"
        and str(weight.target) in parameters
        and list(weight.users) == [node]
        and reads.count(weight.target) == 1
        for weight in weights
    )


def _reads_as_input(node: fx.Node, value: fx.Node, parameters: dict[str, nn.Parameter]) -> bool:
    is_input = node.target in _LINEAR_MAPS and node.args[:1] == (value,)
    return is_input and value not in node.args[1:] and _are_free(node, parameters)


def deploy(
    module: nn.Module, *example_args: Any, fold: bool = False, **example_kwargs: Any
) -> fx.GraphModule:
    """Return the ``forward`` of a module unit-scaled by rules as an ordinary torch module.

    The result does not need this package, since its factors are plain numbers. You call it like
    ``module``, and it has copies of the parameters under the same names. It can be saved, and
    passed to ``torch.export.export``. Set the module to evaluation mode first.

    Args:
        module: The result of ``transforms.unit_scale`` after its first call, or a LightningModule
            that ``UnitScaleCallback`` has trained by rules.
        *example_args: Arguments of one call.
        fold: Whether to fold factors around linear maps and convolutions into their weights where
            possible. A weight that is used twice keeps its factors.
        **example_kwargs: Keyword arguments of that call.

    Returns:
        A graph module, whose attribute ``unfolded`` names the factors that are left in the graph.
        If it is empty, you can load ``state_dict()`` into your own, unscaled module.

    Raises:
        ValueError: If the module was not unit-scaled by rules.
        RuntimeError: If ``forward`` is not one graph, or its outputs differ from those of
            ``module``.
    """
    check_instance("module", module, nn.Module, "a torch.nn.Module", "pass the model itself")
    check_flag("fold", fold)
    rules = _rules_of(module)
    expected: list[Any] | None = None
    if steps_of(module) is not None and "forward" in module.__dict__:
        # Before the export, which makes Dynamo capture again. Another graph would have other names.
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
    vars(graph_module)["unfolded"] = tuple(
        f"{tensor_name(node)} * {node.meta[FACTOR]:.4g}"
        for node in graph_module.graph.nodes
        if FACTOR in node.meta
    )
    if expected is not None:
        outputs = _outputs(graph_module, example_args, example_kwargs)
        _require_equal(type(module).__name__, expected, outputs)
    return graph_module


def _rules_of(module: nn.Module) -> RuleRewrite:
    steps = steps_of(module)
    passes = steps.passes if steps is not None else []
    rewrite = next((p for p in passes if isinstance(p, RuleRewrite)), None)
    plan = rewrite.plan if rewrite is not None else vars(module).get(PLAN_ATTRIBUTE)
    if not plan:
        raise ValueError(
            f"module={type(module).__name__}: it has not been unit-scaled by rules, or not "
            "called since. Expected the result of transforms.unit_scale after a call, or a "
            "LightningModule after a fit with UnitScaleCallback('u-mup'). A lossless one is "
            "unscaled already."
        )
    rules = RuleRewrite(replace=rewrite.replace if rewrite is not None else None)
    for_forward = RulePlan(parameters=plan.parameters)
    for name, decision in plan.items():
        # Other steps' decisions on forward's operations, which have the same names there.
        name = key("forward", name.partition(":")[2].partition("~")[0])
        for_forward = for_forward.updated(RulePlan({name: decision}))
    rules.plan = for_forward
    return rules


def _name_parameters(graph_module: fx.GraphModule, module: nn.Module) -> None:
    """Name the nodes of parameters by their paths, as in a step."""
    paths = {id(param): path for path, param in module.named_parameters()}
    params = dict(graph_module.named_parameters(remove_duplicate=False))
    for node in graph_module.graph.find_nodes(op="get_attr"):
        parameter = params.get(str(node.target))
        if parameter is not None:
            node.meta[NAME] = paths.get(id(parameter), str(node.target))


def _plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy without captured steps, units and formats."""
    new = copy.deepcopy(module)
    if (matmuls := matmuls_of(new)) is not None:
        matmuls.detach()
    steps = steps_of(new)
    if isinstance(steps, ModuleSteps):
        for owner in list(steps.owners):
            steps.detach(owner)
    new.__dict__.pop("explain", None)
    return new


def _outputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that a module returns in evaluation mode."""
    mode = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            return list(tree_leaves(module(*args, **kwargs)))
    finally:
        module.train(mode)


def _require_equal(name: str, ours: list[Any], theirs: list[Any]) -> None:
    """Compare the outputs of both, since equal names of operations do not prove equal functions."""
    for our, their in zip(ours, theirs, strict=True):
        if not isinstance(our, Tensor):
            continue
        our, their = our.double(), their.double()
        if not torch.allclose(our, their, rtol=_RTOL, atol=_RTOL * float(our.abs().max())):
            difference = float((our - their).abs().max())
            raise RuntimeError(
                f"module={name}: the exported graph differs from the captured one by "
                f"{difference:.3g}. Expected equal outputs. Report this with the model."
            )
