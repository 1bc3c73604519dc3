"""Run a matmul on scaled copies of its operands, and unscale its results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, methodcaller
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_unitscale.capture.operators import MatmulRule, Sources, combined
from lightning_unitscale.functional.scale import (
    LINE_BYTES,
    POWERS_OF_TWO,
    empty_placed_like,
    multiply,
    placed_strides,
    scale_in_place,
)
from lightning_unitscale.matmuls.measurement import Site
from lightning_unitscale.matmuls.torch_internals import (
    PYTHON_NODE,
    Kernel,
    current_node,
    graph_task,
    overridden_kernel,
)

_HAS_MKL = torch.backends.mkl.is_available()
_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_STRIDED = torch.strided
MAX_PLACEMENTS = 2**6  # limits the placements of its operands for which a matmul is prepared
# A kernel with a factor and the addend that it does not read; both ``None`` for a matmul that is
# added, whose own kernel takes the factor.
_WithFactor = tuple[Kernel | None, Tensor | None]


def least_size(tensors: Sequence[Any]) -> int | None:
    """Return the size of the smallest tensor; ``None`` if not all are dense and real."""
    # Every matmul calls this.
    least = 1
    for tensor in tensors:
        if tensor is None or tensor.dtype not in _FLOATS or tensor.layout is not _STRIDED:
            return None
        least = least and tensor.numel()
    return least


# Every matmul reads its operands by these, which run no code of ours for each operand.
_shape_of: Callable[[Tensor], tuple[int, ...]] = attrgetter("shape")
_strides_of: Callable[[Tensor], tuple[int, ...]] = methodcaller("stride")
_address_of: Callable[[Tensor], int] = methodcaller("data_ptr")
_IN_LINE = LINE_BYTES - 1
_offset_of: Callable[[int], int] = _IN_LINE.__and__
# Shapes, strides and offsets in a cache line of operands; type and device of the first one.
Placement = tuple[
    tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[int, ...], torch.dtype, int
]


def placement_of(operands: Sequence[Tensor]) -> tuple[Placement, tuple[int, ...]]:
    """Return what decides how a matmul runs on its operands, and their addresses."""
    if len(operands) == 2:  # unrolled, this takes half the time
        one, two = operands
        start, other = one.data_ptr(), two.data_ptr()
        return (
            (one.shape, two.shape),
            (one.stride(), two.stride()),
            (start & _IN_LINE, other & _IN_LINE),
            one.dtype,
            one.get_device(),
        ), (start, other)
    addresses = tuple(map(_address_of, operands))
    first = operands[0]
    return (
        tuple(map(_shape_of, operands)),
        tuple(map(_strides_of, operands)),
        tuple(map(_offset_of, addresses)),
        first.dtype,
        first.get_device(),
    ), addresses


@dataclass(eq=False, slots=True)
class Again:
    """A matmul that has run, prepared to run again on operands of the same placement."""

    run: Kernel
    # For each scaled argument: position, exponent, whether it is a gradient, and the factor of a
    # copy that torch places as the argument is; without the factor it must be placed by us.
    scaled: tuple[tuple[int, int, bool, Tensor | float | None], ...]
    addends: list[int]  # positions of its addends
    unscaled: tuple[int, ...] = ()  # exponents of the results' factors


class BackwardMatmul(NamedTuple):
    """A backward matmul that an autograd node runs."""

    rule: MatmulRule
    # Of two operands: the position of the saved one, and which forward operand it is.
    place: int | None
    saved: int | None
    matmul: Matmul


# The backward matmuls of a forward one, by the number of them that ran before.
Visits = dict[int, BackwardMatmul]


@dataclass(slots=True)
class Matmul:
    """A matmul that is about to run."""

    rule: MatmulRule
    site: Site  # of its forward matmul
    slot: str  # ``"forward"``, or the name of a backward matmul
    known: tuple[int | None, ...]  # exponents of its operands' units; ``None`` without one
    is_gradient: tuple[bool, ...]  # which operands are output gradients
    # Names of the operands in the gauge; for a gradient the name of the matmul.
    names: tuple[str, ...]
    step: int  # number of its step
    # Whether its second operand is the weight of a linear layer; ``None`` if the caller must
    # find out.
    reads_weight: bool | None = None
    # The backward matmuls of a forward one and the gradient's unit behind them, by rule and
    # sources.
    backward: dict[tuple[int, Sources], tuple[int, Matmul]] = field(default_factory=dict)
    # The same by the placement of its own operands and the number of a visit.
    visits: dict[Placement, Visits] = field(default_factory=dict)
    # How it runs again, by the placement of its operands.
    again: dict[Placement, Again] = field(default_factory=dict)

    log2_units: tuple[int, ...] = field(init=False)  # as ``known``, with 0 for ``None``
    # For each scaled operand: position, exponent of the factor, and whether it is a gradient.
    scaled: tuple[tuple[int, int, bool], ...] = field(init=False)
    exponents: tuple[int, ...] = field(init=False)  # of the factors of its rule
    # Exponent of its result's factor that BLAS may apply; 0 without one, or without such a kernel.
    common: int = field(init=False)
    # How BLAS applies it, by the operands' type and device; ``None`` if it must not.
    with_factor: dict[tuple[torch.dtype, int], _WithFactor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.take(self.known)

    def take(self, known: tuple[int | None, ...]) -> None:
        """Set the units of its operands."""
        self.known = known
        self.log2_units = tuple(unit or 0 for unit in known)
        rows = zip(self.rule.operands, self.log2_units, self.is_gradient, strict=True)
        self.scaled = tuple((at, -unit, is_one) for at, unit, is_one in rows if unit)
        self.exponents = self.rule.exponents(self.log2_units)
        self.common = -self.exponents[len(known)] if self.rule.with_factor else 0
        self.with_factor = {}

    def visits_of(self, placement: Placement) -> Visits:
        """Return the noted backward matmuls of a call with operands of this placement."""
        if placement not in self.visits:
            if len(self.visits) >= MAX_PLACEMENTS:
                self.visits.clear()
            self.visits[placement] = {}
        return self.visits[placement]

    def places(self) -> Iterator[tuple[int, int, bool, str]]:
        """Yield each operand's position, unit, whether it is a gradient, and name."""
        return zip(self.rule.operands, self.log2_units, self.is_gradient, self.names, strict=True)


