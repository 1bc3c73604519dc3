"""Linear layers in real FP8, with the scales that the graph's units already give.

Every operand near RMS 1 is what FP8 needs, so a linear layer and its two gradients become FP8
products with constant scales. Where lossless unit scaling has put changes of units around a layer,
they are taken into its casts and into the products' own scales, so they cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from tabulate import tabulate
from torch import fx, nn

from lightning_unitscale.choices import check_choice
from lightning_unitscale.functional.change_units import change_gradient_units, change_units
from lightning_unitscale.functional.fp8_linear import (
    DEFAULT_GRADIENT,
    NUM_CASTS,
    GradientFormat,
    Scaling,
    fp8_linear,
)
from lightning_unitscale.functional.scaled_product import why_no_fp8
from lightning_unitscale.graph.nodes import INTERNAL, MODULE, argument_at
from lightning_unitscale.graph.passes import GraphPass, Region, Stage, StepGraph
from lightning_unitscale.graph.patterns import NamePatterns
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.graph.steps import EVALUATION_STEPS
from lightning_unitscale.transforms.attach import transformed
from lightning_unitscale.transforms.fp8_candidates import Linear, linear_of, why_not_fp8
from lightning_unitscale.transforms.moving_grid import Grid, MovingGrid, cast_names, check_grid
from lightning_unitscale.transforms.range_loss import Misfits
from lightning_unitscale.transforms.units import meant_name

# The format of gradients that the finer one does not hold.
WIDE_GRADIENT: GradientFormat = "E5M2"
_TRAINING_ONLY = (
    "FP8 is for training steps: evaluation has the numbers that a checkpoint has without FP8."
)
# A factor in a graph: a number, or a node that makes a 0-d tensor.
_Factor = float | fx.Node


def fp8_linears(
    module: nn.Module,
    *,
    scaling: Scaling = "constant",
    exclude: str | Sequence[str] | None = None,
    gradient_format: GradientFormat = DEFAULT_GRADIENT,
    grid: Grid = "fixed",
) -> nn.Module:
    """A copy of ``module`` whose linear layers, and their gradients, run in real FP8.

    Eligible are ``F.linear`` and products with a 2-D parameter (``matmul``, ``addmm``, ...) whose
    numbers of features are multiples of 16. Operands are cast to E4M3FN, arriving gradients to
    ``gradient_format``. Results have the type that they had. It runs on GPUs of compute capability
    8.9 and above, and on CPUs, slowly, as a check. Together with :func:`simulate_format`, in either
    order, what runs in FP8 is not rounded again. What is kept for the backward pass is what
    ``module`` keeps; in a captured graph (:func:`compile`, ``depth="all"``, dynamic scales) it is
    FP8 only.

    Args:
        module: Any module; one that Dynamo can capture with dynamic scales. It is left as it is.
        scaling: ``"constant"`` takes scales from :func:`lossless_unit_scale`, in either order, and
            1 without it. ``"dynamic"`` brings every tensor's largest element to the end of its
            format in every call, which needs no unit scaling and a pass more over each tensor.
        exclude: Globs of module paths or tensor names whose layers stay as they are.
        gradient_format: ``"E4M3FN"`` holds gradients in units of their own, or with dynamic scales,
            unless they are very uneven. ``"E5M2"`` has more range and twice the rounding error: for
            constant scales without unit scaling, or to compare with packages that take it.
        grid: ``"moving"`` multiplies what is cast by a number in (1/2, 1], another one at every
            training step, and divides the product by it, so that the errors of a weight that hardly
            changes average out; for constant scales.

    Returns:
        A new module with ``explain()``: what was decided on each layer, and why.

    Raises:
        ValueError: If an argument makes no sense, or the module is already compiled.
        RuntimeError: In the first call, if the module is on a device without FP8.

    Example:
        >>> import torch
        >>> from lightning_unitscale import transforms
        >>> layer, x = torch.nn.Linear(32, 16), torch.randn(8, 32)
        >>> fast = transforms.fp8_linears(transforms.lossless_unit_scale(layer, x))
        >>> fast(x).shape
        torch.Size([8, 16])
    """
    one = FP8Linears(scaling, exclude=exclude, gradient_format=gradient_format, grid=grid)
    return transformed(module, "fp8_linears", one)


def check_gradient_format(format: object, name: str = "gradient_format") -> None:
    """Refuse what is no format of gradients in FP8 products.

    Raises:
        ValueError: If it is not one of ``GradientFormat``; ``name`` is that of the argument.
    """
    advice = "pass 'E4M3FN' for gradients in units of their own, 'E5M2' for others"
    check_choice(name, format, get_args(GradientFormat), "no format of FP8 gradients", advice)


class FP8Linears(GraphPass):
    """The pass of :func:`fp8_linears`, whose arguments it takes.

    Attributes:
        decisions: For every product seen, why it is not in FP8, or ``None`` if it is.
        gradient_format: Format of gradients that fit into it; E5M2 is that of others.
        unfit: Products that are kept out of FP8, and gradients that are kept in E5M2, for reasons
            of the caller's.
        moving_grid: What moves the numbers of FP8; ``None`` where they stay.
        takes_units_in: Whether changes of units around a product become its own factors. If not,
            they are operations by themselves, at which drift can be measured.
        in_evaluation: Whether Lightning's evaluation steps are in FP8 as well. If not, they have
            the numbers that a checkpoint of the module has without FP8.
    """

    name = "fp8 linears"
    stage = Stage.CONVERT

    def __init__(
        self,
        scaling: Scaling = "constant",
        *,
        exclude: str | Sequence[str] | None = None,
        gradient_format: GradientFormat = DEFAULT_GRADIENT,
        grid: Grid = "fixed",
        in_evaluation: bool = True,
    ) -> None:
        advice = "pass 'constant' together with unit scaling, 'dynamic' without it"
        check_choice("scaling", scaling, get_args(Scaling), "unknown scaling", advice)
        check_gradient_format(gradient_format)
        check_grid(grid)
        if scaling == "dynamic" and grid == "moving":
            raise ValueError(
                "grid='moving': with scaling='dynamic' the largest element of a tensor decides "
                "where the numbers of its format lie; expected 'fixed'; leave the argument out."
            )
        self.scaling: Scaling = scaling
        self.needs_graph = scaling == "dynamic"
        self.gradient_format: GradientFormat = gradient_format
        self.moving_grid = MovingGrid() if grid == "moving" else None
        self.patterns = NamePatterns(exclude=exclude)
        self.decisions: dict[str, str | None] = {}
        self.unfit = Misfits()
        self.takes_units_in = True
        self.in_evaluation = in_evaluation

    def runs_in(self, step: str) -> bool:
        """In training, and in evaluation if that is wanted."""
        return self.in_evaluation or step not in EVALUATION_STEPS

    def leave_out(self, misfits: Misfits) -> Misfits:
        """Keep products out of FP8, or their gradients in E5M2, by the products' names.

        Returns:
            What is new of it: with that, graphs rewritten before must be rewritten anew.
        """
        if self.gradient_format == WIDE_GRADIENT:
            misfits = Misfits(misfits.products)
        new = misfits.without(self.unfit)
        self.unfit = Misfits(
            {**self.unfit.products, **misfits.products},
            {**self.unfit.gradients, **misfits.gradients},
        )
        return new

    def runs(self, name: str) -> bool:
        """Whether the product of this name is in FP8 in what was rewritten last."""
        return self.decisions.get(name, "not seen") is None

    def forget(self) -> None:
        """Forget what is known of one module's products."""
        self.unfit = Misfits()
        self.decisions.clear()

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        reason = why_no_fp8(graph.device)
        found: dict[str, str | None] = {}
        linears: list[tuple[Region, Linear]] = []
        for region in graph.regions():
            for node in region.graph.nodes:
                product = product_of(node)
                if product is None:
                    continue
                linear, name = linear_of(product), meant_name(node)
                found[name] = self._why_not(linear, node)
                if linear is not None and found[name] is None:
                    if reason is not None:
                        raise RuntimeError(
                            f"{name} on {graph.device}: {reason}; expected a GPU of compute "
                            "capability 8.9 or above, or a CPU; leave FP8 out, or simulate it."
                        )
                    linears.append((region, linear))
        grid = None
        if self.moving_grid is not None and linears:
            names = [name for _, one in linears for name in cast_names(one.product)]
            grid = self.moving_grid.add_to(graph, names)
        for index, (region, linear) in enumerate(linears):
            options: dict[str, Any] = {
                "gradient": self.gradient_of(meant_name(linear.product.node))
            }
            if grid is not None:
                options |= {"grid": region.thread(grid), "index": NUM_CASTS * index}
            _rewrite(region, linear, self.scaling, self.takes_units_in, options)
        self.decisions.update(found)
        return (self._summary_of(found),)

    def after_step(self, module: nn.Module, result: Any) -> None:
        """Move the numbers of FP8, if they move."""
        if self.moving_grid is not None:
            self.moving_grid.after_step(module)

    def summary(self) -> str:
        """How many of the products that were seen are in FP8, and how."""
        return self._summary_of(self.decisions)

    def _summary_of(self, decisions: Mapping[str, str | None]) -> str:
        count = sum(reason is None for reason in decisions.values())
        scales = f"{self.scaling} scales" + ("" if self.moving_grid is None else ", moving grid")
        return f"{count} of {len(decisions)} products in FP8 with {scales}"

    def report(self) -> str:
        """Every product with what was decided on it, and why."""
        rows = [
            (name, "kept", reason) if reason else (name, "FP8", self._how(name))
            for name, reason in self.decisions.items()
        ]
        if not rows:
            return ""
        table = tabulate(rows, headers=("product", "runs", "why"))
        return table if self.in_evaluation else f"{table}\n\n{_TRAINING_ONLY}"

    def _how(self, name: str) -> str:
        text = f"{self.scaling} scales, gradients in {self.gradient_of(name)}"
        reason = self.unfit.gradients.get(name)
        return text if reason is None else f"{text}: {reason}"

    def gradient_of(self, name: str) -> GradientFormat:
        """Format of the gradient that arrives at a product."""
        return WIDE_GRADIENT if name in self.unfit.gradients else self.gradient_format

    def _why_not(self, linear: Linear | None, node: fx.Node) -> str | None:
        if linear is None:
            return "it is no linear layer"
        if not self.patterns.match_names(meant_name(node), str(node.meta.get(MODULE, ""))):
            return "its name is excluded"
        return why_not_fp8(linear) or self.unfit.products.get(meant_name(node))

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Linears:
        new = copy.copy(self)
        memo[id(self)] = new
        new.decisions = {}  # a copy is captured anew
        new.moving_grid = copy.copy(self.moving_grid)
        return new


