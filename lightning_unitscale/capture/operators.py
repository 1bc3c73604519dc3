"""The table of aten operators that multiply matrices, and how units change their results.

An operator is linear in each of its operands. If operands are divided by powers of two, a result
must be multiplied by the same powers, each to the coefficient in this table:

================================ ======================== =======================================
operator                         operands                 results
================================ ======================== =======================================
``mm(a, b)`` and the like        ``a, b``                 ``a b``
``convolution_backward``         ``g, x, w``              ``dx: g w, dw: g x, db: g``
attention                        ``q, k, v``              ``v``; the temperature takes ``q k``
attention's backward             ``g, q, k, v``           ``dq: g v/q, dk: g v/k, dv: g``
================================ ======================== =======================================

An addend (the bias of ``addmm``) is divided by the units of the matmul that it is added to.

A call may read only some of its arguments. :meth:`MatmulRule.reading` returns the rule of those
that it reads. The rest may be uninitialized memory, as in torch's batching rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.capture.flops import (
    Arguments,
    Formula,
    attention_flops,
    contraction,
    conv_tbc_backward_flops,
    conv_tbc_flops,
    convolution_backward_flops,
    convolution_flops,
    cudnn_recurrent_flops,
    distance_flops,
    encoder_layer_flops,
    grouped_flops,
    recurrent_flops,
    trilinear_flops,
)

# For one result, the power of each operand's unit in it, or ``None`` if none matters.
Coefficients = tuple[int, ...] | None
# The displayed name of a call, and the roles of its operands.
Word = Callable[[Arguments], tuple[str, tuple[str, ...]]]
# For each operand of a backward matmul its forward operand, or ``None`` for the arriving gradient.
Sources = tuple[int | None, ...]


@dataclass(frozen=True)
class MatmulRule:
    """Rule of one aten operator that multiplies matrices."""

    operator: str  # its name in ``torch.ops.aten``
    operands: tuple[int, ...]  # positions of the arguments in which it is linear
    results: tuple[Coefficients, ...]  # the coefficients of each result
    word: Word  # returns the displayed name and the roles of the operands, from the arguments
    flops: Formula  # floating-point operations of a call
    addends: tuple[int, ...] = ()  # positions of arguments that are added to the first result
    # Arguments that are stored in the units of an operand: position and operand.
    follows: tuple[tuple[int, int], ...] = ()
    # Coefficients of the ``scale`` argument of an attention.
    temperature: tuple[int, ...] | None = None
    sources: Sources = ()  # for an operator that is always a backward one, its operands' sources
    mask: int | None = None  # position of the argument that selects the wanted results
    # Position of the argument with the ends of groups. Elements beyond the last end are not read.
    ragged: int | None = None
    # The operator that multiplies the matmul by a number, ``alpha``, and adds it to its first
    # argument. It is the operator itself, if it has that argument.
    with_factor: str = ""
    # The operands of a two-operand matmul, in the order in which autograd computes their gradients.
    # That is the order of the names in its derivative formulas.
    backward_order: tuple[int, ...] = (0, 1)
    # Cached rules by the mask of the operands that calls read, since a rule is slow to hash.
    _masked: dict[tuple[bool, ...], MatmulRule] = field(
        default_factory=dict, compare=False, repr=False
    )

    def reading(self, args: Arguments, kwargs: Mapping[str, Any]) -> MatmulRule:
        """Return the rule without the operands and the addends that a call does not read."""
        rule = self
        if self.mask is not None:
            wanted = tuple(args[self.mask])
            if (found := self._masked.get(wanted)) is None:
                found = self._masked[wanted] = _masked(self, wanted)
            rule = found
        if self.addends and kwargs and kwargs.get("beta", 1) == 0:
            rule = _without_addends(rule)
        return rule

    def mask_of(self, rule: MatmulRule) -> tuple[bool, ...] | None:
        """Return the mask for which :meth:`reading` returned a rule; ``None`` without one."""
        return next((mask for mask, found in self._masked.items() if found is rule), None)

    def multiplies(self, args: Arguments, kwargs: Mapping[str, Any]) -> bool:
        """Check that a call reads two operands. Sums, and calls with empty matrices, do not."""
        are_full = all(operand.numel() for operand in self.operands_in(args))
        return are_full and len(self.operands) > 1 and not self.is_no_matmul(kwargs)

    def is_no_matmul(self, kwargs: Mapping[str, Any]) -> bool:
        """Check whether a call multiplies its matmul by zero and leaves the addend."""
        return bool(self.addends) and kwargs.get("alpha", 1) == 0

    def name_in(self, args: Arguments) -> tuple[str, tuple[str, ...]]:
        """Return the displayed name of a call, and the roles of all of its operands."""
        word, roles = self.word(args)
        if not self.sources:
            return word, roles
        read = tuple("gradient" if k is None else roles[k] for k in self.sources)
        # A call with another mask has other operands, and must have another name.
        return word if len(read) > len(roles) else "_".join((word, *read)), read

    @functools.cached_property
    def operands_in(self) -> Callable[[Arguments], Any]:
        """Return a getter of the operands among the arguments of a call."""
        if len(self.operands) > 1:
            return itemgetter(*self.operands)
        return lambda args: tuple(args[position] for position in self.operands)

    def measured_in(self, args: Arguments) -> Sequence[Tensor]:
        """Return the operands of a call for measurement, without elements beyond the last group."""
        first, *others = operands = self.operands_in(args)
        ends = args[self.ragged] if self.ragged is not None and self.ragged < len(args) else None
        if ends is None:
            return operands
        (second,) = others
        # With a stack of matrices, the single matrix is cut into groups along the dimension that
        # stays. Two matrices are cut along the dimension that is summed over.
        if first.dim() == 2:
            first = _up_to(ends[-1], first, 1 if second.dim() == 2 else 0)
        if second.dim() == 2:
            second = _up_to(ends[-1], second, 0 if operands[0].dim() == 2 else 1)
        return [first, second]

    def addends_in(self, args: Arguments) -> list[int]:
        """Return the positions of the addends that a call has."""
        return [at for at in self.addends if at < len(args) and args[at] is not None]

    @property
    def num_factors(self) -> int:
        """Return the number of :meth:`exponents` of a call."""
        return len(self.operands) + 1 + len(self.results)

    def exponents(self, log2_units: Sequence[int]) -> tuple[int, ...]:
        """Return the exponents of a call's factors: of its operands, addends and results."""
        # A scaled call consists of this and :meth:`taking_factors`, in eager mode and in a compiled
        # graph. The factor of :attr:`temperature` comes on top.
        results = [0 if row is None else combined(row, log2_units) for row in self.results]
        return (*(-unit for unit in log2_units), -sum(log2_units), *results)

    def taking_factors(self, args: Arguments) -> Iterator[tuple[int, int]]:
        """Yield position and factor index of each argument that is multiplied besides operands."""
        for position in self.addends_in(args):
            yield position, len(self.operands)
        yield from self.follows

    def scale_in(self, args: Arguments, kwargs: Mapping[str, Any]) -> float:
        """Return the factor of an attention's logits, given or torch's own."""
        scale = kwargs.get("scale")
        query = args[self.operands[1 if self.sources else 0]]
        return 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)


