"""Matrix products in a number format, simulated: what they read is rounded, they are computed wide.

An accumulation in FP32 of products of FP8 numbers is what FP8 hardware does, so rounding the three
tensors that meet in a product and its gradients is all there is to simulate.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_unitscale.functional.simulated_cast import (
    Bits,
    bits_of,
    round_gradient,
    round_operand,
)
from lightning_unitscale.graph.aliasing import aliased_by_mutation
from lightning_unitscale.graph.nodes import (
    INTERNAL,
    MODULE,
    argument_at,
    map_arguments,
    requires_grad,
)
from lightning_unitscale.graph.passes import GraphPass, Region, Stage, StepGraph
from lightning_unitscale.graph.patterns import NamePatterns
from lightning_unitscale.graph.products import Product, product_of, unreachable_products
from lightning_unitscale.quantize import (
    FormatLike,
    Rounding,
    check_rounding,
    checked_format,
    rounding_keys,
)
from lightning_unitscale.transforms.attach import transformed
from lightning_unitscale.transforms.moving_grid import Grid, MovingGrid, cast_names, check_grid
from lightning_unitscale.transforms.units import left_as_they_are, meant_name

# What FP8 means: precision for operands, range for gradients.
FP8_FORMATS = ("E4M3FN", "E5M2")
# Adds a function of a node to the graph of a region, at the point where the graph inserts.
Insert = Callable[[Region, fx.Node], fx.Node]


def simulate_format(
    module: nn.Module,
    fwd_format: FormatLike,
    bwd_format: FormatLike,
    *,
    rounding: Rounding = "nearest",
    saturate: bool | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    seed: int = 0,
    grid: Grid = "fixed",
) -> nn.Module:
    """A copy of ``module`` whose matrix products run as if in low-precision formats.

    Every operand of every product (linear, matmul, einsum, convolution, attention, ...) is rounded
    to one format, and the gradient that arrives at its output to another before the product's own
    gradients are computed from it. Gradients pass the rounding of operands as they are. What is
    added to a product with its gradient, and all that lies between products, keeps its precision.

    Together with :func:`lossless_unit_scale`, in either order, it is the stored operands and
    gradients that are rounded.

    Args:
        module: Any module; it is left as it is.
        fwd_format: Format of the operands: a name, a :class:`NumberFormat`, or ``(exponent_bits,
            mantissa_bits)``.
        bwd_format: Format of the gradients.
        rounding: ``"nearest"`` or ``"stochastic"``, as in :func:`lightning_unitscale.quantize.
            quantize`.
        saturate: Whether what is out of range becomes the largest number; by default it does in
            formats without infinities.
        include: Globs of module paths or tensor names whose products are simulated; all by
            default.
        exclude: Globs to leave out, stronger than ``include``.
        seed: Of stochastic rounding, which leaves torch's random numbers alone.
        grid: ``"fixed"``, or ``"moving"``: every tensor is multiplied by a number in (1/2, 1], and
            divided by it after rounding, another one at every training step, so that the errors of
            a weight that hardly changes average out over the steps.

    Returns:
        A new module with ``explain()``: which products were rounded in its first call, and why
        others were not. Within a ``torch.compile`` of your own it runs as it is, uncompiled.

    Raises:
        ValueError: If a format or a pattern makes no sense, or the module is already compiled.

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3;
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), appendix C.
    """
    one = SimulateFormat(
        fwd_format,
        bwd_format,
        rounding=rounding,
        saturate=saturate,
        include=include,
        exclude=exclude,
        seed=seed,
        grid=grid,
    )
    return transformed(module, "simulate_format", one)


def simulate_fp8(module: nn.Module) -> nn.Module:
    """:func:`simulate_format` with E4M3FN for operands and E5M2 for gradients."""
    return simulate_format(module, *FP8_FORMATS)


def format_pair(simulate: FormatLike | tuple[FormatLike, FormatLike]) -> tuple[Any, Any]:
    """Formats of operands and of gradients from one setting.

    Args:
        simulate: ``"fp8"``, one format for both, or a pair of them by name or description.
    """
    if isinstance(simulate, str) and simulate.strip().lower() == "fp8":
        return FP8_FORMATS
    if not isinstance(simulate, (tuple, list)):
        return simulate, simulate
    if len(simulate) != 2:
        raise ValueError(
            f"simulate={simulate!r}: {len(simulate)} formats; expected 'fp8', a format, or a pair "
            "of formats, of operands and of gradients; pass for example ('E4M3FN', 'E5M2')."
        )
    return simulate[0], simulate[1]


class SimulateFormat(GraphPass):
    """The pass of :func:`simulate_format`, whose arguments it takes.

    Attributes:
        fwd_format: Format of the operands.
        bwd_format: Format of the gradients.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: Of stochastic rounding.
        moving_grid: What moves the numbers of the formats; ``None`` where they stay.
    """

    name = "simulate format"
    stage = Stage.QUANTIZE
    needs_graph = False

    def __init__(
        self,
        fwd_format: FormatLike,
        bwd_format: FormatLike,
        *,
        rounding: Rounding = "nearest",
        saturate: bool | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        seed: int = 0,
        grid: Grid = "fixed",
    ) -> None:
        check_rounding(rounding)
        check_grid(grid)
        self.fwd_format = checked_format(fwd_format)
        self.bwd_format = checked_format(bwd_format)
        self.rounding = rounding
        self.saturate = saturate
        self.moving_grid = MovingGrid() if grid == "moving" else None
        self.patterns = NamePatterns(include, exclude)
        self.seed = seed
        # Keys come from the CPU: the same rounding on every device.
        self._generator = torch.Generator().manual_seed(seed)

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Round what the products of one graph read."""
        sites = find_sites(graph, self.patterns)
        num_operands = sum(len(one.product.operands) for one in sites)
        num_gradients = sum(one.has_gradient for one in sites)
        if sites:
            self._insert(graph, sites)
        lines = (
            f"{num_operands} operands of {len(sites)} products rounded to {self.fwd_format}, "
            f"{num_gradients} gradients to {self.bwd_format} ({self.how})",
        )
        simulated = {one.product.node for one in sites}
        left = [
            node
            for region in graph.regions()
            for node in (*_products(region), *unreachable_products(region.graph))
            if node not in simulated
        ]
        return (*lines, *left_as_they_are(left))

    @property
    def how(self) -> str:
        """The way of rounding, in words."""
        return self.rounding if self.moving_grid is None else f"{self.rounding}, moving grid"

    def summary(self) -> str:
        """What is rounded to what, and how."""
        return f"Operands rounded to {self.fwd_format}, gradients to {self.bwd_format} ({self.how})"

    def after_step(self, module: nn.Module, result: Any) -> None:
        """Move the numbers of the formats, if they move."""
        if self.moving_grid is not None:
            self.moving_grid.after_step(module)

    def _insert(self, graph: StepGraph, sites: Sequence[Site]) -> None:
        names = [
            name for one in sites for name in cast_names(one.product, has_gradient=one.has_gradient)
        ]
        keys = grid = None
        if self.rounding == "stochastic":

            def supply() -> Tensor:
                return rounding_keys(len(names), self._generator, device=graph.device)

            example = torch.zeros((len(names), 2), dtype=torch.int64, device=graph.device)
            keys = graph.add_state("rounding_keys", supply, example)
        if self.moving_grid is not None:
            grid = self.moving_grid.add_to(graph, names)
        index = itertools.count()

        def inserter(function: Callable[..., Tensor], bits: Bits) -> Insert:
            def insert(region: Region, source: fx.Node) -> fx.Node:
                states = (None if one is None else region.thread(one) for one in (keys, grid))
                arguments = (source, bits, self.saturate, next(index), *states)
                return region.graph.call_function(function, arguments)

            return insert

        insert_at_sites(
            sites,
            inserter(round_operand, bits_of(self.fwd_format)),
            inserter(round_gradient, bits_of(self.bwd_format)),
        )

    def state(self) -> Tensor:
        """State of the random numbers, to go on from after a restart."""
        return self._generator.get_state()

    def set_state(self, state: Tensor) -> None:
        """Go on from :meth:`state`."""
        self._generator.set_state(state.cpu())

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulateFormat:
        new = copy.copy(self)
        memo[id(self)] = new
        new._generator = self._generator.clone_state()
        new.moving_grid = copy.copy(self.moving_grid)
        return new