def _rewrite(
    region: Region,
    linear: Linear,
    scaling: Scaling,
    takes_units_in: bool,
    options: dict[str, Any],
) -> None:
    """Let the node of the product run in FP8, with the changes of units around it taken in."""
    graph, node = region.graph, linear.product.node
    paths = [one.path for one in (linear.input, linear.weight)]
    bias = None if linear.bias is None else argument_at(node, linear.bias.path)
    input, weight = (argument_at(node, one) for one in paths)
    factors: tuple[_Factor, ...] = (1.0,) * 6
    result = None
    if scaling == "constant" and takes_units_in:
        input, of_input, of_grad_input = _source(node, linear.input.path)
        weight, of_weight, of_grad_weight = _source(node, linear.weight.path)
        result = _result(node)
        of_result, of_gradient = (1.0, 1.0) if result is None else _factors(result)
        if result is not None and bias is not None:
            # It is added after the result's change of units, which it has to go through as well.
            with graph.inserting_before(node):
                bias = _inner(graph.create_node(*_same_change(result, bias)), bias, node)
        factors = (of_input, of_weight, of_result, of_gradient, of_grad_input, of_grad_weight)
    if linear.is_turned:
        with graph.inserting_before(node):
            weight = _inner(graph.call_method("t", (weight,)), weight, node)
        weight.meta["example_value"] = weight.meta["example_value"].t()
    if result is not None:
        # The tensor that people know is the one in true units, which the node makes now.
        node.meta.pop(INTERNAL, None)
        node.meta.update(result.meta)
        result.replace_all_uses_with(node)
    read = list(node.all_input_nodes)
    node.op, node.target, node.kwargs = "call_function", fp8_linear, options
    node.args = (input, weight, bias, scaling, node.meta["example_value"].dtype, *factors)
    for one in (*([] if result is None else [result]), *read):
        if not one.users and _is_change_of_units(one):
            graph.erase_node(one)


