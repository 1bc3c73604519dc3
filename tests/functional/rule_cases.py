"""Calls of every operation that has a rule, on unit normal inputs of moderate size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def n(*shape: int) -> Callable[[], Tensor]:
    """A normal tensor, made when the case is run."""
    return lambda: torch.randn(shape)


def ids(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


def p(*shape: int) -> Callable[[], Tensor]:
    """Probabilities of one half."""
    return lambda: torch.full(shape, 0.5)


def bits(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(2, shape).float()


def ones(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.ones(shape)


def distribution(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.softmax(torch.randn(shape), -1)


def log_distribution(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.log_softmax(torch.randn(shape), -1)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: Name of the rule.
        function: What is called.
        args: Positional arguments; callables make tensors.
        kwargs: Keyword arguments.
        tolerance: Relative error allowed for the RMS of the output and of each gradient.
        own: Tolerance of single gradients.
        skip: Results for which the rule is not exact.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.05
    own: dict[str, float] = field(default_factory=dict)
    skip: tuple[str, ...] = ()

    def call(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of the case, with new tensors."""
        return [made(arg) for arg in self.args], {k: made(v) for k, v in self.kwargs.items()}

    def __str__(self) -> str:
        kwargs = {k: v for k, v in self.kwargs.items() if not callable(v)}
        return f"{self.name}{kwargs or ''}"


def made(value: Any) -> Any:
    """The argument with its tensors made."""
    if isinstance(value, (list, tuple)) and any(callable(item) for item in value):
        return [made(item) for item in value]
    return value() if callable(value) else value


ELEMENTWISE = [
    (name, getattr(F, name, None) or getattr(torch, name), kwargs)
    for name, kwargs in [
        ("relu", {}),
        ("relu6", {}),
        ("leaky_relu", {}),
        ("leaky_relu", {"negative_slope": 0.3}),
        ("elu", {}),
        ("elu", {"alpha": 2.0}),
        ("selu", {}),
        ("celu", {"alpha": 0.5}),
        ("gelu", {}),
        ("gelu", {"approximate": "tanh"}),
        ("silu", {}),
        ("mish", {}),
        ("hardswish", {}),
        ("hardsigmoid", {}),
        ("hardtanh", {}),
        ("hardtanh", {"min_val": -0.5, "max_val": 2.0}),
        ("softplus", {}),
        ("softplus", {"beta": 2.0, "threshold": 1.0}),
        ("softsign", {}),
        ("tanh", {}),
        ("sigmoid", {}),
        ("logsigmoid", {}),
        ("erf", {}),
        ("softshrink", {"lambd": 0.3}),
        ("hardshrink", {}),
        ("tanhshrink", {}),
        ("threshold", {"threshold": 0.5, "value": 0.1}),
    ]
]

BIG = (400, 500)
_L = 0.1  # sums over some hundreds of terms, and borders

