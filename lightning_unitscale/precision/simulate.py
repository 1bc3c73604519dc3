"""Simulate matrix products in a number format: round what they read, compute them wide.

An accumulation in FP32 of products of FP8 numbers is what FP8 hardware does, so rounding the three
tensors that meet in a product and its gradients is all there is to simulate.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_unitscale.arguments import check_count, check_flag, shown
from lightning_unitscale.formats import NumberFormat
from lightning_unitscale.functional.scale import whole_view
from lightning_unitscale.graph.aliasing import aliased_by_mutation
from lightning_unitscale.graph.matmuls import Product, product_of, unreachable_products
from lightning_unitscale.graph.name_patterns import NamePatterns
from lightning_unitscale.graph.nodes import (
    INTERNAL,
    MODULE,
    argument_at,
    map_arguments,
    requires_grad,
)
from lightning_unitscale.graph.passes import GraphPass, Phase, Region, StepGraph
from lightning_unitscale.graph.regions import meant_name
from lightning_unitscale.lossless.units import left_as_they_are
from lightning_unitscale.precision.dither import Grid, MovingGrid, cast_names, check_grid
from lightning_unitscale.quantize import (
    FormatLike,
    Rounding,
    check_rounding,
    checked_format,
    rounded,
    rounding_keys,
)
from lightning_unitscale.scales.transfer import sent_to

# The formats of "fp8": precision for operands, range for gradients.
FP8_FORMATS = ("E4M3FN", "E5M2")
# Exponent bits, mantissa bits, finite only: a format as an argument that a graph can hold.
Bits = tuple[int, int, bool]
# Of a rounding: bits, saturate, index, keys, grid.
Settings = tuple[Bits, bool | None, int, Tensor | None, Tensor | None]
_NO_GRADIENTS = (None,) * 5
# Adds a function of a node to the graph of a region, at the point where the graph inserts.
Insert = Callable[[Region, fx.Node], fx.Node]


def format_pair(setting: Any, *, argument: str) -> tuple[Any, Any]:
    """Return the formats of operands and of gradients from one setting."""
    given = f"{argument}={shown(setting)}"
    if isinstance(setting, str) and setting.strip().lower() == "fp8":
        return FP8_FORMATS
    if not isinstance(setting, (tuple, list)):
        checked_format(setting, given=given)
        return setting, setting
    if len(setting) != 2:
        raise ValueError(
            f"{given}: {len(setting)} formats; expected 'fp8', a format, or a pair of formats, of "
            "operands and of gradients; pass for example ('E4M3FN', 'E5M2')."
        )
    for format in setting:
        checked_format(format, given=f"{given}: {shown(format)}")
    return setting[0], setting[1]


class SimulateFormat(GraphPass):
    """The pass of :func:`simulate_format`, whose arguments it takes.

    Attributes:
        operand_format: Format of the operands.
        gradient_format: Format of the gradients.
        rounding: ``"nearest"`` or ``"stochastic"``.
        seed: Of stochastic rounding.
        moving_grid: What moves the numbers of the formats; ``None`` where they stay.
    """

    name = "simulate format"
    phase = Phase.QUANTIZE
    needs_graph = False

    def __init__(
        self,
        operand_format: FormatLike,
        gradient_format: FormatLike,
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
        if saturate is not None:
            check_flag("saturate", saturate)
        check_count("seed", seed, least=0)
        given = f"operand_format={shown(operand_format)}"
        self.operand_format = checked_format(operand_format, given=given)
        given = f"gradient_format={shown(gradient_format)}"
        self.gradient_format = checked_format(gradient_format, given=given)
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
        num_operands = sum(len(site.product.operands) for site in sites)
        num_gradients = sum(site.has_gradient for site in sites)
        if sites:
            self._insert(graph, sites)
        return (
            f"{num_operands} operands of {len(sites)} products rounded to {self.operand_format}, "
            f"{num_gradients} gradients to {self.gradient_format} ({self.rounding_text})",
            *left_as_they_are(_left_out(graph, {site.product.node for site in sites})),
        )

    @property
    def rounding_text(self) -> str:
        """The way of rounding, in words."""
        return self.rounding if self.moving_grid is None else f"{self.rounding}, moving grid"

    def summary(self) -> str:
        """What is rounded to what, and how."""
        formats = f"Operands rounded to {self.operand_format}, gradients to {self.gradient_format}"
        return f"{formats} ({self.rounding_text})"

    def after_step(self, module: nn.Module, result: Any) -> None:
        """Move the numbers of the formats, if they move."""
        if self.moving_grid is not None:
            self.moving_grid.after_step(module)

    def _insert(self, graph: StepGraph, sites: Sequence[Site]) -> None:
        names = [
            name
            for site in sites
            for name in cast_names(site.product, has_gradient=site.has_gradient)
        ]
        keys = grid = None
        if self.rounding == "stochastic":

            def supply() -> Tensor:
                return sent_to(graph.device, rounding_keys(len(names), self._generator))

            example = torch.zeros((len(names), 2), dtype=torch.int64, device=graph.device)
            keys = graph.add_state("rounding_keys", supply, example)
        if self.moving_grid is not None:
            grid = self.moving_grid.add_to(graph, names)
        index = itertools.count()

        def inserter(function: Callable[..., Tensor], bits: Bits) -> Insert:
            def insert(region: Region, source: fx.Node) -> fx.Node:
                states = (None if state is None else region.thread(state) for state in (keys, grid))
                arguments = (source, bits, self.saturate, next(index), *states)
                return region.graph.call_function(function, arguments)

            return insert

        insert_at_sites(
            sites,
            inserter(round_operand, bits_of(self.operand_format)),
            inserter(round_gradient, bits_of(self.gradient_format)),
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
        for node in region.graph.nodes:
            product = product_of(node)
            path = str(node.meta.get(MODULE, ""))
            if product is not None and patterns.match_names(meant_name(node), path):
                sites.append(Site(product, region, node in mutated))
    return sites


def _left_out(graph: StepGraph, simulated: Collection[fx.Node]) -> list[fx.Node]:
    """The other products."""
    left: list[fx.Node] = []
    for region in graph.regions():
        products = (node for node in region.graph.nodes if product_of(node) is not None)
        left += (node for node in products if node not in simulated)
        left += unreachable_products(region.graph)
    return left


def insert_at_sites(sites: Sequence[Site], on_operand: Insert, on_gradient: Insert) -> None:
    """Put functions between products and what they read, forward and backward."""
    for site in sites:
        graph, node = site.region.graph, site.product.node
        operands = {}
        for operand in site.product.operands:
            with graph.inserting_before(node):
                # A rewrite may have put the operand in units of its own: read what is there now.
                read = on_operand(site.region, argument_at(node, operand.path))
            read.meta["example_value"] = operand.node.meta["example_value"]
            read.meta[MODULE] = node.meta.get(MODULE, "")
            read.meta[INTERNAL] = True
            operands[operand.path] = read
        map_arguments(node, operands)
        if site.has_gradient:
            with graph.inserting_after(node):
                result = on_gradient(site.region, node)
            _replace_result(site, result)


def _replace_result(site: Site, result: fx.Node) -> None:
    """Have everybody read ``result``, the product's own result with its gradient rounded."""
    graph, node = site.region.graph, site.product.node
    last = result
    if site.is_mutated:
        # Autograd refuses to write into what may be a view of an autograd function's input.
        with graph.inserting_after(result):
            last = graph.call_function(torch.clone, (result,))
        result.meta["example_value"] = node.meta["example_value"]
        result.meta[INTERNAL] = True
    node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in (result, last))
    # The tensor that is shown is the one whose gradient has not been rounded yet.
    last.meta.update(node.meta)
    node.meta[INTERNAL] = True


