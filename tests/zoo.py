"""Small modules that between them hold every form of matmul and its usual neighbors.

Each entry makes a module and the inputs of one step. Weights and inputs are far from RMS 1 on
purpose, so that a unit that is lost or applied twice shows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Entry = tuple[nn.Module, tuple[Any, ...]]


class Step(nn.Module):
    """A function of parameters and inputs as a module, with the mean square as its loss."""

    def __init__(self, function: Callable[..., Tensor], *weights: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        self.names = []
        for index, one in enumerate(weights):
            name = f"w{index}"
            self.names.append(name)
            setattr(self, name, one if isinstance(one, nn.Module) else nn.Parameter(one))

    def forward(self, *inputs: Tensor) -> Tensor:
        result = self.function(*(getattr(self, name) for name in self.names), *inputs)
        return (result * result).mean()


def w(*shape: int, scale: float = 0.03, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def x(*shape: int, scale: float = 20.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


MATMULS: dict[str, Callable[[], Entry]] = {
    "linear": lambda: (Step(F.linear, w(6, 8)), ()),
    "matmul_function": lambda: (Step(torch.matmul, w(4, 8)), (x(8, 3),)),
    # Not Tensor.matmul itself: Dynamo of torch 2.11 does not trace it as a module's attribute.
    "matmul_method": lambda: (Step(lambda a, b: a.matmul(b), w(2, 4, 8)), (x(8, 3),)),
    "matmul_operator": lambda: (Step(operator.matmul, w(4, 8)), (x(8),)),
    "matmul_in_place_operator": lambda: (Step(operator.imatmul, w(4, 8)), (x(8, 5),)),
    "matmul_keyword": lambda: (Step(lambda a, b: torch.matmul(a, other=b), w(4, 8)), (x(8, 3),)),
    "matmul_reflected": lambda: (Step(lambda a, b: a.__rmatmul__(b), w(8, 4)), (x(3, 8),)),
    "mm": lambda: (Step(torch.mm, w(4, 8)), (x(8, 3),)),
    "bmm": lambda: (Step(lambda a, b: a.bmm(mat2=b), w(2, 4, 8)), (x(2, 8, 3),)),
    "mv": lambda: (Step(torch.mv, w(4, 8)), (x(8),)),
    "dot": lambda: (Step(torch.dot, w(8)), (x(8),)),
    "vdot": lambda: (Step(torch.vdot, w(8)), (x(8),)),
    "inner": lambda: (Step(torch.inner, w(4, 8)), (x(3, 8),)),
    "multi_dot": lambda: (
        Step(lambda a, b, c: torch.linalg.multi_dot([a, b, c]), w(3, 4), w(4, 5)),
        (x(5, 2),),
    ),
    "tensordot": lambda: (Step(lambda a, b: torch.tensordot(a, b, 2), w(3, 4, 5)), (x(4, 5, 2),)),
    "addmm": lambda: (
        Step(lambda b, a, c: torch.addmm(b, a, c, beta=0.7, alpha=1.3), w(3), w(4, 8)),
        (x(8, 3),),
    ),
    "addmm_method": lambda: (
        Step(lambda b, a, c: b.addmm(a, c, beta=-0.5, alpha=3.0), w(4, 3), w(4, 8)),
        (x(8, 3),),
    ),
    "baddbmm": lambda: (
        Step(
            lambda b, a, c: torch.baddbmm(b, batch1=a, batch2=c, beta=0.3, alpha=-1.7),
            w(2, 4, 3),
            w(2, 4, 8),
        ),
        (x(2, 8, 3),),
    ),
    "addbmm": lambda: (
        Step(lambda b, a, c: torch.addbmm(b, a, c, beta=0.3, alpha=1.7), w(4, 3), w(2, 4, 8)),
        (x(2, 8, 3),),
    ),
    "addmv": lambda: (
        Step(lambda b, a, c: torch.addmv(b, a, c, beta=0.3, alpha=1.7), w(4), w(4, 8)),
        (x(8),),
    ),
    "einsum": lambda: (
        Step(lambda a, b: torch.einsum("oc,btc->bto", a, b), w(5, 8)),
        (x(2, 3, 8),),
    ),
    "einsum_list": lambda: (
        Step(lambda a, b: torch.einsum("oc,btc->bto", [a, b]), w(5, 8)),
        (x(2, 3, 8),),
    ),
    "bilinear": lambda: (
        Step(F.bilinear, x(5, 8), x(5, 6), w(3, 8, 6), w(3)),
        (),
    ),
    "conv1d": lambda: (Step(nn.Conv1d(4, 6, 3, padding=1)), (x(2, 4, 9),)),
    "conv2d_grouped": lambda: (
        Step(nn.Conv2d(4, 6, 3, stride=2, groups=2, padding_mode="reflect", padding=1)),
        (x(2, 4, 7, 7),),
    ),
    "conv2d_depthwise": lambda: (
        Step(nn.Conv2d(4, 8, 3, groups=4, dilation=2, bias=False)),
        (x(2, 4, 7, 7),),
    ),
    "conv2d_same": lambda: (Step(nn.Conv2d(3, 4, 3, padding="same")), (x(2, 3, 6, 6),)),
    "conv3d": lambda: (Step(nn.Conv3d(2, 3, 2)), (x(1, 2, 4, 4, 4),)),
    "conv_transpose1d": lambda: (Step(nn.ConvTranspose1d(4, 6, 3, stride=2)), (x(2, 4, 5),)),
    "conv_transpose2d_grouped": lambda: (
        Step(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1)),
        (x(2, 4, 5, 5),),
    ),
    "conv_transpose3d": lambda: (Step(nn.ConvTranspose3d(2, 3, 2)), (x(1, 2, 3, 3, 3),)),
    "conv_tbc": lambda: (
        Step(lambda a, b, c: torch.conv_tbc(c, a, b), w(3, 4, 5), w(5)),
        (x(7, 2, 4),),
    ),
    "attention_fused": lambda: (
        Step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
        (x(2, 2, 5, 4, scale=3.0), x(2, 2, 5, 4, scale=0.2), x(2, 2, 5, 4)),
    ),
    "attention_causal_scaled": lambda: (
        Step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)),
        (x(2, 2, 5, 4, scale=3.0), x(2, 2, 5, 4, scale=0.2), x(2, 2, 5, 4)),
    ),
    "attention_dropout": lambda: (
        Step(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)),
        (x(2, 2, 5, 4, scale=3.0), x(2, 2, 5, 4, scale=0.2), x(2, 2, 5, 4)),
    ),
    "attention_learned_bias": lambda: (
        Step(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m), w(5, 5, scale=0.5)),
        (x(2, 2, 5, 4, scale=3.0), x(2, 2, 5, 4, scale=0.2), x(2, 2, 5, 4)),
    ),
    "multi_head_attention": lambda: (
        Step(
            lambda m, q, k: m(q, k, k, need_weights=False)[0],
            nn.MultiheadAttention(8, 2, dropout=0.2, kdim=6, vdim=6, batch_first=True),
        ),
        (x(2, 5, 8), x(2, 4, 6)),
    ),
}
# Inputs of the entries whose function takes the input first.
_linear = MATMULS["linear"]
MATMULS["linear"] = lambda: (
    Step(lambda a, b, c: F.linear(c, a, bias=b), w(6, 8), w(6)),
    (x(5, 8),),
)


def _in_place(linear: nn.Linear, a: Tensor) -> Tensor:
    h = linear(a)
    h += a
    h.mul_(0.5)
    h = F.relu(h, inplace=True) * 2
    h[0] = 3.0
    h.t().sub_(1)
    return linear(h)


def _reused(linear: nn.Linear, a: Tensor) -> Tensor:
    h = a
    for _ in range(3):
        h = h + torch.tanh(linear(h))
    return h


def _views(linear: nn.Linear, a: Tensor) -> Tensor:
    q, k, v = linear(a).view(3, 5, 3, 4).permute(2, 0, 1, 3).unbind(0)
    h = torch.cat([q, k.transpose(1, 2).reshape(3, 5, 4)], dim=-1)
    return (h[..., ::2] @ v.unsqueeze(0).squeeze(0).mT) * q.mean(-1, keepdim=True)


def _gates(one: nn.Linear, two: nn.Linear, a: Tensor) -> Tensor:
    h = F.silu(one(a)) * two(a)
    h = torch.where(h > 0, h, h * 0.1) - a.clamp(min=-1) / 3
    top, _ = h.max(dim=-1, keepdim=True)
    return F.layer_norm(h - top, (8,)) @ h.mT


def _complex(linear: nn.Linear, a: Tensor) -> Tensor:
    z = torch.view_as_complex(linear(a).view(5, 4, 2))
    turns = torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(z * turns).flatten(1) @ linear.weight


def _regions(one: nn.Linear, two: nn.Linear, a: Tensor) -> Tensor:
    h = checkpoint(lambda b: F.dropout(two(F.gelu(one(b))), 0.2), a, use_reentrant=False)
    return checkpoint(lambda b: one(b) + b, h, use_reentrant=False)


def _nested_regions(one: nn.Linear, two: nn.Linear, a: Tensor) -> Tensor:
    def outer(b: Tensor) -> Tensor:
        return checkpoint(lambda c: F.gelu(two(c)), one(b), use_reentrant=False) @ one.weight

    return checkpoint(outer, a, use_reentrant=False)


class Tied(nn.Module):
    """Embedding, normalization, dropout and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.dropout(self.embedding(tokens))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), tokens.flatten())


