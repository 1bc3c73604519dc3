"""Run the FP8 layers of compiled graphs in operations that Inductor fuses with their neighbors.

An operator that casts separately reads its operand once more, and the forward graph keeps that
operand for the backward graph. Here the casts of a layer and its transposes are plain operations
around ``_scaled_mm``. They run in the kernel that makes the operand. Tensors kept for the backward
pass are FP8, or it reads them anyway.

The decisions on layers, and the formats of their gradients, are compiled in. Before Dynamo runs a
graph, it checks that they still hold, and compiles another graph if not. Each run reads the scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.functional.low_precision import GRADIENTS, MULTIPLE, OPERAND, joins_bias
from lightning_unitscale.matmuls.compiled_runs import GraphMatmul
from lightning_unitscale.matmuls.compiler_internals import note_strides
from lightning_unitscale.matmuls.fp8_linear import LAYER_OPERATORS, Mode, fp8_of
from lightning_unitscale.matmuls.joint_graphs import (
    ARRANGED,
    CAST,
    CHECKPOINT,
    CONVERT,
    RECOMPUTE,
    NewNodes,
    value_of,
)
from lightning_unitscale.matmuls.matmul_formats import TensorKind
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.scales.transfer import numbers_on

_ATEN = torch.ops.aten
_OURS = torch.ops.lightning_unitscale
_PASSED = frozenset({*ARRANGED, CAST, "aten.alias.default", "aten.detach.default"})
_TRANSPOSED = ("aten.permute.default", "aten.t.default", "aten.transpose.int")
# Keeping a tensor with this many times fewer elements than another costs next to nothing.
_MUCH_SMALLER = 8
_WEIGHT, _GRADIENT = 1, 2  # the tensors of a layer: input 0, weight 1, gradient 2
_SCALED = ((0, 1), (2, 1), (2, 0))  # the operands of its three matmuls
# The numbers of a layer: the factors of its tensors, the scales of its matmuls, and a 1. cuBLAS
# reads scales at multiples of 16 bytes.
_NUM_NUMBERS, _PITCH = 7, 4
_FIRST_SCALE, _ONE = 3, 6

OUTSIDE = (
    "A compiled graph with FP8 layers runs outside the steps that it was compiled for. Call the "
    "module that is scaled, or compile the module again."
)


@dataclass(frozen=True)
class Layer:
    """A linear layer of a graph that may run in FP8."""

    number: int  # of its forward matmul
    has_backward: bool
    read: TensorKind
    weight: TensorKind


def layer_of(
    forward: GraphMatmul, node: fx.Node, backward: Sequence[tuple[GraphMatmul, fx.Node]]
) -> Layer | None:
    """Return the layer of a forward matmul of a weight; ``None`` if kernels have to run it."""
    if any(
        matmul.rule.operator not in LAYER_OPERATORS or each.kwargs
        for matmul, each in [(forward, node), *backward]
    ):
        return None
    if any(matmul.rule.addends for matmul, _ in backward):
        return None
    operands = [value_of(operand) for operand in forward.rule.operands_in(node.args)]
    sizes = [*operands[0].shape, *operands[1].shape]
    if not all(isinstance(size, int) and size for size in sizes):
        return None
    # Kernels pad sizes that are not multiples of 16. Only the weight's gradient sums over rows.
    makes_weight = any(1 not in matmul.sources for matmul, _ in backward)
    if any(size % MULTIPLE for size in sizes[not makes_weight :]):
        return None
    kinds = (TensorKind(tuple(value.shape), value.dtype, value.device) for value in operands)
    return Layer(forward.number, bool(backward), *kinds)


def modes_of(
    layers: Mapping[int, Layer], found: tuple[MatmulSession, dict[int, Site]] | None
) -> dict[int, Mode]:
    """Return how the FP8 layers of a graph run in the running step."""
    if found is None:
        return {}
    session, sites = found
    numerics = fp8_of(session)
    if numerics is None or session.units.is_looking:
        return {}
    modes = {}
    for number, layer in layers.items():
        site = sites[number]
        units = dict(zip(site.operand_names, site.log2_units, strict=True))
        if layer.has_backward:
            units[site.name] = site.log2_gamma
        unknown = [name for name, unit in units.items() if unit is None]
        # A layer that got its units in this step had none in its forward pass.
        is_new = layer.has_backward and not site.is_settled and bool(site.seen)
        if is_new or not session.units.lacking.keys() >= set(unknown):
            # It will soon have all units. Do not compile the graph again for each of its layers.
            return {}
        if unknown:
            continue
        mode = numerics.compiled_as(site, layer.read, layer.weight)
        if mode is not None:
            modes[number] = mode
    return modes


def numbers_of(session: MatmulSession, sites: Iterable[Site], device: torch.device) -> list[Tensor]:
    """Return the factors and scales of layers, FP32 of shape ``(_NUM_NUMBERS, _PITCH)`` each."""
    numerics, step = fp8_of(session), session.units.rounding_step
    assert numerics is not None, "its layers are compiled"
    numbers = []
    for site in sites:
        factors = numerics.factors(site, step)
        scales = [1.0 / (factors[first] * factors[second]) for first, second in _SCALED]
        for number in (*factors, *scales, 1.0):
            numbers += [number] * _PITCH
    tensor = numbers_on(device, numbers, torch.float32).view(-1, _NUM_NUMBERS, _PITCH)
    parts = empty_numbers(len(tensor), device)
    # Each in its own memory, so that equal layers share kernels.
    torch.split_with_sizes_copy(tensor.flatten(0, 1), [_NUM_NUMBERS] * len(parts), out=parts)
    return parts


def empty_numbers(count: int, device: torch.device) -> list[Tensor]:
    """Allocate the results of :func:`numbers_of`."""
    return [torch.empty(_NUM_NUMBERS, _PITCH, device=device) for _ in range(count)]


@dataclass
class _Cast:
    """A tensor in FP8, in one or both arrangements."""

    source: fx.Node  # the tensor that is cast
    nodes: list[fx.Node]  # that make it; the last is the cast
    factor: fx.Node
    turned: list[fx.Node] = field(default_factory=list)  # that transpose it; the last is in rows


class FP8Layers(NewNodes):
    """Adds layers in FP8 to a graph."""

    def __init__(self, graph: fx.Graph, after_tangents: set[fx.Node]) -> None:
        super().__init__(graph)
        self._after_tangents = after_tangents
        # The node of each layer's numbers, by its forward matmul.
        self.numbers: dict[int, fx.Node] = {}
        # By the forward matmul, and the tensor of the layer.
        self._casts: dict[tuple[int, int], _Cast] = {}

    def replace(self, node: fx.Node, matmul: GraphMatmul, mode: Mode) -> None:
        """Replace a matmul of a layer by one in FP8."""
        first, second = matmul.rule.operands_in(node.args)
        sources = [_GRADIENT if source is None else source for source in matmul.sources]
        with self._graph.inserting_before(node):
            rows = self._laid(first, matmul, sources[0], mode, turned=False)
            columns = self._laid(second, matmul, sources[1], mode, turned=True)
            scale = self._scale(matmul.forward, sources, mode)
            dtype, is_fast = value_of(node).dtype, not matmul.is_backward
            bias, joined = (node.args[0] if matmul.rule.addends else None), None
            if bias is not None and joins_bias(value_of(bias), dtype):
                bias, joined = None, bias
            one = self._numbers(matmul.forward, _ONE)
            columns = self.new(_ATEN.permute.default, columns, [1, 0])
            args = (rows, columns, scale, one, joined, None, dtype, is_fast)
            result = scaled_mm = self.new(_ATEN._scaled_mm.default, *args)
            note_strides(scaled_mm, fx.map_arg(args, value_of))
            if bias is not None:
                result = self.new(_ATEN.add.Tensor, scaled_mm, bias)
        for new in {scaled_mm, result}:
            kept = {k: v for k, v in node.meta.items() if k not in ("val", "eager_input_vals")}
            new.meta = {**kept, **new.meta}
        if RECOMPUTE in node.meta and not matmul.is_backward:
            # A checkpoint within the graph recomputes its casts, as it does the matmul.
            for cast in (self._casts[matmul.forward, which] for which in sources):
                for each in cast.nodes:
                    each.meta[RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE
                    each.meta[CHECKPOINT] = node.meta.get(CHECKPOINT, 0)
        if node in self._after_tangents:
            self._after_tangents.update((scaled_mm, result))
        node.replace_all_uses_with(result)
        self._graph.erase_node(node)

    def finish(self) -> None:
        """Mark the nodes that the backward pass recomputes."""
        for (_, which), cast in self._casts.items():
            if which == _GRADIENT:
                continue
            # Only the backward pass reads the transpose.
            nodes = list(cast.turned)
            if nodes and _is_kept_anyway(cast, self._after_tangents):
                nodes += cast.nodes
            for node in nodes:
                node.meta.setdefault(RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
                node.meta.setdefault(CHECKPOINT, 0)

    def _laid(
        self, node: Any, matmul: GraphMatmul, which: int, mode: Mode, *, turned: bool
    ) -> fx.Node:
        """Return an operand, or its transpose, in FP8 in contiguous rows."""
        source, turned = _upright(node, turned)
        key = matmul.forward, which
        cast = self._casts.get(key)
        if cast is None or cast.source is not source:
            cast = self._casts[key] = self._cast(source, matmul.forward, which, mode)
            if which == _GRADIENT:
                # Otherwise Inductor would write another copy for the matmul that comes first.
                self._turn(cast, which)
        if not turned:
            return cast.nodes[-1]
        self._turn(cast, which)
        return cast.turned[-1]

    def _turn(self, cast: _Cast, which: int) -> None:
        if cast.turned:
            return
        if which == _WEIGHT:
            cast.turned.append(self.new(_ATEN.permute.default, cast.nodes[-1], [1, 0]))
            cast.turned.append(self._in_rows(cast.turned[-1]))
        else:
            cast.turned.append(self.new(_OURS.fp8_turned.default, cast.nodes[-1]))

    def _in_rows(self, node: fx.Node) -> fx.Node:
        return self.new(_ATEN.clone.default, node, memory_format=torch.contiguous_format)

    def _cast(self, source: fx.Node, forward: int, which: int, mode: Mode) -> _Cast:
        scaling, gradient_format = mode
        dtype = GRADIENTS[gradient_format] if which == _GRADIENT else OPERAND
        if scaling == "dynamic":
            factor = self._to_largest(source, dtype)
        else:
            row = self.new(_ATEN.select.int, self.numbers[forward], 0, which)
            factor = self.new(_ATEN.select.int, row, 0, 0)
        value, nodes = value_of(source), list[fx.Node]()

        def then(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            nodes.append(self.new(target, *args, **kwargs))
            return nodes[-1]

        # The operations of ``to_fp8``.
        is_wide = value.dtype is torch.float32
        wide = then(
            _ATEN.mul.Tensor, source if is_wide else then(CONVERT, source, torch.float32), factor
        )
        largest = torch.finfo(dtype).max
        is_finite = then(_ATEN.lt.Scalar, then(_ATEN.abs.default, wide), math.inf)
        clipped = then(_ATEN.clamp_min.default, wide, -largest)
        clipped = then(_ATEN.clamp_max.default, clipped, largest)
        nan = then(_ATEN.full.default, [], math.nan, dtype=torch.float32, device=value.device)
        cast = then(CONVERT, then(_ATEN.where.self, is_finite, clipped, nan), dtype)
        if not value_of(cast).is_contiguous():
            nodes.append(self._in_rows(cast))
        return _Cast(source, nodes, factor)

    def _to_largest(self, source: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Add the operations of the function ``to_largest``."""
        device = value_of(source).device
        magnitudes = self.new(_ATEN.abs.default, source)
        largest = self.new(_ATEN.amax.default, magnitudes, [0, 1])
        largest = self.new(CONVERT, largest, torch.float32)
        is_usable = self.new(
            _ATEN.logical_and.default,
            self.new(_ATEN.gt.Scalar, largest, 2.0**-50),
            self.new(_ATEN.lt.Scalar, largest, math.inf),
        )
        end, one = (
            self.new(_ATEN.full.default, [], number, dtype=torch.float32, device=device)
            for number in (torch.finfo(dtype).max, 1.0)
        )
        factor = self.new(_ATEN.div.Tensor, end, largest)
        return self.new(_ATEN.where.self, is_usable, factor, one)

    def _scale(self, forward: int, sources: Sequence[int], mode: Mode) -> fx.Node:
        """Return the scale of a result, of shape ``(1, 1)``."""
        if mode[0] == "constant":
            pairs = [set(pair) for pair in _SCALED]
            return self._numbers(forward, _FIRST_SCALE + pairs.index(set(sources)))
        factors = [self._casts[forward, which].factor for which in sources]
        factor = self.new(_ATEN.mul.Tensor, *factors)
        return self.new(_ATEN.view.default, self.new(_ATEN.reciprocal.default, factor), [1, 1])

    def _numbers(self, forward: int, row: int) -> fx.Node:
        # Inductor would take a 0-d tensor within a larger one for all of its memory.
        rows = self.new(_ATEN.slice.Tensor, self.numbers[forward], 0, row, row + 1)
        return self.new(_ATEN.slice.Tensor, rows, 1, 0, 1)


