"""Multiply matrices in FP8, real and simulated: casts, scaled matmul, and a linear layer.

With ``x8 = e4m3(x f_x)``, ``w8 = e4m3(w f_w)`` and ``g8 = e4m3(g f_g)`` or ``e5m2(g f_g)``:

- ``y = x8 w8^T / (f_x f_w) + b``
- ``dx = g8 w8 / (f_g f_w)``, ``dw = g8^T x8 / (f_g f_x)``, ``db`` the sum of ``g``

Constant scales are given: no maximum is computed, and nothing is kept between steps. Dynamic ones
bring the largest element of each tensor to the end of its format.

References:
    Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), section 3; Blake, Orr,
    Luschi, "Unit Scaling" (arXiv 2303.11257), appendix C.

``torch._scaled_mm`` (checked on torch 2.13 on a CPU, and written for 2.11's arguments) needs the
first matrix in rows and the second in columns, and FP32 scales. The inner and the outer dimension
must be multiples of 16, and both formats must not be E5M2. CPUs support more, but a GPU's limits
apply to every device here, so that a model behaves the same on all devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_unitscale.compiling import define_operator
from lightning_unitscale.functional.scale import Factor
from lightning_unitscale.scales.statistics import has_triton

# Dimensions of the operands must be multiples of this, except the number of rows of the first.
MULTIPLE = 16
# Other sizes are padded with zeros if that pays. From PADDED_FROM on it adds at most an eighth of
# the operations. MIN_PADDED_SUM is the least number of terms in each element of the result. FP8
# then saves more time than copying the used part of the result takes.
PADDED_FROM = 8 * MULTIPLE
MIN_PADDED_SUM = 1024

_FIRST_CAPABILITY = (8, 9)
# Types of results to which the hardware's kernel adds a bias.
_WITH_BIAS = (torch.bfloat16, torch.float16)


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a device cannot multiply FP8 matrices, or ``None`` if it can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no FP8 matmul is known for devices of type {device.type!r}"
    if torch.version.hip is not None:
        return "AMD's GPUs are not tested, and some of them have FP8 formats of their own"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, FP8 needs 8.9"
    return None


def joins_bias(bias: Tensor, dtype: torch.dtype) -> bool:
    """Check whether the hardware's kernel adds a bias to a matmul before rounding it."""
    is_row = bias.dim() == 1 and bias.is_contiguous()
    return is_row and bias.dtype == dtype and dtype in _WITH_BIAS and bias.device.type == "cuda"


