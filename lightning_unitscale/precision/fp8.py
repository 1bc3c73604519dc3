"""Linear layers of a graph in real FP8, with the scales that the graph's units already give.

Every operand near RMS 1 is what FP8 needs, so a linear layer and its two gradients become FP8
products with constant scales. Where lossless unit scaling has put changes of units around a layer,
they are taken into its casts and into the products' own scales, so they cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn

from lightning_unitscale.arguments import check_choice
from lightning_unitscale.capture.steps import EVALUATION_STEPS
from lightning_unitscale.functional.low_precision import (
    DEFAULT_GRADIENT,
    MIN_PADDED_SUM,
    MULTIPLE,
    NUM_CASTS,
    PADDED_FROM,
    Casts,
    GradientFormat,
    Scaling,
    why_no_fp8,
)
from lightning_unitscale.graph.matmuls import product_of
from lightning_unitscale.graph.name_patterns import EXCLUDED, NamePatterns
from lightning_unitscale.graph.nodes import MODULE, example_tensor
from lightning_unitscale.graph.passes import GraphPass, Phase, Region, StepGraph
from lightning_unitscale.graph.regions import meant_name
from lightning_unitscale.lossless.fp8_range import Unrepresentable
from lightning_unitscale.precision.dither import Grid, MovingGrid, cast_names, check_grid
from lightning_unitscale.precision.linear import Linear, linear_of, rewrite_linear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_LINEAR = "it is no linear layer"
_NO_PADDING = "and padding would not pay"
EXCLUDED_BY_DEFAULT = f"{EXCLUDED} by default"

# The format of gradients that the finer one does not hold.
WIDE_GRADIENT: GradientFormat = "E5M2"
_TRAINING_ONLY = (
    "FP8 is for training steps: evaluation has the numbers that a checkpoint has without FP8."
)


class FP8Linears(GraphPass):
    """The pass of :func:`fp8_linears`, whose arguments it takes.

    Attributes:
        decisions: For every product seen, why it is not in FP8, or ``None`` if it is.
        gradient_format: Format of gradients that fit into it; E5M2 is that of others.
        unfit: Products that the caller keeps out of FP8, and gradients that it keeps in E5M2.
        unseen: Names of tensors that were zero at first, and that the caller has not seen in their
            units since: what reads them is not cast yet.
        moving_grid: What moves the numbers of FP8; ``None`` where they stay.
        takes_units_in: Whether changes of units around a product become its own factors. If not,
            they are operations by themselves, at which drift can be measured.
        in_evaluation: Whether Lightning's evaluation steps are in FP8 as well. If not, they have
            the numbers that a checkpoint of the module has without FP8.
        casts: How Inductor casts.
        why_excluded: What to say of a layer that ``exclude`` matches.
    """

    name = "fp8 linears"
    phase = Phase.CONVERT

    def __init__(
        self,
        scaling: Scaling = "constant",
        *,
        exclude: str | Sequence[str] | None = None,
        gradient_format: GradientFormat = DEFAULT_GRADIENT,
        grid: Grid = "fixed",
        in_evaluation: bool = True,
        casts: Casts = "fused",
        why_excluded: str = EXCLUDED,
    ) -> None:
        advice = "pass 'constant' together with unit scaling, 'dynamic' without it"
        check_choice("scaling", scaling, get_args(Scaling), "unknown scaling", advice)
        advice = "pass 'E4M3FN' for gradients in units of their own, 'E5M2' for others"
        choices, what = get_args(GradientFormat), "no format of FP8 gradients"
        check_choice("gradient_format", gradient_format, choices, what, advice)
        check_grid(grid)
        advice = "pass 'fused', or what make bench-gpu has found to be faster on this GPU"
        check_choice("casts", casts, get_args(Casts), "no way to cast", advice)
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
        self.unfit = Unrepresentable()
        self.unseen: set[str] = set()
        self.takes_units_in = True
        self.in_evaluation = in_evaluation
        self.casts: Casts = casts
        self.why_excluded = why_excluded

    def runs_in(self, step: str) -> bool:
        """In training, and in evaluation if that is wanted."""
        return self.in_evaluation or step not in EVALUATION_STEPS

    def leave_out(self, unrepresentable: Unrepresentable) -> Unrepresentable:
        """Keep products out of FP8, or their gradients in E5M2, by the products' names."""
        if self.gradient_format == WIDE_GRADIENT:
            unrepresentable = Unrepresentable(unrepresentable.products)
        new = unrepresentable.without(self.unfit)
        self.decisions.update({n: why for n, why in new.products.items() if self.runs(n)})
        self.unfit = self.unfit.joined(unrepresentable)
        return new

    def runs(self, name: str) -> bool:
        """Whether the product of this name is in FP8 in what was rewritten last."""
        return self.decisions.get(name, "not seen") is None

    def forget(self) -> None:
        """Forget the products of a module."""
        self.unfit = Unrepresentable()
        self.unseen.clear()
        self.decisions.clear()

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite one graph."""
        reasons: dict[str, str | None] = {}
        linears: list[tuple[Region, Linear]] = []
        for region in graph.regions():
            for node in region.graph.nodes:
                product = product_of(node)
                if product is None:
                    continue
                linear, name = linear_of(product), meant_name(node)
                reasons[name] = NO_LINEAR if linear is None else self._why_not_node(linear, node)
                if linear is not None and reasons[name] is None:
                    linears.append((region, linear))
        grid = None
        if self.moving_grid is not None and linears:
            names = [name for _, linear in linears for name in cast_names(linear.product)]
            grid = self.moving_grid.add_to(graph, names)
        for index, (region, linear) in enumerate(linears):
            options: dict[str, Any] = {
                "gradient_format": self.gradient_of(meant_name(linear.product.node)),
                "casts": self.casts,
            }
            if grid is not None:
                options |= {"grid": region.thread(grid), "index": NUM_CASTS * index}
            rewrite_linear(region, linear, self.scaling, self.takes_units_in, options)
        self.decisions.update(reasons)
        return (self._summary_of(reasons),)

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

    def _why_not_node(self, linear: Linear, node: fx.Node) -> str | None:
        sources = (linear.input.node, linear.weight.node, node)
        tensors = [example_tensor(source) for source in sources]
        module = str(node.meta.get(MODULE, ""))
        return self.why_not(meant_name(node), module, tensors, node.kwargs, linear.is_turned)

    def why_not(
        self,
        name: str,
        module: str,
        tensors: Sequence[Tensor | None],
        options: Mapping[str, Any],
        is_turned: bool,
    ) -> str | None:
        """Why a linear layer does not run in FP8; ``None`` if it does."""
        if not self.patterns.match_names(name, module):
            return self.why_excluded
        for tensor in tensors:
            if tensor is None or tensor.dtype not in _DTYPES:
                return f"made of {'no tensor' if tensor is None else tensor.dtype}"
        read, weight = tensors[:2]
        assert read is not None and weight is not None
        if weight.dim() != 2:
            return f"its weight has {weight.dim()} dimensions, not 2"
        if read.dim() == 0:
            return "its input is a number"
        for option in ("beta", "alpha"):
            if options.get(option, 1) != 1:
                return f"it has {option}={options[option]}"
        features = weight.shape if is_turned else weight.shape[::-1]
        sums = features[::-1]
        for what, size, num_products in zip(("input", "output"), features, sums, strict=True):
            if not isinstance(size, int):
                return f"its number of {what} features is not fixed"
            is_large = size >= PADDED_FROM and num_products >= MIN_PADDED_SUM
            if size == 0 or (size % MULTIPLE and not is_large):
                return f"its {size} {what} features are no multiple of {MULTIPLE}, {_NO_PADDING}"
        if name not in self.unfit.products and (reason := why_no_fp8(read.device)) is not None:
            raise RuntimeError(
                f"{name} on {read.device}: {reason}; expected a GPU of compute capability 8.9 or "
                "above, or a CPU; leave FP8 out, or simulate it."
            )
        return self.unfit.products.get(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8Linears:
        new = copy.copy(self)
        memo[id(self)] = new
        new.decisions = {}  # a copy is recaptured
        new.unseen = set(self.unseen)
        new.moving_grid = copy.copy(self.moving_grid)
        return new