def _upright(node: Any, turned: bool) -> tuple[fx.Node, bool]:
    """Return the matrix below transposes, and whether it is then wanted transposed."""
    while str(node.target) in _TRANSPOSED and value_of(node.args[0]).dim() == 2:
        if str(node.target) == _TRANSPOSED[0] and [d % 2 for d in node.args[1]] != [1, 0]:
            break
        node, turned = node.args[0], not turned
    return node, turned


def _is_fused(node: fx.Node) -> bool:
    """Check whether Inductor computes a node within its readers."""
    is_simple = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return node.op == "call_function" and (is_simple or str(node.target) in _PASSED)


def _is_kept_anyway(cast: _Cast, after_tangents: set[fx.Node]) -> bool:
    """Check whether the backward pass has all sources of a tensor without its cast."""
    size, own = value_of(cast.source).numel(), set(cast.nodes)
    leaves, seen, todo = [], {cast.source}, [cast.source]
    while todo:
        node = todo.pop()
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.numel() * _MUCH_SMALLER <= size:
            continue
        if not _is_fused(node):
            leaves += [] if node.op == "placeholder" else [node]
            continue
        for read in node.all_input_nodes:
            if read not in seen:
                seen.add(read)
                todo.append(read)
    return all(not after_tangents.isdisjoint(_readers(leaf, own)) for leaf in leaves)


def _readers(node: fx.Node, without: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the readers of a tensor, also of those that Inductor fuses with it."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in seen and user not in without:
                seen.add(user)
                yield user
                if _is_fused(user):
                    todo.append(user)