@functools.lru_cache(maxsize=2**12)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements in memory from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@functools.lru_cache(maxsize=2**12)
def _copy_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether torch keeps the strides, and those of a copy that begins at a cache line."""
    is_kept = (torch.empty_strided(shape, strides, device="meta") * 2.0).stride() == strides
    if 0 in strides or 0 < _span(shape, strides) < math.prod(shape):
        return is_kept, None
    return is_kept, placed_strides(shape, strides, LINE_BYTES // itemsize)[0]


def scaled_copy(tensor: Tensor, exponent: int) -> Tensor:
    """Return ``tensor * 2**exponent`` with the strides and the alignment of ``tensor``."""
    # BLAS may change the order of summation with the strides and with the offset in a cache line.
    factor = POWERS_OF_TWO[tensor.dtype][exponent]
    # New memory begins at a cache line.
    offset = tensor.data_ptr() % LINE_BYTES
    if offset == 0:
        is_kept, strides = _copy_strides(tensor.shape, tensor.stride(), tensor.element_size())
        if is_kept:
            return tensor.mul(factor)
        if strides is not None:
            return torch.mul(tensor, factor, out=tensor.new_empty_strided(tensor.shape, strides))
    if 0 in tensor.stride():
        return multiply(tensor, 2.0**exponent)
    if 0 < (span := _span(tensor.shape, tensor.stride())) < tensor.numel():
        # Rows overlap, and cuBLAS treats them differently from separate rows.
        memory = scaled_copy(tensor.as_strided((span,), (1,)), exponent)
        return memory.as_strided(tensor.shape, tensor.stride())
    placed = empty_placed_like(tensor, tensor.dtype, offset // tensor.element_size())
    torch.mul(tensor, factor, out=placed)
    return placed


# The last gradient scaled on each thread: autograd node, backward pass, exponent, gradient, copy.
# This is not a thread-local, because the step's thread frees the copies of the engine's threads.
_LAST: dict[int, tuple[Any, int, int, Tensor, Tensor]] = {}


def shared_copy(tensor: Tensor, exponent: int, factor: Tensor | float | None = None) -> Tensor:
    """Return :func:`scaled_copy` of a gradient, or a view of the copy made just before."""
    # With the ``factor``, the copy is the plain product, in torch's own memory.
    # One of torch's own nodes does not write into its gradient. A user's autograd function may,
    # and so may the user between two backward passes through one node.
    node, thread, task = current_node(), get_ident(), graph_task()
    is_shared = node is not None and not isinstance(node, PYTHON_NODE)
    if factor is None:
        is_shared &= _copy_strides(tensor.shape, tensor.stride(), tensor.element_size())[0]
    if is_shared and (last := _LAST.pop(thread, None)) is not None:
        last_node, last_task, last_exponent, source, copy = last
        is_same = last_node is node and last_task == task and last_exponent == exponent
        if is_same and source.data_ptr() == tensor.data_ptr() and source.numel() == tensor.numel():
            return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset())
    copy = scaled_copy(tensor, exponent) if factor is None else tensor.mul(factor)
    if is_shared:
        _LAST[thread] = node, task, exponent, tensor, copy
    return copy


def forget_copy() -> None:
    """Free the last copy of each thread. A running backward pass scales again."""
    _LAST.clear()


def run_in_units(matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a matmul on operands divided by their units, and multiply its results by them."""
    for at, exponent, is_gradient in matmul.scaled:
        # Two consecutive backward matmuls read the same gradient.
        copy_of = shared_copy if is_gradient else scaled_copy
        args[at] = copy_of(args[at], exponent)
    return run_scaled(matmul, original, args, kwargs)