CASES = [
    *(Case(name, f, (n(*BIG),), kwargs, 0.01) for name, f, kwargs in ELEMENTWISE),
    Case("rrelu", F.rrelu, (n(*BIG),), {"training": True}, 0.01),
    Case("rrelu", F.rrelu, (n(*BIG),), {"lower": 0.2, "upper": 0.6}, 0.01),
    Case("prelu", F.prelu, (n(500, 400), lambda: torch.full((400,), 0.25)), own={"weight": _L}),
    Case("glu", F.glu, (n(*BIG),), {"dim": -1}, 0.01),
    # Linear maps.
    Case("linear", F.linear, (n(64, 128), n(256, 128)), {}, _L),
    Case("linear", F.linear, (n(4, 16, 128), n(256, 128), n(256)), {}, _L),
    Case("linear", F.linear, (n(640, 128), n(128)), {}, 0.3),
    Case("bilinear", F.bilinear, (n(64, 32), n(64, 24), n(48, 32, 24), n(48)), {}, _L),
    Case("embedding", F.embedding, (ids(50, 40, 25), n(50, 32)), {}, _L),
    Case("embedding_bag", F.embedding_bag, (ids(500, 40, 25), n(500, 32)), {}, _L),
    Case("embedding_bag", F.embedding_bag, (ids(500, 400, 5), n(500, 32)), {"mode": "sum"}, _L),
    Case("embedding_bag", F.embedding_bag, (ids(500, 400, 5), n(500, 32)), {"mode": "max"}, _L),
    Case(
        "embedding_bag",
        F.embedding_bag,
        (ids(500, 1000), n(500, 32)),
        {"mode": "sum", "offsets": lambda: torch.arange(0, 1001, 10), "include_last_offset": True,
         "per_sample_weights": n(1000)},
        _L,
    ),
    # Products.
    Case("matmul", torch.matmul, (n(64, 128), n(128, 256)), {}, _L),
    Case("matmul", torch.matmul, (n(4, 8, 64, 32), n(8, 32, 48)), {}, _L),
    Case("matmul", torch.matmul, (n(64, 128), n(128)), {}, 0.3),
    Case("matmul", torch.matmul, (n(128), n(6, 128, 64)), {}, 0.15),
    Case("matmul", lambda a, b: a @ b, (n(3, 64, 128), n(128, 256)), {}, _L),
    Case("mm", torch.mm, (n(64, 128), n(128, 256)), {}, _L),
    Case("bmm", torch.bmm, (n(4, 64, 128), n(4, 128, 96)), {}, _L),
    Case("mv", torch.mv, (n(400, 300), n(300)), {}, 0.3),
    Case("dot", torch.dot, (n(4000), n(4000)), {}, skip=("output",)),
    Case("inner", torch.inner, (n(20, 128), n(60, 128)), {}, _L),
    Case("outer", torch.outer, (n(400), n(500)), {}, 0.2),
    Case("addmm", torch.addmm, (n(256), n(64, 128), n(128, 256)), {}, _L),
    Case("addmm", torch.addmm, (n(64, 256), n(64, 128), n(128, 256)), {"alpha": 0.1, "beta": 2}),
    Case("addmv", torch.addmv, (n(400), n(400, 300), n(300)), {}, 0.3),
    Case(
        "baddbmm",
        torch.baddbmm,
        (n(4, 64, 96), n(4, 64, 128), n(4, 128, 96)),
        {"alpha": 128**-0.5, "beta": 0.5},
    ),
    Case("addbmm", torch.addbmm, (n(64, 96), n(4, 64, 128), n(4, 128, 96)), {}, _L),
    Case("tensordot", torch.tensordot, (n(12, 8, 16), n(8, 16, 30)), {}, _L),
    Case("tensordot", torch.tensordot, (n(12, 8, 16), n(16, 30, 8)),
         {"dims": ([1, 2], [2, 0])}, _L),
    Case("einsum", torch.einsum, ("bhqd,bhkd->bhqk", n(2, 3, 40, 64), n(2, 3, 50, 64)), {}, _L),
    Case("einsum", torch.einsum, ("...ij,jk", n(5, 30, 64), n(64, 70)), {}, _L),
    Case("einsum", torch.einsum, ("ij,jk->ik", [n(30, 64), n(64, 70)]), {}, _L),
    Case("einsum", torch.einsum, ("bi,oij,bj->bo", n(80, 24), n(40, 24, 32), n(80, 32)), {}, _L),
    Case("einsum", torch.einsum, (n(30, 64), [0, 1], n(64, 70), [1, 2], [0, 2]), {}, _L),
    Case("einsum", torch.einsum, (n(30, 64), [..., 1], n(64, 70), [1, 2]), {}, _L),
    Case("chain_matmul", lambda *a: torch.linalg.multi_dot(a), (n(40, 50), n(50, 60), n(60, 70)),
         {}, 0.15),
    Case("multi_dot", torch.linalg.multi_dot, ([n(40, 50), n(50, 60), n(60, 70)],), {}, 0.15),
    # Convolutions: borders make what is padded smaller.
    Case("conv1d", F.conv1d, (n(8, 32, 100), n(48, 32, 5), n(48)), {"padding": (2,)}, _L),
    Case("conv1d", F.conv1d, (n(8, 32, 100), n(48, 32, 5)), {"padding": "same"}, _L),
    Case("conv1d", F.conv1d, (n(32, 100), n(48, 16, 4)), {"stride": 2, "groups": 2}, _L),
    Case("conv2d", F.conv2d, (n(4, 16, 40, 30), n(24, 8, 3, 3), n(24)),
         {"groups": 2, "padding": 1, "dilation": (1, 2)}, _L),
    Case("conv2d", F.conv2d, (n(4, 16, 40, 30), n(24, 16, 4, 4)), {"stride": (4, 4)}, _L),
    Case("conv3d", F.conv3d, (n(2, 8, 12, 14, 16), n(12, 8, 2, 2, 2)), {"stride": 2}, _L),
    Case("conv_transpose1d", F.conv_transpose1d, (n(8, 32, 100), n(32, 48, 4), n(48)),
         {"stride": 2, "padding": 1}, _L),
    Case("conv_transpose2d", F.conv_transpose2d, (n(4, 16, 20, 30), n(16, 12, 3, 3)),
         {"groups": 2, "padding": 1}, _L),
    Case("conv_transpose3d", F.conv_transpose3d, (n(2, 8, 6, 7, 8), n(8, 12, 2, 2, 2)),
         {"stride": 2}, _L),
    # Softmax and attention.
    *(Case("softmax", F.softmax, (n(40000 // k, k),), {"dim": -1}, 0.04) for k in (8, 100)),
    Case("softmax", F.softmax, (n(400, 1000),), {"dim": -1}, 0.1),
    Case("softmax", torch.softmax, (n(8, 100, 30), 1), {}, 0.03),
    Case("softmin", F.softmin, (n(400, 100),), {"dim": 1}, 0.03),
    Case("log_softmax", F.log_softmax, (n(400, 100),), {"dim": -1}, 0.03, {}, ("output",)),
    *(
        Case("scaled_dot_product_attention", F.scaled_dot_product_attention,
             (n(4, 4, 64, d), n(4, 4, 64, d), n(4, 4, 64, d)), kwargs, _L,
             {"query": 0.25, "key": 0.25})
        for d in (16, 64)
        for kwargs in ({}, {"is_causal": True}, {"scale": 1 / d}, {"dropout_p": 0.3})
    ),
    Case("scaled_dot_product_attention", F.scaled_dot_product_attention,
         (n(4, 8, 64, 32), n(4, 2, 64, 32), n(4, 2, 64, 32)), {"enable_gqa": True}, _L,
         {"query": 0.25, "key": 0.25}),
    Case("scaled_dot_product_attention", F.scaled_dot_product_attention,
         (n(16, 96, 32), n(16, 48, 32), n(16, 48, 32)), {"is_causal": True}, _L,
         {"query": 0.25, "key": 0.25}),
    # Norms: the weights are 1 at the start.
    Case("layer_norm", F.layer_norm, (n(8, 16, 256), (256,), ones(256), n(256)), {}, _L, {},
         ("output",)),
    Case("layer_norm", F.layer_norm, (n(64, 256), (256,)), {}),
    Case("rms_norm", F.rms_norm, (n(8, 16, 256), (16, 256), ones(16, 256)), {}, _L),
    Case("group_norm", F.group_norm, (n(16, 32, 10, 10), 4, ones(32)), {}, _L),
    Case("batch_norm", F.batch_norm, (n(64, 32, 10), None, None, ones(32)), {"training": True}, _L),
    Case("batch_norm", F.batch_norm,
         (n(64, 32, 10), lambda: torch.zeros(32), lambda: torch.ones(32)), {}, _L,
         {}, ("running_mean", "running_var")),
    Case("instance_norm", F.instance_norm, (n(64, 32, 10, 10),), {"weight": ones(32)}, _L),
    Case("local_response_norm", F.local_response_norm, (n(16, 32, 10), 5),
         {"alpha": 1.0, "k": 2.0}, 0.2),
    # Pools.
    Case("avg_pool1d", F.avg_pool1d, (n(16, 32, 100), 5), {}),
    Case("avg_pool2d", F.avg_pool2d, (n(16, 8, 40, 40), 3), {"stride": 1}),
    Case("avg_pool2d", F.avg_pool2d, (n(16, 8, 41, 40), 2), {"ceil_mode": True}),
    Case("avg_pool3d", F.avg_pool3d, (n(4, 8, 12, 12, 12), (2, 2, 3)), {}),
    Case("max_pool1d", F.max_pool1d, (n(16, 32, 100), 5), {}),
    Case("max_pool2d", F.max_pool2d, (n(16, 32, 40, 40), 3, 2, 1), {}, _L),
    Case("max_pool3d", F.max_pool3d, (n(4, 8, 12, 12, 12), 2), {}),
    Case("lp_pool1d", F.lp_pool1d, (n(16, 32, 100), 2, 5), {}, _L),
    Case("lp_pool2d", F.lp_pool2d, (n(16, 32, 40, 40), 4.0, 4), {}, 0.3),
    Case("lp_pool2d", F.lp_pool2d, (n(16, 32, 40, 40), 1.0, 4), {}),
    Case("lp_pool3d", F.lp_pool3d, (n(4, 8, 12, 12, 12), 2, 2), {}, _L),
    Case("adaptive_avg_pool1d", F.adaptive_avg_pool1d, (n(16, 32, 100), 10), {}),
    Case("adaptive_avg_pool2d", F.adaptive_avg_pool2d, (n(16, 64, 10, 10), 1), {}, _L),
    Case("adaptive_avg_pool3d", F.adaptive_avg_pool3d, (n(8, 16, 8, 8, 8), (2, None, 4)), {}),
    Case("adaptive_max_pool1d", F.adaptive_max_pool1d, (n(16, 32, 100), 10), {}),
    Case("adaptive_max_pool2d", F.adaptive_max_pool2d, (n(16, 32, 40, 40), (4, 5)), {}),
    Case("adaptive_max_pool3d", F.adaptive_max_pool3d, (n(4, 8, 12, 12, 12), 4), {}),
    # Arithmetic.
    Case("add", torch.add, (n(64, 128), n(64, 128)), {}),
    Case("add", torch.add, (n(64, 128), n(128)), {"alpha": 0.5}, 0.2),
    Case("add", torch.add, (n(64, 128), 1e-9), {}),
    Case("sub", torch.sub, (n(64, 128), n(64, 128)), {}),
    Case("mul", torch.mul, (n(64, 128), n(64, 128)), {}),
    Case("mul", torch.mul, (n(64, 400), n(400)), {}, 0.2),
    Case("sum", torch.sum, (n(64, 128),), {"dim": 1}, 0.3),
    Case("sum", torch.sum, (n(64, 32, 16),), {"dim": (0, 2)}, 0.5),
    Case("mean", torch.mean, (n(20, 64, 32),), {"dim": 1, "keepdim": True}, _L),
    Case("cat", torch.cat, ([n(64, 128), n(64, 128)],), {"dim": 1}),
    Case("stack", torch.stack, ([n(64, 128), n(64, 128)],), {}),
    Case("dropout", F.dropout, (n(200, 200), 0.3), {}),
    Case("dropout", F.dropout, (n(200, 200), 0.3), {"training": False}),
    Case("dropout1d", F.dropout1d, (n(400, 400, 2), 0.3), {}),
    Case("dropout2d", F.dropout2d, (n(400, 400, 2, 1), 0.3), {}),
    Case("dropout3d", F.dropout3d, (n(400, 400, 2, 1, 1), 0.3), {}),
    Case("feature_dropout", torch.feature_dropout, (n(400, 400), 0.3, True), {}),
    Case("alpha_dropout", F.alpha_dropout, (n(300, 300), 0.3, True), {}),
    Case("feature_alpha_dropout", F.feature_alpha_dropout, (n(400, 400), 0.3, True), {}),
    # Losses: factors of the gradient only. Logits near 0 are those of an untrained model.
    *(
        Case("cross_entropy", F.cross_entropy, (n(*shape), ids(shape[1], shape[0], *shape[2:])),
             kwargs, _L)
        for shape in ((400, 100), (40, 100, 8), (10, 100, 4, 5))
        for kwargs in ({}, {"reduction": "sum"}, {"label_smoothing": 0.2}, {"reduction": "none"})
    ),
    Case("cross_entropy", F.cross_entropy, (n(1000), lambda: torch.tensor(3)), {}, _L),
    Case("nll_loss", F.nll_loss, (n(400, 100), ids(100, 400)), {}),
    Case("binary_cross_entropy", F.binary_cross_entropy, (p(400, 10), bits(400, 10)), {}),
    Case("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits,
         (n(400, 100), bits(400, 100)), {}, 0.01),
    *(
        Case("kl_div", F.kl_div, (log_distribution(400, 100), distribution(400, 100)),
             {"reduction": reduction}, skip=("target",))
        for reduction in ("batchmean", "sum", "none")
    ),
    Case("l1_loss", F.l1_loss, (n(*BIG), n(*BIG)), {}, 0.01),
    Case("smooth_l1_loss", F.smooth_l1_loss, (n(*BIG), n(*BIG)), {"beta": 0.5}, 0.01),
    Case("huber_loss", F.huber_loss, (n(*BIG), n(*BIG)), {"delta": 0.7}, 0.01),
    Case("mse_loss", F.mse_loss, (n(*BIG), n(*BIG)), {}, 0.01),
    Case("mse_loss", F.mse_loss, (n(*BIG), n(*BIG)), {"reduction": "sum"}, 0.01),
    Case("gaussian_nll_loss", F.gaussian_nll_loss, (n(*BIG), n(*BIG), ones(*BIG)), {}, 0.01),
]  # fmt: skip
