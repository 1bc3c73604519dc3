"""Compute moments of functions of normal variables, and of a softmax of normal logits.

The method is Gauss-Legendre quadrature on narrow panels over [-12, 12], weighted by the normal
density. Hermite nodes would be exact for polynomials. But most activations have a kink, where
Hermite quadrature with n nodes errs by about 1/n. A panel errs only if it contains the kink, and by
its width squared.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), appendix on scaling elementwise ops:
    the factors are defined by these expectations, and were fitted empirically there.

Moments of a softmax: the sum in its denominator is taken out of the expectation by
1/z^k = int t^(k-1) e^(-tz) dt / (k-1)!, after which the n logits are independent. With
w = e^(u + s x), t = e^u, x ~ N(0, 1) and h_k(u) = E w^k e^(-w):

    E sum p^2     = n int h_2 h_0^(n-1) du
    E sum p^3     = n int h_3 h_0^(n-1) du / 2
    E (sum p^2)^2 = n int h_4 h_0^(n-1) du / 6 + n (n-1) int h_2^2 h_0^(n-2) du / 6

For small s the first is e^(s^2) / n; it tends to 1 (one logit wins) as s grows beyond
sqrt(2 ln n). All integrands are smooth and vanish at both ends, so the trapezoidal rule converges
faster than any power of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import Tensor

_LIMIT = 12.0
_NUM_PANELS = 6000
_NODES_PER_PANEL = 4

Array = NDArray[np.float64]


@functools.cache
def normal_nodes() -> tuple[Array, Array]:
    """Return nodes and weights such that ``(weights * f(nodes)).sum()`` is E f(x), x ~ N(0, 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES_PER_PANEL)
    edges = np.linspace(-_LIMIT, _LIMIT, _NUM_PANELS + 1)
    half = (edges[1] - edges[0]) / 2
    x = ((edges[:-1] + half)[:, None] + half * nodes[None, :]).ravel()
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return x, np.tile(weights * half, _NUM_PANELS) * density


def expectation(function: Callable[[Array], Array]) -> float:
    """Compute E f(x) for x ~ N(0, 1), for a numpy function."""
    nodes, weights = normal_nodes()
    return float((weights * function(nodes)).sum())


Numbers = TypeVar("Numbers")


def _constant(function: Callable[..., Numbers]) -> Callable[..., Numbers]:
    """Cache a function of numbers, and make its result a constant to a compiler."""
    cached = functools.lru_cache(maxsize=4096)(function)

    @torch.compiler.assume_constant_result
    @functools.wraps(function)
    def call(*args: float) -> Numbers:
        return cached(*args)

    return call


@_constant
def largest_of_normals(count: int) -> float:
    """Compute the mean square of the largest of ``count`` independent normal numbers."""
    return expectation(lambda x: count * x**2 * ndtr(x) ** (count - 1))


@torch.compiler.assume_constant_result
def elementwise_moments(
    function: Callable[..., Tensor], mult: float = 1.0, options: tuple[tuple[str, Any], ...] = ()
) -> tuple[float, float]:
    """Compute mean squares of ``function(mult * x)`` and its derivative for x ~ N(0, 1)."""
    try:
        hash((function, options))
    except TypeError:
        return _moments.__wrapped__(function, float(mult), options)
    return _moments(function, float(mult), options)


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
                f"function={function!r}: it made {what} of a tensor of shape {tuple(x.shape)}. "
                "Expected a tensor of the same shape, from a function that is elementwise."
            )
        derivative = torch.autograd.grad(y.sum(), x)[0].numpy() if y.requires_grad else 0 * nodes
        return (
            float((weights * y.detach().numpy() ** 2).sum()),
            float((weights * derivative**2).sum()),
        )

    # In a separate thread, which is the only public way out of the caller's fake tensors, autocast,
    # vmap, no_grad and compiler at once. All of these are states of a thread.
    with ThreadPoolExecutor(1) as thread:
        moments = thread.submit(evaluate).result()
    for what, square in zip(("value", "derivative"), moments, strict=True):
        if not math.isfinite(square):
            raise ValueError(
                f"function={function!r}: the mean square of its {what} on normal numbers is "
                f"{square}. Expected a finite one. Measure the factors of this function instead."
            )
    return moments


_MAX_STD = 30.0  # beyond this standard deviation one logit wins, and the moments are constant


class SoftmaxMoments(NamedTuple):
    """Expectations of sums over the n probabilities p of one softmax."""

    output: float  # E sum p^2
    # E sum of squares of the gradient of the logits, for a gradient of independent unit entries:
    # E sum p^2 - 2 E sum p^3 + E (sum p^2)^2.
    gradient: float


def softmax_moments(n: int, std: float) -> SoftmaxMoments:
    """Compute the moments of a softmax over ``n`` normal logits of standard deviation ``std``."""
    return SoftmaxMoments(*_logit_moments(int(n), float(std)))


def causal_softmax_moments(num_queries: int, num_keys: int, std: float) -> SoftmaxMoments:
    """Average the moments over a causal mask's rows: row i sees ``min(i + 1, num_keys)``."""
    return SoftmaxMoments(*_causal_moments(int(num_queries), int(num_keys), float(std)))


@_constant
def _causal_moments(num_queries: int, num_keys: int, std: float) -> tuple[float, float]:
    longest = min(num_queries, num_keys)
    # The moments are smooth in log n, so a few lengths are enough for all of them.
    lengths = np.unique(np.geomspace(1, longest, 48).round().astype(int))
    moments = np.array([_logit_moments(int(n), std) for n in lengths])
    rows = np.arange(1, longest + 1)
    means = []
    for column in (0, 1):
        # A softmax over one logit has no gradient.
        values = np.log(np.maximum(moments[:, column], 1e-300))
        of_rows = np.exp(np.interp(np.log(rows), np.log(lengths), values))
        total = of_rows.sum() + of_rows[-1] * (num_queries - longest)
        means.append(float(total / num_queries))
    return means[0], means[1]


@_constant
def _logit_moments(n: int, std: float) -> tuple[float, float]:
    if n <= 1:
        return 1.0, 0.0
    std = min(abs(std), _MAX_STD)
    x = np.linspace(-9, 9, max(361, math.ceil(18 * std / 0.2) | 1))
    density = np.exp(-(x**2) / 2)
    density /= density.sum()
    start, stop = -math.log(n) - 9 * std - 20, 9 * std + 6
    # Everything is a mean over a stretch of about `std` in u.
    u = np.linspace(start, stop, math.ceil((stop - start) / (0.1 * max(1, std / 4))) + 1)
    log_w = u[:, None] + std * x[None, :]
    w = np.exp(np.minimum(log_w, 700.0))
    decay = np.exp(-w)
    log_h0 = np.log(np.maximum(decay @ density, 1e-300))
    # w^k e^(-w) by its logarithm: w^4 may overflow where e^(-w) is 0.
    h2, h3, h4 = (np.exp(k * log_w - w) @ density for k in (2, 3, 4))
    step = u[1] - u[0]
    others = np.exp((n - 1) * log_h0)
    square = n * (h2 * others).sum() * step
    cube = n * (h3 * others).sum() * step / 2
    same = n * (h4 * others).sum() * step / 6
    cross = n * (n - 1) * (h2**2 * np.exp((n - 2) * log_h0)).sum() * step / 6
    return float(square), float(max(square - 2 * cube + same + cross, 0.0))
