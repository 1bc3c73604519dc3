"""Unit-scale an ordinary module by rules, and turn the result into an ordinary module again."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.arguments import check_flag, check_instance
from lightning_unitscale.capture.captured_step import CapturedStep
from lightning_unitscale.capture.graph_nodes import NAME, tensor_name
from lightning_unitscale.capture.module_steps import (
    ModuleSteps,
    captured_forward,
    export_forward,
    matmuls_of,
    reject_compiled,
    steps_of,
)
from lightning_unitscale.capture.passes import StepGraph
from lightning_unitscale.matmuls.gauge import FACTOR
from lightning_unitscale.matmuls.module_matmuls import ModuleMatmuls
from lightning_unitscale.matmuls.session import SESSION
from lightning_unitscale.rules.build_plan import plan_step
from lightning_unitscale.rules.exchanged import PlannedParameters
from lightning_unitscale.rules.flow import handed_on
from lightning_unitscale.rules.learning_rates import takes_muon
from lightning_unitscale.rules.plan import OnUnknown, RuleOptions, RulePlan, key
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.unit_weights import (
    ParameterGradients,
    already_at_unit_scale,
    set_to_unit_scale,
)

Replace = Mapping[Callable[..., Any], Callable[..., Any]]

_OWNER = "unit_scale"


def unit_scale(
    module: nn.Module,
    replace: Replace | None = None,
    *,
    residual: tuple[float, float] | None = None,
    init_weights: bool = True,
    on_unknown: OnUnknown = "calibrate",
    residual_mult: float = 1.0,
    residual_attn_ratio: float = 1.0,
    attention_mult: float = 1.0,
    activation_mult: float = 1.0,
    loss_mult: float = 1.0,
) -> nn.Module:
    """Return a copy of ``module`` that is unit-scaled by rules, which is a different model.

    Weights are set to RMS 1 and biases to 0. Every matmul gets the factor that brings its result to
    RMS 1 (``1 / fan_in`` if a loss reads it directly). Attention's logits become ``(m / d) q.k``,
    and the branches of residual adds get weights. All other operations stay as written, and the
    operands of the next matmul are brought to RMS 1. Gradients are those of the new function,
    multiplied by powers of two that bring them to RMS 1 at every matmul and every parameter.

    The module is captured, and all factors are decided, in its first call.

    Args:
        module: Any module that Dynamo can capture. It is not changed.
        replace: Functions to replace by others, which are then not traced.
        residual: Weights of residual branches with attention and of the others. The default is
            u-muP's rule for depth.
        init_weights: Whether to set weights to RMS 1 and biases to 0.
        on_unknown: Action if no rule gives the scale of a tensor: measure it on the first batch
            (``"calibrate"``), assume 1 (``"keep"``), or raise (``"error"``).
        residual_mult: u-muP's share of all branches in the last sum.
        residual_attn_ratio: u-muP's share of attention branches relative to the others.
        attention_mult: Factor on attention's logits.
        activation_mult: Factor on the input of activations that follow a weight.
        loss_mult: Factor on the logits of a cross-entropy.

    Returns:
        A new module with ``explain()``, which lists every rewritten operation with its reason.

    Raises:
        ValueError: If an argument is out of its range, or the module is compiled or unit-scaled by
            rules already.
        RuntimeError: In the first call, if ``on_unknown="error"`` and a scale is not known.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257); Blake et al., "u-muP"
        (arXiv 2407.17465).
    """
    options = RuleOptions(
        residual=residual,
        on_unknown=on_unknown,
        residual_mult=residual_mult,
        residual_attn_ratio=residual_attn_ratio,
        attention_mult=attention_mult,
        activation_mult=activation_mult,
        loss_mult=loss_mult,
    )
    check_flag("init_weights", init_weights)
    reject_compiled(module)
    steps = steps_of(module)
    if steps is not None and any(isinstance(each, RuleRewrite) for each in steps.passes):
        raise ValueError(
            f"module={type(module).__name__}: it is unit-scaled by rules already. Expected an "
            "unscaled module. Pass the module that it was made from."
        )
    rules = RuleRewrite(options, replace)
    gradients = ParameterGradients(ends_backward=True)
    new, step = captured_forward(module, _OWNER, rules, gradients)
    step.before_call = _BeforeCall(rules, gradients, init_weights)
    ModuleMatmuls.add(new, has_new_units=True)
    return new


@dataclass(eq=False)
class _BeforeCall:
    """Hook that decides everything on the arguments of the first call.

    It decides on a layer that replaced another one before the next call.
    """

    # It is an object rather than a closure, so that a copied module decides for itself.

    rules: RuleRewrite
    gradients: ParameterGradients
    init_weights: bool
    parameters: PlannedParameters | None = None

    def __call__(
        self, step: CapturedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Decide before a call of the step, if there is anything to decide on."""
        module, options, prior = step.owner.module, self.rules.options, self.rules.plan
        exchanged: list[str] = []
        if self.parameters is not None:
            exchanged = self.parameters.find_exchanged(module, prior)
            if not exchanged:
                return
            prior = prior.without(exchanged, step.name)
        with SESSION.being(None):  # the rehearsals' matmuls are not the call's
            plan = plan_step(step, args, kwargs, options, prior, init_weights=self.init_weights)
        if self.parameters is not None:
            plan, _ = self.parameters.settle(module, plan, self.rules.plan, exchanged)
            self.gradients.forget(exchanged)
        elif self.init_weights and already_at_unit_scale(module, plan.parameters):
            warnings.warn(
                f"unit_scale: the weights of {type(module).__name__} have RMS near 1 already, "
                "as after training at unit scale, so weights and biases stay unchanged. "
                "To load a checkpoint, call the module once before load_state_dict.",
                stacklevel=4,
            )
        else:
            plan = replace(plan, parameters=set_to_unit_scale(module, plan.parameters))
        self.rules.plan = plan
        step.invalidate()
        self.gradients.start(num_accumulated=1)
        self.parameters = self.parameters or PlannedParameters()
        self.parameters.record(module, plan)


def muon_param_groups(
    module: nn.Module, *example_args: Any, **example_kwargs: Any
) -> list[dict[str, Any]]:
    """Return parameter groups of a module: hidden matrices for Muon, the others for AdamW.

    The roles are read from the graph of a call, which a copy of the module runs once. Embeddings,
    the readout, vectors, tied weights and parameters that the call does not read are the others.
    Frozen parameters are in no group. The module is not changed.

    Args:
        module: A module that Dynamo can capture.
        example_args: Arguments of a call, such as a batch.
        example_kwargs: Its keyword arguments.

    Returns:
        Two groups for :class:`MuonAdamW`, with ``use_muon`` true and false. A group without
        parameters is left out. Optimizers of other packages use the same key for Muon's groups.

    Examples:
        >>> groups = muon_param_groups(model, tokens)  # doctest: +SKIP
        >>> optimizer = MuonAdamW(groups, lr=3e-4, muon_lr=0.02)  # doctest: +SKIP
    """
    scaled = unit_scale(module, init_weights=False, on_unknown="keep")
    scaled(*example_args, **example_kwargs)
    steps = steps_of(scaled)
    assert steps is not None
    (rules,) = [each for each in steps.passes if isinstance(each, RuleRewrite)]
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            plan = rules.plan.parameters.get(name)
            is_hidden = plan is not None and takes_muon(plan.info, parameter.shape)
            groups[is_hidden].append(parameter)
    return [{"params": found, "use_muon": key} for key, found in groups.items() if found]


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
    graph_module = export_forward(plain, example_args, example_kwargs, attentions=rules.attentions)
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
