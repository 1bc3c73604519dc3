"""Moments of a softmax over n independent normal logits, exact but for a quadrature.

The sum in the denominator is taken out of the expectation by 1/z^k = int t^(k-1) e^(-tz) dt / k!,
after which the n logits are independent. With w = e^(u + s x), t = e^u, x ~ N(0, 1) and
h_k(u) = E w^k e^(-w):

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
from dataclasses import dataclass

import numpy as np
import torch

# Beyond this standard deviation one logit wins, and the moments do not change any more.
_MAX_STD = 30.0


@dataclass(frozen=True)
class SoftmaxMoments:
    """Expectations of sums over the n probabilities p of one softmax.

    Attributes:
        output: E sum p^2.
        gradient: E sum of squares of the gradient of the logits, for a gradient of independent
            unit entries: E sum p^2 - 2 E sum p^3 + E (sum p^2)^2.
    """

    output: float
    gradient: float


def softmax_moments(n: int, std: float) -> SoftmaxMoments:
    """Moments of a softmax over ``n`` normal logits of standard deviation ``std``."""
    output, gradient = _of_constants(int(n), float(std))
    return SoftmaxMoments(output, gradient)


def causal_softmax_moments(num_queries: int, num_keys: int, std: float) -> SoftmaxMoments:
    """Mean of the moments over the rows of a causal mask: row i sees ``min(i + 1, num_keys)``."""
    output, gradient = _causal_of_constants(int(num_queries), int(num_keys), float(std))
    return SoftmaxMoments(output, gradient)


@torch.compiler.assume_constant_result
def _of_constants(n: int, std: float) -> tuple[float, float]:
    return _moments(n, std)


@torch.compiler.assume_constant_result
def _causal_of_constants(num_queries: int, num_keys: int, std: float) -> tuple[float, float]:
    return _causal_moments(num_queries, num_keys, std)


@functools.lru_cache(maxsize=4096)
def _causal_moments(num_queries: int, num_keys: int, std: float) -> tuple[float, float]:
    longest = min(num_queries, num_keys)
    # The moments are smooth in log n: a few lengths are enough for all of them.
    lengths = np.unique(np.geomspace(1, longest, 48).round().astype(int))
    known = np.array([_moments(int(n), std) for n in lengths])
    rows = np.arange(1, longest + 1)
    means = []
    for column in (0, 1):
        # A softmax over one logit has no gradient.
        values = np.log(np.maximum(known[:, column], 1e-300))
        of_rows = np.exp(np.interp(np.log(rows), np.log(lengths), values))
        total = of_rows.sum() + of_rows[-1] * (num_queries - longest)
        means.append(float(total / num_queries))
    return means[0], means[1]


@functools.lru_cache(maxsize=4096)
def _moments(n: int, std: float) -> tuple[float, float]:
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
