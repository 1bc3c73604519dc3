"""Unit-scaled activations that the literature names: gelu, silu, silu_glu, softmax, dropout.

Factors are derived by quadrature. The published ones are fits to a standard deviation of 1, while
the RMS, which also holds the mean, is what a number format sees. With the fits the RMS would be:

|  | mult 0.25 | mult 1 | mult 4 |
|---|---|---|---|
| gelu, output | 1.021 | 1.152 | 1.211 |
| gelu, gradient | 0.997 | 1.023 | 1.016 |
| silu, output | 0.991 | 1.054 | 1.196 |
| silu, gradient | 1.008 | 1.036 | 1.025 |
| silu_glu, output | 1.001 | 1.003 | 1.006 |
| softmax over 8, output | 1.011 | 1.108 | 1.004 |
| softmax over 1024, output | 0.978 | 0.825 | 1.054 |
| softmax over 8, gradient | 0.924 | 0.845 | 0.635 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.quadrature import elementwise_moments
from lightning_unitscale.functional.rule import Factors, ScaleRule, unit_factor
from lightning_unitscale.functional.scaled_call import rule_for, scaled_call

_GELU = rule_for(F.gelu)
_SILU = rule_for(F.silu)
_SOFTMAX = rule_for(F.softmax)
_DROPOUT = rule_for(F.dropout)


def gelu(
    input: Tensor,
    approximate: str = "none",
    *,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Unit-scaled GELU of ``mult * input``.

    Args:
        input: Any shape, at RMS 1.
        approximate: ``"none"`` or ``"tanh"``.
        mult: Above 1 it is closer to a relu, below 1 to a linear map.
        constraint: Between the factors of the output and of the gradient.

    Returns:
        The shape of ``input``, at RMS 1.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``mult`` is not usable.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops; u-muP (arXiv
        2407.17465), table of multipliers, for ``mult``. Factors by quadrature.
    """
    kwargs = {"approximate": approximate}
    result: Tensor = scaled_call(_GELU, F.gelu, (input,), kwargs, constraint=constraint, mult=mult)
    return result


def silu(
    input: Tensor,
    inplace: bool = False,
    *,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Unit-scaled SiLU of ``mult * input``.

    Args:
        input: Any shape, at RMS 1.
        inplace: Accepted for its place in torch's signature; the result is a new tensor.
        mult: Above 1 it is closer to a relu, below 1 to a linear map.
        constraint: Between the factors of the output and of the gradient.

    Returns:
        The shape of ``input``, at RMS 1.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``mult`` is not usable.

    References:
        As :func:`gelu`.
    """
    result: Tensor = scaled_call(_SILU, F.silu, (input,), constraint=constraint, mult=mult)
    return result


def silu_glu(
    input: Tensor,
    gate: Tensor,
    *,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Unit-scaled gated linear unit, ``input * silu(mult * gate)``.

    Args:
        input: Any shape, at RMS 1.
        gate: The same shape, at RMS 1.
        mult: Sharpness of the gate.
        constraint: Between the factors of the output, of the gradient of ``input``, and of that of
            ``gate``.

    Returns:
        The shape of ``input``, at RMS 1.

    Raises:
        TypeError: If ``gate`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``mult`` is not usable.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), appendix on gated activations. Factors by
        quadrature: (E silu(mult x)^2)^-1/2 for the output and the gradient of ``input``.
    """
    result: Tensor = scaled_call(_SILU_GLU, _gated, (gate, input), constraint=constraint, mult=mult)
    return result


def _gated(gate: Tensor, input: Tensor) -> Tensor:
    return input * F.silu(gate)


def _silu_glu_factors(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    output, slope = elementwise_moments(F.silu, mult)
    factor = unit_factor(output)
    return Factors(factor, {"gate": unit_factor(mult**2 * slope), "input": factor})


_SILU_GLU = ScaleRule(
    "silu_glu",
    ("gate", "input"),
    _silu_glu_factors,
    "activation",
    "E x^2 silu(mult y)^2 for independent normal x and y, by quadrature",
)


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    mult: float = 1.0,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Unit-scaled softmax of ``mult * input``: about ``n`` times the probabilities.

    Args:
        input: Any shape, at RMS 1.
        dim: Dimension whose n probabilities sum to 1 before they are scaled.
        dtype: Type to compute in, and of the result.
        mult: Inverse temperature.
        constraint: Between the factors of the output and of the gradient.

    Returns:
        The shape of ``input``, at RMS 1.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.
        ValueError: If ``constraint`` or ``mult`` is not usable.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops. Factors are the exact
        moments of a softmax of independent normal logits.
    """
    kwargs = {"dim": dim, "_stacklevel": _stacklevel, "dtype": dtype}
    result: Tensor = scaled_call(
        _SOFTMAX, F.softmax, (input,), kwargs, constraint=constraint, mult=mult
    )
    return result


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Unit-scaled dropout: what is kept is divided by ``(1 - p)**0.5``, not by ``1 - p``.

    Args:
        input: Any shape, at RMS 1.
        p: Probability of an element to be set to 0, in [0, 1].
        training: Without it the result is the input.
        inplace: Accepted for its place in torch's signature; the result is a new tensor.

    Returns:
        The shape of ``input``, at RMS 1.

    Raises:
        TypeError: If ``input`` is not a floating-point tensor.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops.
    """
    result: Tensor = scaled_call(_DROPOUT, F.dropout, (input, p, training))
    return result