def combined(coefficients: Sequence[int], log2_units: Sequence[int]) -> int:
    """Return the exponent of a product of units, each to the power of its coefficient."""
    return sum(power * unit for power, unit in zip(coefficients, log2_units, strict=True))


def _masked(rule: MatmulRule, wanted: tuple[bool, ...]) -> MatmulRule:
    """Return a rule with the operands that the wanted results need."""
    made_of = [powers for powers, is_wanted in zip(rule.results, wanted, strict=True) if is_wanted]
    kept = [k for k in range(len(rule.operands)) if any(powers and powers[k] for powers in made_of)]
    return replace(
        rule,
        operands=tuple(rule.operands[k] for k in kept),
        results=tuple(powers and tuple(powers[k] for k in kept) for powers in rule.results),
        sources=tuple(rule.sources[k] for k in kept),
        _masked={},
    )


@functools.cache
def _without_addends(rule: MatmulRule) -> MatmulRule:
    return replace(rule, addends=())


def _up_to(end: Tensor, tensor: Tensor, dim: int) -> Tensor:
    """Return a tensor with earlier elements in place of those past ``end``, or NaN if it is 0."""
    # Keep the size, to avoid a device sync: slices before ``end`` are repeated.
    index = torch.arange(tensor.shape[dim], device=tensor.device) % end.clamp(min=1)
    return torch.where(end > 0, tensor.detach().index_select(dim, index), math.nan)