def _source(node: fx.Node, path: tuple[int | str, ...]) -> tuple[fx.Node, _Factor, _Factor]:
    """What an argument is made of, and by which factors, if only this node reads it."""
    argument: fx.Node = argument_at(node, path)
    source = argument.args[0] if argument.args else None
    alone = set(argument.users) == {node}
    if not alone or not _is_change_of_units(argument) or not isinstance(source, fx.Node):
        return argument, 1.0, 1.0
    return source, *_factors(argument)


def _result(node: fx.Node) -> fx.Node | None:
    """The change of units of the node's result, if nobody reads the result without it."""
    users = list(node.users)
    only = users[0] if len(users) == 1 else None
    if only is None or not _is_change_of_units(only) or only.args[0] is not node:
        return None
    return only


def _is_change_of_units(node: fx.Node) -> bool:
    """Whether the node changes units of the gauge, whose factors are nodes: powers of two."""
    known = node.op == "call_function" and node.target in (change_units, change_gradient_units)
    return known and all(isinstance(one, fx.Node) for one in node.args)


def _same_change(change: fx.Node, source: fx.Node) -> tuple[str, Any, tuple[Any, ...]]:
    """What makes a node that changes the units of ``source`` as ``change`` does."""
    return change.op, change.target, (source, *change.args[1:])


def _inner(node: fx.Node, source: fx.Node, product: fx.Node) -> fx.Node:
    """A node of no concern to the user, described after what it is made of."""
    node.meta["example_value"] = source.meta["example_value"]
    node.meta[MODULE] = product.meta.get(MODULE, "")
    node.meta[INTERNAL] = True
    return node


def _factors(change: fx.Node) -> tuple[_Factor, _Factor]:
    """Factors forward and backward of a change of units."""
    forward, backward = change.args[1:] if change.target is change_units else (1.0, change.args[1])
    return forward, backward  # type: ignore[return-value]
