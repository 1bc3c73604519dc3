"""Extreme numbers and memory layouts: zeros, NaN, infinities, subnormals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.demos import Transformer
from torch import Tensor, nn

from tests.conformance.cases import Batches, Zoo, each, linear, noise, rows, weighted_sum

zoo = Zoo("numbers")
CASES = zoo.cases


def _network(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = m.b(torch.tanh(m.a(x)))
    return h, h @ x.mT


def _matmul(m: Any, x: Tensor) -> Tensor:
    return m.a(x)


def _batch(make: Callable[[Tensor], Tensor]) -> Batches:
    """Three batches of 4 rows of 8 normal numbers, changed by a function."""
    return each(lambda index: (make(torch.randn(4, 8)),))


def _sizes(*sizes: float) -> Batches:
    """Three batches of normal numbers, each of its own size."""
    return each(lambda index: (torch.randn(4, 8) * sizes[index],))


INPUTS: dict[str, Batches] = {
    "zeros": _batch(torch.zeros_like),
    "negative_zeros": _batch(lambda x: -torch.zeros_like(x)),
    "many_zeros": _batch(torch.relu),
    "zeros_at_first": _sizes(0.0, 1.0, 100.0),
    "zeros_later": _sizes(1.0, 0.0, 100.0),
    "subnormal": _batch(lambda x: x * 1e-40),
    "smallest": _batch(lambda x: x.sign() * 2.0**-149),
    "tiny": _sizes(1e-30, 1e-32, 1e-28),
    "near_the_smallest_normal": _sizes(1e-37, 1e-38, 3e-38),
    "huge": _sizes(1e18, 1e19, 1e17),
    "growing": _sizes(1e-18, 1.0, 1e18),
    "shrinking": _sizes(1e18, 1.0, 1e-18),
    "growing_from_nothing": _sizes(1e-30, 1.0, 1e18),
    "shrinking_to_nothing": _sizes(1e15, 1e-20, 1e-38),
    "of_all_sizes": _batch(lambda x: x * torch.logspace(-38, 18, 8)),
    "few_of_all_sizes": _batch(lambda x: x * torch.logspace(-45, 0, 8)),
    "rare": _batch(lambda x: torch.where(x > 2.0, x * 1e6, 0.0)),
    "powers_of_two": _batch(lambda x: torch.exp2(x.round())),
    "ties": _batch(lambda x: 1.25 * (1.0 + 2.0**-23) * x.sign()),
    "integers": _batch(lambda x: (x * 10).round()),
}
for _name, _batches in INPUTS.items():
    zoo.step(_batches, name=_name)(_network)

SPECIAL = {"nan": math.nan, "infinite": math.inf, "negatively_infinite": -math.inf}
for _name, _number in SPECIAL.items():
    zoo.step(
        _batch(lambda x, number=_number: torch.where(x > 1.0, number, x)),
        name=_name,
        is_finite=False,
    )(_network)
    zoo.step(
        each(
            lambda i, number=_number: (torch.randn(4, 8).masked_fill(torch.tensor(i == 1), number),)
        ),
        name=f"{_name}_in_the_second_batch",
        is_finite=False,
    )(_network)


def _weight(size: float) -> Callable[[], nn.Linear]:
    def make() -> nn.Linear:
        layer = nn.Linear(8, 8)
        with torch.no_grad():
            layer.weight.mul_(size)
        return layer

    return make


zoo.step(
    _sizes(1e30, 1e29, 1e30),
    name="huge_by_tiny",
    loss=lambda output: weighted_sum(output) * 1e-33,
    a=_weight(1e-30),
)(_matmul)
zoo.step(_sizes(1e-30, 1e-29, 1e-30), name="tiny_by_huge", a=_weight(1e20))(_matmul)
zoo.step(_sizes(1e-22, 1e-21, 1e-22), name="matmuls_that_vanish", a=_weight(1e-22))(_matmul)
zoo.step(_sizes(1e-18, 1e-19, 1e-18), name="subnormal_matmuls", a=_weight(1e-20))(_matmul)
zoo.step(_sizes(1e20, 1e20, 1e20), name="matmuls_that_overflow", is_finite=False, a=_weight(1e20))(
    _matmul
)


@zoo.step(
    each(lambda i: (torch.tensor([[2e38, 2e38, -2e38, -2e38, 0, 0, 0, 0]]).repeat(4, 1),)),
    loss=lambda output: weighted_sum(output[1]),
    a=lambda: nn.Parameter(torch.ones(8, 8)),
    b=linear(),
)
def sums_that_overflow_on_the_way(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ m.a, m.b(x / 2e38)


@zoo.step(
    each(lambda i: (torch.randn(4, 8) * torch.tensor([1.0] * 4 + [1e-25] * 4),)),
    a=lambda: nn.Parameter(torch.randn(8, 8) * torch.tensor([1.0] * 4 + [1e-25] * 4)[:, None]),
)
def terms_that_vanish_beside_others(m: Any, x: Tensor) -> Tensor:
    return (1.25 * x) @ m.a


@zoo.step(rows(2, 6, 8), a=linear(), b=linear())
def saturated_attention(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    weights = F.dropout((h @ x.mT).softmax(-1), 0.2)
    return m.b(weights @ x)


@zoo.step(rows(2, 6, 8), a=linear(), b=linear())
def saturated_fused_attention(m: Any, x: Tensor) -> Tensor:
    return m.b(F.scaled_dot_product_attention(m.a(x) * 20, x, x, is_causal=True))


@zoo.step(rows(2, 4, 8), a=linear())
def masks_of_infinities_and_of_the_largest_number(m: Any, x: Tensor) -> Tensor:
    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    mask[3, 1] = -torch.inf
    return torch.baddbmm(mask.expand(2, 4, 4), m.a(x), x.mT).softmax(-1) @ x


zoo.add(
    "attention_that_saturates_later",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    each(lambda i: (noise(i, 2, 5, 8),) * 3),
)


@zoo.step(_sizes(1e-3, 1.0, 1e3))
def tiny_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x))) * 1e-35


@zoo.step(_sizes(1e-3, 1.0, 1e3))
def huge_losses(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x))) * 1e15


@zoo.step(
    each(lambda i: (torch.randn(4, 8, dtype=torch.float64) * 10.0 ** (200 - 150 * i),)),
    a=lambda: nn.Linear(8, 8).double(),
)
def double_beyond_the_range_of_single(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ (m.a.weight * 1e-200)


@zoo.step(
    each(lambda i: ((torch.randn(4, 8) * 10.0 ** (-4 - i)).half(),)),
    a=lambda: nn.Linear(8, 8).half(),
)
def half_near_its_smallest(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ x.mT


@zoo.step(
    each(lambda i: ((torch.randn(4, 8) * 10.0 ** (4 - i)).half(),)),
    a=lambda: nn.Linear(8, 8).half(),
    is_finite=False,
)
def half_near_its_largest(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ (x / 1024).mT


@zoo.step(
    each(lambda i: ((torch.randn(4, 8) * 10.0 ** (-20 - i)).bfloat16(),)),
    a=lambda: nn.Linear(8, 8).bfloat16(),
)
def bfloat16_of_tiny_numbers(m: Any, x: Tensor) -> Tensor:
    return m.a(x) @ x.mT


# Sizes at which BLAS takes other ways, among them those of vectors.
for _n, _k, _m in ((1, 1, 1), (1, 257, 65), (33, 257, 1), (33, 1, 65), (17, 129, 64), (64, 96, 48)):
    zoo.step(
        each(lambda i, n=_n, k=_k: (noise(i, n, k),)),
        name=f"matmul_of_{_n}_by_{_k}_by_{_m}",
        a=lambda k=_k, m=_m: nn.Linear(k, m),
    )(_matmul)
    zoo.step(
        each(lambda i, n=_n, k=_k: (noise(i, 3, n, k),)),
        name=f"batched_matmul_of_{_n}_by_{_k}_by_{_m}",
        a=lambda k=_k, m=_m: nn.Parameter(torch.randn(3, k, m) * 0.01),
    )(lambda m, x: torch.bmm(x, m.a))


def _odd_offset(index: int, *shape: int) -> Tensor:
    """A tensor whose address is a multiple of its element size only."""
    return noise(index, 3 + math.prod(shape))[3:].view(shape)


def _laid_out(index: int, kind: str) -> Tensor:
    if kind == "transposed":
        return noise(index, 65, 33).mT
    if kind == "every_second_row":
        return noise(index, 66, 65)[::2]
    if kind == "every_second_column":
        return noise(index, 33, 130)[:, ::2]
    if kind == "expanded_row":
        return noise(index, 1, 65).expand(33, 65)
    if kind == "expanded_column":
        return noise(index, 33, 1).expand(33, 65)
    if kind == "odd_offset":
        return _odd_offset(index, 33, 65)
    if kind == "inner_columns":
        return noise(index, 33, 70)[:, 3:68]
    if kind == "permuted":
        return noise(index, 3, 65, 11).permute(0, 2, 1).reshape(33, 65)
    return noise(index, 97)[: 33 + 64].unfold(0, 65, 1)


for _kind in (
    "transposed", "every_second_row", "every_second_column", "expanded_row", "expanded_column",
    "odd_offset", "inner_columns", "permuted", "overlapping",
):  # fmt: skip
    zoo.step(
        each(lambda i, kind=_kind: (_laid_out(i, kind),)),
        name=f"layout_{_kind}",
        a=linear(65, 17),
        b=linear(17, 65),
    )(lambda m, x: m.b(torch.tanh(m.a(x))) @ x.mT)


@zoo.step(each(lambda i: (noise(i, 4, 3, 33, 10).transpose(1, 2),)), a=linear(10, 10))
def attention_of_permuted_heads(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.a(x), x, x[..., 1:])


@zoo.step(
    each(lambda i: (noise(i, 2, 3, 9, 9).to(memory_format=torch.channels_last),)),
    a=lambda: nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
    b=lambda: nn.Conv2d(5, 5, 3, groups=5),
)
def channels_last(m: Any, x: Tensor) -> Tensor:
    return m.b(F.relu(m.a(x)))


@zoo.step(
    each(lambda i: (noise(i, 2, 4, 9, 10)[:, 1:, :, 1:],)),
    a=lambda: nn.Conv2d(3, 5, 3, stride=2),
)
def convolution_of_a_slice(m: Any, x: Tensor) -> Tensor:
    return m.a(x)


@zoo.step(
    each(lambda i: (_odd_offset(i, 2, 3, 9, 9).transpose(2, 3),)),
    a=lambda: nn.ConvTranspose2d(3, 5, 3, stride=2),
)
def transposed_convolution_of_a_transposed_image(m: Any, x: Tensor) -> Tensor:
    return m.a(x)


@zoo.step(a=lambda: nn.Parameter(torch.randn(67)), b=linear())
def weight_within_a_vector(m: Any, x: Tensor) -> Tensor:
    return m.b(x @ m.a[3:].view(8, 8))


def _language(index: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(200, (4, 35))
    return tokens, tokens.roll(-1, 1)


# Embeddings of N(0, 1), so that attention is saturated, and most of its weights underflow.
zoo.add("demo_transformer", lambda: Transformer(vocab_size=200), each(_language))