def _word(word: str, *roles: str) -> Word:
    return lambda _: (word, roles)


def _linear_or(weight: int, word: str, *roles: str) -> Word:
    linear, other = ("linear", ("input", "weight")), (word, roles)

    def of_call(args: Arguments) -> tuple[str, tuple[str, ...]]:
        # F.linear multiplies by its transposed weight. A user's own matrix usually has rows.
        rows, columns = args[weight].stride()
        return linear if rows == 1 and columns == args[weight].shape[0] else other

    return of_call


def is_turned(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Check whether a tensor is a matrix stored column by column."""
    return len(shape) == 2 and strides[0] == 1 and strides[1] == shape[0]


def _convolution_word(args: Arguments) -> tuple[str, tuple[str, ...]]:
    kind = "conv_transpose" if args[6] else "conv"
    return f"{kind}{args[0].dim() - 2}d", ("input", "weight")


def _matmul(operator: str, word: Word, *, is_added: bool = False, **options: Any) -> MatmulRule:
    """Return the rule of a matmul of two matrices or batches, which may be ``is_added``."""
    first, addends = (1, (0,)) if is_added else (0, ())
    flops = contraction(first, first + 1)
    return MatmulRule(operator, (first, first + 1), _BOTH, word, flops, addends, **options)


def _attention(operator: str) -> MatmulRule:
    return MatmulRule(
        operator,
        (0, 1, 2),
        ((0, 0, 1),),
        _word("scaled_dot_product_attention", "query", "key", "value"),
        attention_flops(0, of_depth=1, of_values=1),
        temperature=(1, 1, 0),
    )


def _attention_backward(operator: str, output: int, *, has_bias: bool = False) -> MatmulRule:
    of_bias: tuple[Coefficients, ...] = ((1, 0, 0, 1),) if has_bias else ()
    return MatmulRule(
        operator,
        (0, 1, 2, 3),
        ((1, -1, 0, 1), (1, 0, -1, 1), (1, 0, 0, 0), *of_bias),
        _word("scaled_dot_product_attention", "query", "key", "value"),
        attention_flops(1, of_depth=3, of_values=2),
        follows=((output, 3),),
        temperature=(0, 1, 1, 0),
        sources=(None, 0, 1, 2),
    )


_BOTH: tuple[Coefficients, ...] = ((1, 1),)
_MATMUL = _word("matmul", "input", "other")
_SDPA = "_scaled_dot_product"

RULES: tuple[MatmulRule, ...] = (
    _matmul(
        "mm", _linear_or(1, "matmul", "input", "other"), with_factor="addmm", backward_order=(1, 0)
    ),
    _matmul("bmm", _MATMUL, with_factor="baddbmm", backward_order=(1, 0)),
    _matmul("mv", _MATMUL),
    _matmul("dot", _MATMUL),
    _matmul("vdot", _MATMUL),
    _matmul("addmm", _linear_or(2, "addmm", "mat1", "mat2"), is_added=True, with_factor="addmm"),
    _matmul("baddbmm", _word("baddbmm", "batch1", "batch2"), is_added=True, with_factor="baddbmm"),
    _matmul("addbmm", _word("addbmm", "batch1", "batch2"), is_added=True),
    _matmul("addmv", _word("addmv", "mat", "vec"), is_added=True),
    MatmulRule("convolution", (0, 1), _BOTH, _convolution_word, convolution_flops, addends=(2,)),
    MatmulRule(
        "convolution_backward",
        (0, 1, 2),
        ((1, 0, 1), (1, 1, 0), (1, 0, 0)),
        _word("convolution", "input", "weight"),
        convolution_backward_flops,
        sources=(None, 0, 1),
        mask=10,
    ),
    MatmulRule(
        "conv_tbc", (0, 1), _BOTH, _word("conv_tbc", "input", "weight"), conv_tbc_flops, (2,)
    ),
    MatmulRule(
        "conv_tbc_backward",
        (0, 1, 2),
        ((1, 0, 1), (1, 1, 0), (1, 0, 0)),
        _word("conv_tbc", "input", "weight"),
        conv_tbc_backward_flops,
        sources=(None, 0, 1),
    ),
    MatmulRule(
        "_trilinear",
        (0, 1, 2),
        ((1, 1, 1),),
        _word("bilinear", "input1", "weight", "input2"),
        trilinear_flops,
    ),
    MatmulRule(
        "_grouped_mm",
        (0, 1),
        _BOTH,
        _word("grouped_mm", "mat_a", "mat_b"),
        grouped_flops,
        addends=(3,),
        ragged=2,
    ),
    _attention(f"{_SDPA}_flash_attention_for_cpu"),
    _attention(f"{_SDPA}_flash_attention"),
    _attention(f"{_SDPA}_efficient_attention"),
    _attention(f"{_SDPA}_cudnn_attention"),
    _attention_backward(f"{_SDPA}_flash_attention_for_cpu_backward", 4),
    _attention_backward(f"{_SDPA}_flash_attention_backward", 4),
    _attention_backward(f"{_SDPA}_efficient_attention_backward", 5, has_bias=True),
    _attention_backward(f"{_SDPA}_cudnn_attention_backward", 4),
)
RULE_OF = {rule.operator: rule for rule in RULES}

# Reasons why no factor reaches a matmul's operands, or why it writes into a user's tensor.
DISTANCES = "a kernel of distances"
RECURRENT = "a recurrent kernel, whose matmuls are inside of it"
FUSED = "a fused inference kernel, whose matmuls are inside of it"
COMPILED_BEFORE = "compiled before this callback was attached"
_WIDENED = "a matmul whose result has another type than its operands"


@dataclass(frozen=True)
class UnreachedRule:
    """Operator that multiplies matrices where no factor can reach its operands."""

    operator: str  # its name in ``torch.ops.aten``, with the overload if that is not the default
    reason: str  # why its matmuls run unscaled
    flops: Formula  # floating-point operations of a call
    # True if its gradients come from a kernel of the same kind, with twice the operations.
    has_backward: bool = False
    # The operator of the table whose matmuls this one writes into a given tensor. Factors reach
    # them except in a graph that was compiled before.
    writes: str = ""


# Operators of the table whose results are written, or added, into a tensor: their overload, and the
# argument where their operands begin.
_WRITING = (
    ("addmm", "_", 1),
    ("baddbmm", "_", 1),
    ("addbmm", "_", 1),
    ("addmv", "_", 1),
    ("mm", ".out", 0),
    ("bmm", ".out", 0),
    ("addmm", ".out", 1),
    ("baddbmm", ".out", 1),
)

# CUDA operators whose result has another type than their operands, and where these begin.
_WIDENING = (("mm", 0), ("bmm", 0), ("addmm", 1), ("baddbmm", 1))

UNREACHED: tuple[UnreachedRule, ...] = (
    *(
        UnreachedRule(name + form, COMPILED_BEFORE, contraction(at, at + 1), writes=name)
        for name, form, at in _WRITING
    ),
    *(
        UnreachedRule(f"{name}.{form}", _WIDENED, contraction(at, at + 1))
        for name, at in _WIDENING
        for form in ("dtype", "dtype_out")
    ),
    UnreachedRule("_int_mm", "a matmul of integers", contraction(0, 1)),
    UnreachedRule("_cdist_forward", DISTANCES, distance_flops),
    UnreachedRule("mkldnn_rnn_layer", RECURRENT, recurrent_flops, has_backward=True),
    UnreachedRule("_cudnn_rnn", RECURRENT, cudnn_recurrent_flops, has_backward=True),
    UnreachedRule("_transformer_encoder_layer_fwd", FUSED, encoder_layer_flops),
    UnreachedRule("_native_multi_head_attention", FUSED, encoder_layer_flops),
)
