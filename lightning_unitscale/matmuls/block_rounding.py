"""Round the operands of a matmul to block formats, along the dimension that it sums over."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.capture.operators import MatmulRule
from lightning_unitscale.matmuls.execute import Matmul
from lightning_unitscale.matmuls.measurement import FORWARD

# NVFP4's scale of a scaled tensor: a constant instead of a reduction over the tensor. Blocks whose
# largest scaled magnitude is from 0.012 to 336 then have a normal FP8 number as their scale.
UNIT_SCALE = 2.0**-3
_HADAMARD = 16
Axes = tuple[int, ...]
# By operator, the dimension of each operand that is summed over, if it is not that of ``a @ b``.
_AXES = {
    "mv": (-1, -1),
    "addmv": (-1, -1),
    "dot": (-1, -1),
    "vdot": (-1, -1),
    "_trilinear": (-1, -1, -1),
}
# Operators that sum along one dimension, so that an orthogonal transform of both operands cancels.
_TRANSFORMED = ("mm", "bmm", "addmm", "baddbmm")


def axes_of(rule: MatmulRule, args: Sequence[Any]) -> list[Axes]:
    """Return the dimensions of each operand that a call sums over, counted from the end."""
    # A fused attention reads each operand once. Its blocks lie along the head dimension, but those
    # of the values in the forward pass along the sequence. A convolution sums over channels, and
    # its weight gradient over batch and positions.
    name, dim = rule.operator, args[rule.operands[0]].dim()
    if name in ("convolution", "convolution_backward"):
        is_forward = name == "convolution"
        channels, others = (1 - dim,), (-dim, *range(2 - dim, 0))
        if not is_forward and 2 not in rule.operands:
            return [others for _ in rule.operands]
        is_transposed = bool(args[6 if is_forward else 7])
        weight = (-dim,) if is_transposed == is_forward else channels
        return [weight if at == (1 if is_forward else 2) else channels for at in rule.operands]
    if name.startswith("_scaled_dot_product"):
        return [(-2,) if at == 2 and not rule.sources else (-1,) for at in rule.operands]
    if name == "conv_tbc_backward":
        return [(-1,) for _ in rule.operands]
    return [(axis,) for axis in _AXES.get(name, (-1, -2))]


def axes_of_function(word: str, operands: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the dimensions of its operands that a torch function sums over, as :func:`axes_of`."""
    # Empty for functions whose sum does not follow from their name, as that of ``einsum``.
    dims = [operand.dim() for operand in operands]
    if word == "scaled_dot_product_attention" and len(dims) == 3:
        return -1, -1, -2
    if len(dims) != 2:
        return ()
    if word == "linear":
        return -1, -1
    if word.startswith("conv") and word != "conv_tbc":
        channels = 1 - dims[1]
        return channels, -dims[1] if "transpose" in word else channels
    if word in ("matmul", "mv", "addmv", *_TRANSFORMED):
        return -1, -2 if dims[1] > 1 else -1
    return ()


def parts_of(matmul: Matmul, args: Sequence[Any]) -> Iterator[tuple[Matmul, list[Any]]]:
    """Yield the calls that compute the gradients of a convolution's operands one by one."""
    rule = matmul.rule
    if rule.mask is None:
        # A kernel without a mask returns both gradients each time.
        for _ in range(2):
            yield matmul, list(args)
        return
    of_input, of_weight, of_bias = args[rule.mask]
    for wanted in ((of_input, False, False), (False, of_weight, of_bias)):
        if any(wanted):
            given = list(args)
            given[rule.mask] = list(wanted)
            part = rule.reading(given, {})
            kept = [rule.operands.index(position) for position in part.operands]
            new = Matmul(
                part,
                matmul.site,
                matmul.slot,
                tuple(matmul.known[k] for k in kept),
                tuple(matmul.is_gradient[k] for k in kept),
                tuple(matmul.names[k] for k in kept),
                matmul.step,
            )
            yield new, given


class WeightMatmuls:
    """Finds which matmuls read a weight, or compute the gradient of one."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # of the forward matmuls whose second operand is a weight

    def see(self, matmul: Matmul, args: Sequence[Any]) -> None:
        """Note whether a forward matmul reads a weight."""
        if matmul.slot != FORWARD or len(matmul.names) != 2:
            return
        reads = matmul.reads_weight or matmul.site.roles[1:] == ("weight",)
        if reads or is_parameter(args[matmul.rule.operands[1]]):
            self._names.add(matmul.site.name)

    def reads(self, matmul: Matmul, name: str) -> bool:
        """Check whether an operand of a matmul is a weight."""
        site = matmul.site
        return site.name in self._names and name == site.operand_names[1]

    def is_gradient(self, matmul: Matmul) -> bool:
        """Check whether a matmul computes the gradient of a weight, which reads the input."""
        site = matmul.site
        is_one = matmul.slot != FORWARD and matmul.rule.operator in _TRANSFORMED
        return is_one and site.name in self._names and site.operand_names[0] in matmul.names


def hadamard(tensor: Tensor, axis: int, seed: int) -> Tensor:
    """Multiply runs of 16 elements by random signs and the orthogonal Hadamard matrix.

    The signs depend only on the seed. A matmul whose two operands are transformed along the
    dimension of its sum has the same result, and outliers are spread over 16 elements. Elements of
    a last partial run stay.

    References:
        NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), appendix C.
    """
    moved = tensor.movedim(axis, -1)
    whole = moved.shape[-1] // _HADAMARD * _HADAMARD
    if whole == 0:
        return tensor
    bits = zlib.crc32(f"hadamard {seed}".encode())
    signs = [1.0 - 2.0 * (bits >> place & 1) for place in range(_HADAMARD)]
    runs = moved[..., :whole].unflatten(-1, (-1, _HADAMARD)) * tensor.new_tensor(signs)
    for half in (1, 2, 4, 8):
        first, second = runs.unflatten(-1, (-1, 2, half)).unbind(-2)
        runs = torch.stack([first + second, first - second], -2).flatten(-3)
    made = torch.cat([runs.flatten(-2) * _HADAMARD**-0.5, moved[..., whole:]], -1)
    return made.movedim(-1, axis)


def is_parameter(tensor: Tensor) -> bool:
    """Check whether a tensor is a parameter, a view of one, or autocast's copy of one."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    made_by = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return False
    return any(
        source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)
        for source, _ in made_by.next_functions
    )