def bits_of(format: NumberFormat) -> Bits:
    """A format as an argument that a graph can hold."""
    return format.exponent_bits, format.mantissa_bits, format.finite_only


def round_operand(input: Tensor, *settings: *Settings) -> Tensor:
    """``input`` rounded to a format, as :func:`_rounded` says; its gradient passes as it is."""
    result: Tensor = _RoundOperand.apply(input, *settings)
    return result


def round_gradient(input: Tensor, *settings: *Settings) -> Tensor:
    """``input`` itself, whose gradient is rounded to a format, as :func:`_rounded` says."""
    result: Tensor = _RoundGradient.apply(input, *settings)
    return result


class _RoundOperand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *settings: *Settings) -> Tensor:
        ctx.set_materialize_grads(False)
        return _rounded(input, *settings)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad_output, *_NO_GRADIENTS


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, *settings: *Settings) -> Tensor:
        ctx.set_materialize_grads(False)
        *ctx.settings, keys, grid = settings
        ctx.save_for_backward(keys, grid)
        return whole_view(input)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return None, *_NO_GRADIENTS
        return _rounded(grad_output, *ctx.settings, *ctx.saved_tensors), *_NO_GRADIENTS


def _rounded(
    tensor: Tensor,
    bits: Bits,
    saturate: bool | None,
    index: int,
    keys: Tensor | None,
    grid: Tensor | None,
) -> Tensor:
    """A tensor rounded to a format."""
    key = None if keys is None else keys[index]
    if grid is None:
        return rounded(tensor, _format(bits), saturate, key)
    # In FP32, where a number of FP8 and its product with the factor differ by one rounding at most.
    factor = grid[index]
    wide = rounded(tensor.detach().float() * factor, _format(bits), saturate, key)
    return (wide / factor).to(tensor.dtype)


@cache
def _format(bits: Bits) -> NumberFormat:
    return NumberFormat("format", *bits)
