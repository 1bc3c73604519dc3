"""The table: every aten operator that multiplies matrices, and what units do to its results.

An operator is linear in each of its operands. With operands divided by powers of two, a result has
to be multiplied by the same powers, each to the coefficient that stands here:

================================ ======================== =======================================
operator                         operands                 results
================================ ======================== =======================================
``mm(a, b)`` and the like        ``a, b``                 ``a b``
``convolution_backward``         ``g, x, w``              ``dx: g w, dw: g x, db: g``
attention                        ``q, k, v``              ``v``; the temperature takes ``q k``
attention's backward             ``g, q, k, v``           ``dq: g v/q, dk: g v/k, dv: g``
================================ ======================== =======================================

An addend (the bias of ``addmm``) is divided by the units of the product that it is added to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

Arguments = Sequence[Any]
# For one result, the power to which each operand's unit enters it; ``None``: none of them does.
Coefficients = tuple[int, ...] | None


@dataclass(frozen=True)
class ProductRule:
    """How one aten operator multiplies.

    Attributes:
        operator: Its name in ``torch.ops.aten``.
        operands: Positions of the arguments in which it is linear.
        results: The coefficients of each result.
        word: What a person calls the operation, and the roles of its operands, from the arguments.
        addends: Positions of arguments that are added to the first result.
        follows: Arguments that are stored in the units of an operand: position and which operand.
        temperature: Coefficients of the ``scale`` argument of an attention.
        gradient: Which operand is an arriving gradient, for an operator that is always a backward
            one.
        with_factor: The function of torch that multiplies the product by a number, ``alpha``, and
            adds it to its first argument; the operator itself, if it has that argument.
        backward_order: The operands of a product of two in the order in which autograd computes
            their gradients: that of the names that its derivatives are written with.
        flops: Floating-point operations of a call.
    """

    operator: str
    operands: tuple[int, ...]
    results: tuple[Coefficients, ...]
    word: Callable[[Arguments], tuple[str, tuple[str, ...]]]
    flops: Callable[[Arguments, Any], int]
    addends: tuple[int, ...] = ()
    follows: tuple[tuple[int, int], ...] = ()
    temperature: tuple[int, ...] | None = None
    gradient: int | None = None
    with_factor: Callable[..., Tensor] | None = None
    backward_order: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class UnreachedRule:
    """An operator that multiplies matrices where no factor can reach its operands.

    Attributes:
        operator: Its name in ``torch.ops.aten``, with the overload if that is not the default.
        reason: Why its products run as they are.
        flops: Floating-point operations of a call.
        has_backward: Whether its gradients come from a kernel of the same kind, with twice as many.
    """

    operator: str
    reason: str
    flops: Callable[[Arguments, Any], int]
    has_backward: bool = False


def _two(word: str, *roles: str) -> Callable[[Arguments], tuple[str, tuple[str, ...]]]:
    return lambda _: (word, roles)


def _mm_word(args: Arguments) -> tuple[str, tuple[str, ...]]:
    # F.linear multiplies by its weight transposed; what a person writes has rows, as a rule.
    if is_turned(args[1]):
        return "linear", ("input", "weight")
    return "matmul", ("input", "other")


def _addmm_word(args: Arguments) -> tuple[str, tuple[str, ...]]:
    if is_turned(args[2]):
        return "linear", ("input", "weight")
    return "addmm", ("mat1", "mat2")


def is_turned(tensor: Tensor) -> bool:
    """Whether a tensor is a matrix that lies in memory column after column."""
    if tensor.dim() != 2:
        return False
    stride = tensor.stride()
    return stride[0] == 1 and stride[1] == tensor.shape[0]


def _convolution_word(args: Arguments) -> tuple[str, tuple[str, ...]]:
    kind = "conv_transpose" if args[6] else "conv"
    return f"{kind}{args[0].dim() - 2}d", ("input", "weight")


def _contraction(first: int, second: int) -> Callable[[Arguments, Any], int]:
    """Multiplications and additions of a product of two matrices, or of two batches of them."""

    def flops(args: Arguments, _: Any) -> int:
        columns = args[second].shape[-1] if args[second].dim() > 1 else 1
        return 2 * int(args[first].numel()) * int(columns)

    return flops


def _registered(operator: str) -> Callable[[Arguments, Any], int]:
    """What torch itself counts."""
    count = flop_registry[getattr(torch.ops.aten, operator)]
    return lambda args, result: int(count(*args, out_val=result))


def _attention_flops(query: int, *, num_products: int) -> Callable[[Arguments, Any], int]:
    def flops(args: Arguments, _: Any) -> int:
        q, k = args[query], args[query + 1]
        return num_products * 2 * int(q.numel()) * int(k.shape[-2])

    return flops


def _trilinear_flops(args: Arguments, result: Any) -> int:
    return 2 * int(args[1].numel()) * int(result.shape[0] if result.dim() else 1)


def _grouped_flops(args: Arguments, result: Any) -> int:
    return 2 * int(result.numel()) * int(args[0].shape[-1])


def _conv_tbc_flops(args: Arguments, result: Any) -> int:
    return 2 * int(result.numel()) * int(math.prod(args[1].shape[:2]))


def _attention(operator: str) -> ProductRule:
    return ProductRule(
        operator,
        (0, 1, 2),
        ((0, 0, 1),),
        _two("scaled_dot_product_attention", "query", "key", "value"),
        _attention_flops(0, num_products=2),
        temperature=(1, 1, 0),
    )


def _attention_backward(operator: str, output: int, *, has_bias: bool = False) -> ProductRule:
    of_bias: tuple[Coefficients, ...] = ((1, 0, 0, 1),) if has_bias else ()
    return ProductRule(
        operator,
        (0, 1, 2, 3),
        ((1, -1, 0, 1), (1, 0, -1, 1), (1, 0, 0, 0), *of_bias),
        _two("scaled_dot_product_attention", "query", "key", "value"),
        _attention_flops(1, num_products=5),
        follows=((output, 3),),
        temperature=(0, 1, 1, 0),
        gradient=0,
    )


_BOTH: tuple[Coefficients, ...] = ((1, 1),)
_SDPA = "_scaled_dot_product"

RULES: tuple[ProductRule, ...] = (
    ProductRule(
        "mm",
        (0, 1),
        _BOTH,
        _mm_word,
        _contraction(0, 1),
        with_factor=torch.addmm,
        backward_order=(1, 0),
    ),
    ProductRule(
        "bmm",
        (0, 1),
        _BOTH,
        _two("matmul", "input", "other"),
        _contraction(0, 1),
        with_factor=torch.baddbmm,
        backward_order=(1, 0),
    ),
    ProductRule("mv", (0, 1), _BOTH, _two("matmul", "input", "other"), _contraction(0, 1)),
    ProductRule("dot", (0, 1), _BOTH, _two("matmul", "input", "other"), _contraction(0, 1)),
    ProductRule(
        "addmm",
        (1, 2),
        _BOTH,
        _addmm_word,
        _contraction(1, 2),
        addends=(0,),
        with_factor=torch.addmm,
    ),
    ProductRule(
        "baddbmm",
        (1, 2),
        _BOTH,
        _two("baddbmm", "batch1", "batch2"),
        _contraction(1, 2),
        addends=(0,),
        with_factor=torch.baddbmm,
    ),
    ProductRule(
        "addbmm",
        (1, 2),
        _BOTH,
        _two("addbmm", "batch1", "batch2"),
        _contraction(1, 2),
        addends=(0,),
    ),
    ProductRule(
        "addmv", (1, 2), _BOTH, _two("addmv", "mat", "vec"), _contraction(1, 2), addends=(0,)
    ),
    ProductRule(
        "convolution", (0, 1), _BOTH, _convolution_word, _registered("convolution"), addends=(2,)
    ),
    ProductRule(
        "convolution_backward",
        (0, 1, 2),
        ((1, 0, 1), (1, 1, 0), (1, 0, 0)),
        _two("convolution", "input", "weight"),
        _registered("convolution_backward"),
        gradient=0,
    ),
    ProductRule(
        "conv_tbc", (0, 1), _BOTH, _two("conv_tbc", "input", "weight"), _conv_tbc_flops, (2,)
    ),
    ProductRule(
        "conv_tbc_backward",
        (0, 1, 2),
        ((1, 0, 1), (1, 1, 0), (1, 0, 0)),
        _two("conv_tbc", "input", "weight"),
        lambda args, _: 4 * int(args[0].numel()) * int(math.prod(args[2].shape[:2])),
        gradient=0,
    ),
    ProductRule(
        "_trilinear",
        (0, 1, 2),
        ((1, 1, 1),),
        _two("bilinear", "input1", "weight", "input2"),
        _trilinear_flops,
    ),
    ProductRule(
        "_grouped_mm",
        (0, 1),
        _BOTH,
        _two("grouped_mm", "mat_a", "mat_b"),
        _grouped_flops,
        addends=(3,),
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

_IN_PLACE = "it writes into a tensor of its caller's"
_RECURRENT = "a recurrent kernel, whose products are inside of it"
_FUSED = "a fused inference kernel, whose products are inside of it"


def _rnn_flops(args: Arguments, _: Any) -> int:
    input, of_input, of_hidden = args[:3]
    return 2 * int(math.prod(input.shape[:2])) * int(of_input.numel() + of_hidden.numel())


def _cudnn_rnn_flops(args: Arguments, _: Any) -> int:
    matrices = sum(int(weight.numel()) for weight in args[1] if weight.dim() > 1)
    return 2 * int(math.prod(args[0].shape[:2])) * matrices


def _encoder_layer_flops(args: Arguments, _: Any) -> int:
    weights = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 2]
    tokens = math.prod(args[0].shape[:-1])
    return 2 * int(tokens) * sum(int(weight.numel()) for weight in weights)


UNREACHED: tuple[UnreachedRule, ...] = (
    UnreachedRule("addmm_", _IN_PLACE, _contraction(1, 2)),
    UnreachedRule("baddbmm_", _IN_PLACE, _contraction(1, 2)),
    UnreachedRule("addbmm_", _IN_PLACE, _contraction(1, 2)),
    UnreachedRule("addmv_", _IN_PLACE, _contraction(1, 2)),
    UnreachedRule("mm.out", _IN_PLACE, _contraction(0, 1)),
    UnreachedRule("bmm.out", _IN_PLACE, _contraction(0, 1)),
    UnreachedRule("addmm.out", _IN_PLACE, _contraction(1, 2)),
    UnreachedRule("baddbmm.out", _IN_PLACE, _contraction(1, 2)),
    UnreachedRule("_cdist_forward", "a kernel of distances", _contraction(0, 0)),
    UnreachedRule("mkldnn_rnn_layer", _RECURRENT, _rnn_flops, has_backward=True),
    UnreachedRule("_cudnn_rnn", _RECURRENT, _cudnn_rnn_flops, has_backward=True),
    UnreachedRule("_transformer_encoder_layer_fwd", _FUSED, _encoder_layer_flops),
    UnreachedRule("_native_multi_head_attention", _FUSED, _encoder_layer_flops),
)
