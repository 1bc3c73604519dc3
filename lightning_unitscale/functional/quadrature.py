"""Moments of functions of a normal variable: the scale factors of any elementwise function.

Gauss-Legendre quadrature on narrow panels over [-12, 12], weighted by the normal density. Hermite
nodes would be exact for polynomials, but most activations have a kink, where Hermite quadrature
with n nodes errs by about 1/n; a panel errs only if the kink is inside of it, and by its width
squared.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), appendix on scaling elementwise ops:
    the factors are defined by these expectations, and were fitted empirically there.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

from lightning_unitscale.functional.rule import Factors

_LIMIT = 12.0
_NUM_PANELS = 6000
_NODES_PER_PANEL = 4

Array = NDArray[np.float64]


@functools.cache
def normal_nodes() -> tuple[Array, Array]:
    """Nodes and weights such that ``(weights * f(nodes)).sum()`` is E f(x) for x ~ N(0, 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES_PER_PANEL)
    edges = np.linspace(-_LIMIT, _LIMIT, _NUM_PANELS + 1)
    half = (edges[1] - edges[0]) / 2
    x = ((edges[:-1] + half)[:, None] + half * nodes[None, :]).ravel()
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x, np.tile(weights * half, _NUM_PANELS) * density


def expectation(function: Callable[[Array], Array]) -> float:
    """E f(x) for x ~ N(0, 1), of a numpy function."""
    nodes, weights = normal_nodes()
    return float((weights * function(nodes)).sum())


@torch.compiler.assume_constant_result
def largest_of_normals(count: int) -> float:
    """Mean square of the largest of ``count`` independent normal numbers."""
    return _largest_of_normals(count)


@functools.lru_cache(maxsize=4096)
def _largest_of_normals(count: int) -> float:
    return expectation(lambda x: count * x**2 * ndtr(x) ** (count - 1))


@torch.compiler.assume_constant_result
def elementwise_moments(
    function: Callable[..., Tensor], mult: float = 1.0, options: tuple[tuple[str, Any], ...] = ()
) -> tuple[float, float]:
    """Mean squares of ``function(mult * x)`` and of its derivative there, for x ~ N(0, 1).

    Args:
        function: A torch function that is elementwise in its first argument.
        mult: RMS of the argument.
        options: Further keyword arguments, by name. They and the function are hashed.

    Returns:
        ``(E f(mult x)^2, E f'(mult x)^2)``.
    """
    return _cached_moments(function, float(mult), options)


def elementwise_factors(
    function: Callable[..., Tensor], mult: float = 1.0, **options: Any
) -> Factors:
    """Scale factors of any elementwise function of a normal tensor, derived by quadrature in FP64.

    With x ~ N(0, 1) the output factor is ``(E f(mult x)^2)^(-1/2)``; that of the gradient, which is
    taken with respect to x as in every rule, is ``(mult^2 E f'(mult x)^2)^(-1/2)``, where f' is
    what autograd makes of ``function``.

    Args:
        function: A torch function, elementwise in its first argument: ``torch.nn.functional.mish``
            or one's own.
        mult: RMS of the argument; the function sees ``mult * x``.
        **options: Its other keyword arguments. Hashable ones are cached.

    Returns:
        Factors with ``gradients["input"]``, which is absent where the derivative is 0 everywhere.

    Raises:
        ValueError: If the function or its derivative has no finite mean square (``log``, ``1/x``),
            or if it is not elementwise.

    Example:
        >>> round(elementwise_factors(torch.relu).output, 4)  # E relu(x)^2 = 1/2
        1.4142
    """
    output, gradient = elementwise_moments(function, mult, tuple(options.items()))
    gradients = {"input": (mult**2 * gradient) ** -0.5} if gradient * mult else {}
    return Factors(output**-0.5 if output else 1.0, gradients)


def _cached_moments(
    function: Callable[..., Tensor], mult: float, options: tuple[tuple[str, Any], ...]
) -> tuple[float, float]:
    if _is_hashable((function, options)):
        return _moments(function, mult, options)
    return _moments.__wrapped__(function, mult, options)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _moments(
    function: Callable[..., Tensor], mult: float, options: tuple[tuple[str, Any], ...]
) -> tuple[float, float]:
    nodes, weights = normal_nodes()

    def evaluate() -> tuple[float, float]:
        x = torch.tensor(mult * nodes, dtype=torch.float64, device="cpu", requires_grad=True)
        y = function(x, **dict(options))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            what = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"function={function!r}: it made {what} of a tensor of shape {tuple(x.shape)}; "
                "expected a tensor of the same shape, from a function that is elementwise."
            )
        derivative = torch.autograd.grad(y.sum(), x)[0].numpy() if y.requires_grad else 0 * nodes
        return (
            float((weights * y.detach().numpy() ** 2).sum()),
            float((weights * derivative**2).sum()),
        )

    moments: tuple[float, float] = _in_a_fresh_thread(evaluate)
    for what, square in zip(("value", "derivative"), moments, strict=True):
        if not math.isfinite(square):
            raise ValueError(
                f"function={function!r}: the mean square of its {what} on normal numbers is "
                f"{square}; expected a finite one. Measure the factors of this function instead."
            )
    return moments


def _in_a_fresh_thread(evaluate: Callable[[], Any]) -> Any:
    """Run without the caller's fake tensors, autocast, vmap, no_grad or compiler.

    All of these are states of a thread, and the only public way out of all of them is another one.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(evaluate())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