def _frozen() -> Entry:
    module = Step(lambda a, b, c: b(F.relu(a(c))), nn.Linear(8, 8), nn.Linear(8, 4))
    module.w0.requires_grad_(False)
    return module, (torch.randn(5, 8) * 7,)


def _batch_norm() -> Entry:
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip
    images = torch.randn(4, 3, 8, 8) * 50
    layers(images)
    return Step(lambda m, a: m(a), layers), (images,)


def _of_type(dtype: torch.dtype) -> Entry:
    module = Step(lambda a, b, c: b(F.gelu(a(c))), nn.Linear(8, 16), nn.Linear(16, 4)).to(dtype)
    return module, (x(5, 8, dtype=dtype),)


def _autocast(linear: nn.Linear, a: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = F.gelu(linear(a))
        q = h.view(1, 1, 5, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[0, 0] @ h.mT


NETWORKS: dict[str, Callable[[], Entry]] = {
    "in_place": lambda: (Step(_in_place, nn.Linear(8, 8)), (x(5, 8),)),
    "reused_residual": lambda: (Step(_reused, nn.Linear(8, 8)), (x(5, 8),)),
    "views": lambda: (Step(_views, nn.Linear(12, 12)), (x(15, 12),)),
    "gates": lambda: (Step(_gates, nn.Linear(8, 8), nn.Linear(8, 8)), (x(5, 8),)),
    "complex": lambda: (Step(_complex, nn.Linear(8, 8)), (x(5, 8),)),
    "checkpoint": lambda: (Step(_regions, nn.Linear(8, 8), nn.Linear(8, 8)), (x(5, 8),)),
    "nested_checkpoint": lambda: (
        Step(_nested_regions, nn.Linear(8, 8), nn.Linear(8, 8)),
        (x(5, 8),),
    ),
    "tied": lambda: (Tied(), (torch.randint(11, (2, 6)),)),
    "frozen": _frozen,
    "batch_norm": _batch_norm,
    "float64": lambda: _of_type(torch.float64),
    "bfloat16": lambda: _of_type(torch.bfloat16),
    "autocast": lambda: (Step(_autocast, nn.Linear(8, 8)), (x(5, 8),)),
    "alpha_dropout": lambda: (
        Step(lambda m, a: F.alpha_dropout(F.selu(m(a)), 0.3, training=True), nn.Linear(8, 8)),
        (x(5, 8),),
    ),
    "group_norm_pooling": lambda: (
        Step(
            lambda m, n, a: F.interpolate(F.avg_pool2d(n(m(a)), 2), scale_factor=2).sum((2, 3)),
            nn.Conv2d(4, 4, 3),
            nn.GroupNorm(2, 4),
        ),
        (x(2, 4, 6, 6),),
    ),
    "drop_path": lambda: (
        Step(
            lambda m, a: (
                a + m(a) * a.new_empty(5, 1).bernoulli_(0.7) / 0.7 + a.new_ones(8).bernoulli_()
            ),
            nn.Linear(8, 8),
        ),
        (x(5, 8),),
    ),
    "parts": lambda: (
        Step(
            lambda m, a: sum(torch.chunk(m(a), 2, -1)) * torch.stack(m(a).split(4, -1)).sum(0),
            nn.Linear(8, 8),
        ),
        (x(5, 8),),
    ),
}