def scaled_matmul(
    rows: Tensor,
    columns: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``scale * rows @ columns.T``, summed in FP32 and rounded once."""
    size = columns.shape[0]
    if rows.shape[0] == 0 or rows.shape[1] == 0:
        return rows.new_zeros((rows.shape[0], size), dtype=dtype)
    result = torch._scaled_mm(
        _padded(rows),
        _padded(columns, rows=True).t(),
        scale_a=scale,
        scale_b=torch.ones((), dtype=torch.float32, device=rows.device),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return result if size % MULTIPLE == 0 else result[:, :size].contiguous()


def _padded(matrix: Tensor, *, rows: bool = False) -> Tensor:
    """Pad the length of rows, and with ``rows`` their number, with zeros."""
    matrix = matrix.contiguous()
    missing = -matrix.shape[1] % MULTIPLE
    missing_rows = -matrix.shape[0] % MULTIPLE if rows else 0
    if missing == missing_rows == 0:
        return matrix
    # Padding is not implemented for FP8. The byte 0 is the number 0 in both formats.
    padded = torch.nn.functional.pad(matrix.view(torch.uint8), (0, missing, 0, missing_rows))
    return padded.view(matrix.dtype)


Scaling = Literal["constant", "dynamic"]
GradientFormat = Literal["E4M3FN", "E5M2"]

OPERAND = torch.float8_e4m3fn
# Scaled gradients need little range, and E4M3 has half the rounding error.
DEFAULT_GRADIENT: GradientFormat = "E4M3FN"
GRADIENTS = {"E4M3FN": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


# One node to Dynamo, as every function with its own gradient here.
@torch.compiler.allow_in_graph
def fp8_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *factors: float,
    gradient_format: GradientFormat = DEFAULT_GRADIENT,
) -> Tensor:
    """Compute ``input @ weight.T + bias`` in FP8, and keep only FP8 for the backward pass."""
    # The factors are those of the input, the weight and the gradient. Without them scales are
    # dynamic. Reshape outside of the autograd function, because in-place writes need a result that
    # is not a view.
    rows = input.reshape(-1, input.shape[-1])
    is_padded = weight.shape[0] % MULTIPLE > 0 or rows.numel() == 0
    is_joined = bias is not None and not is_padded and joins_bias(bias, dtype)
    joined, added = (bias, None) if is_joined else (None, bias)
    result: Tensor = _FP8Linear.apply(rows, weight, joined, dtype, gradient_format, *factors)
    output = result.reshape(*input.shape[:-1], weight.shape[0])
    return output if added is None else output + added.to(dtype)


def to_fp8(tensor: Tensor, factor: Factor, dtype: torch.dtype) -> Tensor:
    """Cast ``tensor * factor`` to FP8, rounded to nearest."""
    # Values beyond the range become the largest number. Infinities and NaN become NaN, so that
    # earlier failures stay visible.
    wide = tensor.float() * factor
    largest = torch.finfo(dtype).max
    clipped = wide.clamp(-largest, largest)
    return torch.where(wide.isfinite(), clipped, math.nan).to(dtype)


def fp8_matrices(
    matrix: Tensor, factor: Factor, dtype: torch.dtype, *, rows: bool = True, turned: bool = False
) -> list[Tensor]:
    """Return a matrix cast as by :func:`to_fp8`, and its transpose, each if it is wanted."""
    # On CUDA one kernel makes both in one read, as :func:`scaled_matmul` needs them: in rows,
    # padded with zeros to a multiple of 16. Elsewhere the transpose is a view.
    if matrix.device.type != "cuda" or matrix.numel() == 0 or not has_triton():
        cast = to_fp8(matrix, factor, dtype)
        return [cast] * rows + [cast.t()] * turned
    is_tensor = isinstance(factor, Tensor)
    return _MATRICES(
        matrix, [factor] if is_tensor else [], 1.0 if is_tensor else factor, dtype, rows, turned
    )


def _fp8_matrices(
    matrix: Tensor,
    factor: Sequence[Tensor],
    number: float,
    dtype: torch.dtype,
    rows: bool,
    turned: bool,
) -> list[Tensor]:
    scale = factor[0] if factor else number
    matrices = _empty_matrices(matrix, dtype, rows, turned)
    if matrix.is_cuda:
        from lightning_unitscale.functional.triton_cast import cast_matrix

        row_cast, turned_cast = matrices[0] if rows else None, matrices[-1] if turned else None
        cast_matrix(matrix, scale, dtype, row_cast, turned_cast)
        return matrices
    cast = to_fp8(matrix, scale, dtype).view(torch.uint8)
    for made, source in zip(matrices, [cast] * rows + [cast.t()] * turned, strict=True):
        made.view(torch.uint8).zero_()[:, : source.shape[1]] = source
    return matrices


def _empty_matrices(matrix: Tensor, dtype: torch.dtype, rows: bool, turned: bool) -> list[Tensor]:
    height, width = matrix.shape
    shapes = [(height, width)] * rows + [(width, height)] * turned
    return [
        matrix.new_empty((length, -(-inner // MULTIPLE) * MULTIPLE), dtype=dtype)
        for length, inner in shapes
    ]


# It reads any strides, so Inductor need not copy its input.
_MATRICES = define_operator(
    "fp8_matrices(Tensor matrix, Tensor[] factor, float number, ScalarType dtype, bool rows, "
    "bool turned) -> Tensor[]",
    _fp8_matrices,
    lambda matrix, _, __, dtype, rows, turned: _empty_matrices(matrix, dtype, rows, turned),
    torch.Tag.flexible_layout,
)


def _fp8_turned(matrix: Tensor) -> Tensor:
    """Transpose an FP8 matrix into contiguous rows."""
    # An operator, since Inductor would fuse it into a kernel over the rows of the matrix, which
    # writes single bytes.
    if not matrix.is_cuda or not has_triton():
        return matrix.t().contiguous()
    from lightning_unitscale.functional.triton_cast import turn_matrix

    turned = matrix.new_empty(matrix.shape[::-1])
    turn_matrix(matrix, turned)
    return turned


define_operator(
    "fp8_turned(Tensor matrix) -> Tensor",
    _fp8_turned,
    lambda matrix: matrix.new_empty(matrix.shape[::-1]),
    torch.Tag.flexible_layout,
)


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        gradient: GradientFormat,
        *factors: float,
    ) -> Tensor:
        of_input, of_weight = (
            factors[:2] if factors else (to_largest(rows, OPERAND), to_largest(weight, OPERAND))
        )
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        # Hopper multiplies rows by columns only, so gradients read the transposed operands.
        # Operands for an unwanted gradient are not kept.
        rows8, *turned_rows = fp8_matrices(rows, of_input, OPERAND, turned=needs_weight)
        weight8, *turned_weight = fp8_matrices(weight, of_weight, OPERAND, turned=needs_input)
        ctx.save_for_backward(
            turned_rows[0] if needs_weight else None,
            turned_weight[0] if needs_input else None,
            *(() if factors else (of_input, of_weight)),
        )
        ctx.set_materialize_grads(False)
        ctx.factors, ctx.dtypes = factors, (rows.dtype, weight.dtype)
        ctx.gradient = GRADIENTS[gradient]
        scale = undoing(of_input, of_weight, rows)
        return scaled_matmul(rows8, weight8, scale, dtype, fast=True, bias=bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        turned_rows, turned_weight, *kept = ctx.saved_tensors
        of_input, of_weight, of_gradient = ctx.factors or (
            *kept,
            to_largest(gradient, ctx.gradient),
        )
        needs_input, needs_weight = turned_weight is not None, turned_rows is not None
        gradients8 = fp8_matrices(
            gradient, of_gradient, ctx.gradient, rows=needs_input, turned=needs_weight
        )
        grad_rows = grad_weight = None
        if needs_input:
            scale = undoing(of_gradient, of_weight, gradient)
            grad_rows = scaled_matmul(gradients8[0], turned_weight, scale, ctx.dtypes[0])
        if needs_weight:
            scale = undoing(of_gradient, of_input, gradient)
            grad_weight = scaled_matmul(gradients8[-1], turned_rows, scale, ctx.dtypes[1])
        grad_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled():
            link = torch.zeros((), requires_grad=True)
            grad_rows, grad_weight = _Constants.apply(link, grad_rows, grad_weight)
        return grad_rows, grad_weight, grad_bias, *(None,) * (len(ctx.needs_input_grad) - 3)


class _Constants(torch.autograd.Function):
    """Gradients of an FP8 layer, which have no gradients: only FP8 copies of its operands exist."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else each.detach() for each in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "A gradient of a gradient (create_graph=True) reaches an FP8 layer whose operands were "
            "saved in FP8 only. Write create_graph=True in the module's own code, so that layers "
            "save their operands, or exclude the layers from FP8: FP8(exclude=[...])."
        )


def to_largest(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor that brings the largest magnitude to the format's, or 1 without one."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.float32, device=tensor.device)
    largest = tensor.detach().abs().amax().float()
    # Below this the product of two factors could leave FP32.
    usable = (largest > 2.0**-50) & largest.isfinite()
    return torch.where(usable, torch.finfo(dtype).max / largest, 1.0)


def undoing(first: Factor, second: Factor, like: Tensor) -> Tensor:
    """Return the FP32 scale that undoes two factors of a matmul, on the device of a tensor."""
    scale = 1.0 / (first * second)
    if isinstance(scale, Tensor):
        return scale
    return torch.full((), scale, dtype=torch.float32, device=like.device)
