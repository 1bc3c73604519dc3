"""Estimate costs of one ATen operator: matmul operations, bytes moved, workspace, seconds.

The profiler, the planner of rematerialization and the balance of a pipeline use these. A
multiply-add counts as two operations. Only matmuls, convolutions and attention have operations, as
in `torch.utils.flop_counter`. An elementwise operator costs the bytes that it moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from lightning_unitscale.capture.flops import Formula
from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.capture.operators import RULES, UNREACHED
from lightning_unitscale.functional.rules import hint_of
from lightning_unitscale.memory.cpu_workspace import cpu_workspace_bytes
from lightning_unitscale.memory.cuda_workspace import cuda_workspace_bytes
from lightning_unitscale.memory.gpus import DEFAULT_GPU, GPU
from lightning_unitscale.memory.operator_bytes import by_operator

aten = torch.ops.aten
# The assumed value of an unknown size, such as a number of rows that depends on values.
_UNKNOWN_SIZE = 4096
_assumed_sizes: ContextVar[Mapping[Any, int]] = ContextVar("assumed_sizes")


@dataclass(frozen=True)
class OperatorCosts:
    """Costs of one call of an operator.

    Attributes:
        flops: Floating-point operations of its matmuls.
        bytes_moved: Bytes that it reads and writes; 0 for a view.
        workspace_bytes: Bytes that its kernel allocates besides its results.
    """

    flops: int = 0
    bytes_moved: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class CostModel:
    """Speed of a device, to compare plans. It is constant, so that all ranks plan the same.

    Attributes:
        flops_per_second: Rate of matmuls and convolutions.
        bytes_per_second: Rate at which the other operators read and write.
        overhead_seconds: Time to launch an operator.
        random_seconds: Additional time per random element.
        fused: Whether a compiler fuses chains of pointwise operators. They then cost little and
            never store their intermediate values.
        measured: Seconds of nodes by name, which replace the estimates.
    """

    flops_per_second: float = 5e10
    bytes_per_second: float = 8e9
    overhead_seconds: float = 4e-6
    random_seconds: float = 4e-9
    fused: bool = False
    measured: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, name: str, flops: float, num_bytes: int, *, fusible: bool = False) -> float:
        """Return the seconds of a node. A compiler fuses a ``fusible`` one with its neighbors."""
        if name in self.measured:
            return self.measured[name]
        if self.fused and fusible:
            # Within a fused kernel the intermediate values stay in registers.
            return 0.1 * num_bytes / self.bytes_per_second
        work = max(flops / self.flops_per_second, num_bytes / self.bytes_per_second)
        return work + self.overhead_seconds


def default_cost_model(device_type: str, *, fused: bool = False) -> CostModel:
    """Return the model of one core of a CPU, or of a data-center GPU."""
    if device_type == "cpu":
        return CostModel(fused=fused)
    return CostModel(1e14, 1.5e12, 6e-6, 2e-12, fused=fused)


def operator_costs(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    device: str = "cpu",
    gpu: GPU | None = None,
) -> OperatorCosts:
    """Return the costs of one call of an ATen operator."""
    return OperatorCosts(
        operator_flops(function, args, kwargs, result),
        _bytes_moved(function, (args, kwargs), result),
        workspace_bytes(function, args, result, device, gpu),
    )


def aten_node_costs(node: fx.Node) -> OperatorCosts:
    """Return the costs of a node of an ATen graph, whose values are in ``meta["val"]``.

    Symbolic sizes count with the values they were traced with, and stay symbolic.
    """
    if node.op != "call_function":
        return OperatorCosts()
    example = node.meta.get("val")
    values = {read: concrete(read.meta.get("val")) for read in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    device = next((tensor.device.type for tensor in tensors_in(example)), "")
    return operator_costs(node.target, args, kwargs, concrete(example), device=device)


def size_hint(size: Any) -> int:
    """Return the number behind a symbolic size without a guard on it, or 4096 if there is none."""
    if isinstance(size, int):
        return size
    assumed, expression = _assumed_sizes.get({}), size.node.expr
    if assumed and expression.free_symbols <= assumed.keys():
        return int(expression.xreplace(assumed))
    hint = hint_of(size)
    return _UNKNOWN_SIZE if hint is None else int(hint)


@contextlib.contextmanager
def assuming_sizes(sizes: Sequence[torch.SymInt], numbers: Sequence[int]) -> Iterator[None]:
    """Assume other numbers for symbolic sizes than those of the trace, within this context."""
    symbols = [size.node.expr for size in sizes]
    token = _assumed_sizes.set(dict(zip(symbols, numbers, strict=True)))
    try:
        yield
    finally:
        _assumed_sizes.reset(token)


def concrete(value: Any) -> Any:
    """Return an example value with numbers for symbolic sizes, which stay symbolic."""
    if isinstance(value, Tensor):
        if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return value
        shape, strides = map(size_hint, value.shape), map(size_hint, value.stride())
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (tuple, list)):
        return type(value)(concrete(item) for item in value)
    return value


def operator_flops(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    """Return the floating-point operations of the matmuls of one call. A multiply-add is two.

    References:
        The formulas of the table of operators, and of `torch.utils.flop_counter` for others.
    """
    packet = getattr(function, "overloadpacket", function)
    try:
        if (own := _FORMULAS.get(packet)) is not None:
            return own(args, result)
        if (registered := flop_registry.get(packet)) is None:
            return 0
        options = {name: _shapes_in(value) for name, value in kwargs.items()}
        return int(registered(*map(_shapes_in, args), **options, out_val=_shapes_in(result)))
    except (AssertionError, AttributeError, IndexError, TypeError, ValueError):
        return 0  # an overload or form of the call that the formula does not cover


def _bytes_moved(function: Any, inputs: Any, result: Any) -> int:
    """Return the bytes that one call reads and writes, each tensor once."""
    schema = getattr(function, "_schema", None)
    if schema is None:
        is_view = getattr(function, "__name__", "") == "getitem"
    else:
        aliases = [each.alias_info for each in schema.arguments if each.alias_info is not None]
        is_view = bool(aliases) and not any(alias.is_write for alias in aliases)
    if is_view or getattr(function, "overloadpacket", function) in _UNWRITTEN:
        return 0
    read = {id(tensor): tensor for tensor in tensors_in(inputs)}
    return sum(map(_touched_bytes, [*read.values(), *tensors_in(result)]))


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory, a broadcast one once."""
    strides = tensor.stride() if tensor.layout == torch.strided else [1] * tensor.dim()
    sizes = (size for size, stride in zip(tensor.shape, strides, strict=True) if stride != 0)
    return prod(map(int, sizes)) * tensor.element_size()


def _shapes_in(value: Any) -> Any:
    """Replace tensors by their shapes in plain integers, which the formulas read."""
    if isinstance(value, Tensor):
        return torch.Size(map(int, value.shape))
    return tuple(map(_shapes_in, value)) if isinstance(value, (tuple, list)) else value


def _twice(formula: Formula) -> Formula:
    return lambda args, result: 2 * formula(args, result)


_FORMULAS = by_operator(
    {
        **{rule.operator: rule.flops for rule in RULES},
        **{rule.operator: rule.flops for rule in UNREACHED},
        **{f"{r.operator}_backward": _twice(r.flops) for r in UNREACHED if r.has_backward},
    }
)

# These operators allocate memory and do not write to it.
_UNWRITTEN = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
)


def workspace_bytes(
    function: Any, args: Sequence[Any], result: Any, device: str, gpu: GPU | None = None
) -> int:
    """Return the most bytes alive in one call of an operator beyond its arguments and results."""
    if device == "cuda":
        return cuda_workspace_bytes(gpu or DEFAULT_GPU, function, args, result)
    return cpu_workspace_bytes(function, args, result) if device == "cpu" else 0