def run_scaled(matmul: Matmul, original: Kernel, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a matmul on scaled operands, and multiply its results by their units."""
    rule = matmul.rule
    if matmul.common:
        first = args[rule.operands[0]]
        key = first.dtype, first.get_device()
        if key not in matmul.with_factor:
            matmul.with_factor[key] = _with_factor(rule, first)
        if (known := matmul.with_factor[key]) is not None:
            run, nothing = known
            factor = 2.0**matmul.common
            if run is None:
                # The addend has its own factor, beta.
                kwargs = {**kwargs, "alpha": kwargs.get("alpha", 1) * factor}
                return original(*args, **kwargs)
            return run(nothing, *rule.operands_in(args), beta=0, alpha=factor)
    units, exponents = matmul.log2_units, matmul.exponents
    for position, index in rule.taking_factors(args):
        if exponents[index]:
            args[position] = scaled_copy(args[position], exponents[index])
    if rule.temperature is not None:
        exponent = combined(rule.temperature, units)
        if exponent:
            kwargs = {**kwargs, "scale": rule.scale_in(args, kwargs) * 2.0**exponent}
    return _unscaled(original(*args, **kwargs), exponents[len(units) + 1 :])


def prepare_again(
    matmul: Matmul, original: Kernel, args: Sequence[Any], placement: Placement
) -> None:
    """Prepare a matmul to run on operands that are placed as its present ones."""
    if placement not in matmul.again:
        if len(matmul.again) >= MAX_PLACEMENTS:
            matmul.again.clear()
        matmul.again[placement] = _again(matmul, original, args)


def _again(matmul: Matmul, original: Kernel, args: Sequence[Any]) -> Again:
    rule, units, exponents = matmul.rule, matmul.log2_units, matmul.exponents
    first: Tensor = args[rule.operands[0]]
    scaled = tuple((*row, _factor_of(args[row[0]], row[1])) for row in matmul.scaled)
    addends = rule.addends_in(args)
    if matmul.common and (known := _with_factor(rule, first)) is not None:
        run, nothing = known
        factor = 2.0**matmul.common
        if run is None:
            run = functools.partial(original, alpha=factor)
        else:
            run = functools.partial(run, nothing, beta=0, alpha=factor)
        return Again(run, scaled, addends)
    others = tuple(
        (position, exponents[index], False, None)
        for position, index in rule.taking_factors(args)
        if exponents[index]
    )
    run = original
    if rule.temperature is not None and (exponent := combined(rule.temperature, units)):
        run = functools.partial(original, scale=rule.scale_in(args, {}) * 2.0**exponent)
    unscaled = exponents[len(units) + 1 :]
    return Again(run, scaled + others, addends, unscaled if any(unscaled) else ())


def _factor_of(tensor: Tensor, exponent: int) -> Tensor | float | None:
    """Return a factor by which :func:`scaled_copy` only multiplies; ``None`` if there is more."""
    if tensor.data_ptr() % LINE_BYTES:
        return None
    is_kept, _ = _copy_strides(tensor.shape, tensor.stride(), tensor.element_size())
    return POWERS_OF_TWO[tensor.dtype][exponent] if is_kept else None


def run_again(again: Again, args: Sequence[Any]) -> Any:
    """Run a prepared matmul, with the bits of :func:`run_in_units`."""
    values = list(args)
    for at, exponent, is_gradient, factor in again.scaled:
        if is_gradient:
            values[at] = shared_copy(values[at], exponent, factor)
        elif factor is None:
            values[at] = scaled_copy(values[at], exponent)
        else:
            values[at] = values[at].mul(factor)
    result = again.run(*values)
    return _unscaled(result, again.unscaled) if again.unscaled else result


def _unscaled(result: Any, exponents: Sequence[int]) -> Any:
    """Multiply results by powers of two, in place."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    for tensor, exponent in zip(results, exponents, strict=False):
        if exponent and tensor is not None:
            scale_in_place(tensor, exponent)
    return result


@functools.cache
def _nothing(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an addend that is never read."""
    return torch.zeros((1,) * dim, dtype=dtype, device=device)


def _with_factor(rule: MatmulRule, operand: Tensor) -> _WithFactor | None:
    if not _takes_factor(operand):
        return None
    if rule.operands[0] > 0:
        return None, None
    # With beta=0 the addend is not read.
    run = overridden_kernel(rule.with_factor, operand.device.type)
    return run, _nothing(operand.dim(), operand.dtype, operand.device)


def _takes_factor(operand: Tensor) -> bool:
    """Check whether BLAS can apply a factor without changing its sums."""
    # cuBLAS multiplies its FP32 or FP64 sums, and the factor does not change its choice of
    # algorithm. MKL's FP32 does the same on all of many thousand tested shapes. FP16 matmuls sum
    # in FP32, and a scaled result may overflow where the unscaled one does not.
    device = operand.device.type
    if device == "cuda" or operand.dtype is torch.float16:
        return device in ("cpu", "cuda")
    return _HAS_MKL and operand.dtype is torch.float32 and device == "cpu"