@dataclass(frozen=True)
class Site:
    """A product whose operands and gradient are to be changed.

    Attributes:
        product: The product.
        region: The graph that it is in.
        is_mutated: Whether the step writes into its result afterwards.
    """

    product: Product
    region: Region
    is_mutated: bool

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient arrives at the product."""
        return requires_grad(self.product.node)


def find_sites(graph: StepGraph, patterns: NamePatterns) -> list[Site]:
    """The products of a graph and of its checkpoints whose names match."""
    sites = []
    for region in graph.regions():
        mutated = aliased_by_mutation(region.graph)
        for node in _products(region):
            product = product_of(node)
            path = str(node.meta.get(MODULE, ""))
            if product is not None and patterns.match_names(meant_name(node), path):
                sites.append(Site(product, region, node in mutated))
    return sites


def insert_at_sites(sites: Sequence[Site], on_operand: Insert, on_gradient: Insert) -> None:
    """Put functions between products and what they read, forward and backward.

    Args:
        sites: The products.
        on_operand: Adds a function that makes of an operand what the product reads instead.
        on_gradient: Adds a function that is the identity forward, and backward makes of the
            gradient that arrives at the product's output what the product reads instead.
    """
    for site in sites:
        graph, node = site.region.graph, site.product.node
        replacements = {}
        for one in site.product.operands:
            with graph.inserting_before(node):
                # A rewrite may have put the operand in units of its own: read what is there now.
                changed = on_operand(site.region, argument_at(node, one.path))
            changed.meta["example_value"] = one.node.meta["example_value"]
            changed.meta[MODULE] = node.meta.get(MODULE, "")
            changed.meta[INTERNAL] = True
            replacements[one.path] = changed
        map_arguments(node, replacements)
        if site.has_gradient:
            _insert_on_gradient(site, on_gradient)


def _insert_on_gradient(site: Site, on_gradient: Insert) -> None:
    graph, node = site.region.graph, site.product.node
    with graph.inserting_after(node):
        passed = on_gradient(site.region, node)
    last = passed
    if site.is_mutated:
        # Autograd refuses to write into what may be a view of an autograd function's input.
        with graph.inserting_after(passed):
            last = graph.call_function(torch.clone, (passed,))
        passed.meta["example_value"] = node.meta["example_value"]
        passed.meta[INTERNAL] = True
    node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in (passed, last))
    # The tensor that people know is the one whose gradient has not been changed yet.
    last.meta.update(node.meta)
    node.meta[INTERNAL] = True


def _products(region: Region) -> Iterator[fx.Node]:
    return (node for node in region.graph.nodes if product_of(node) is not None)
