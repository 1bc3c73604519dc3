"""``torch.func`` transforms the unit-scaled operations: per-example gradients, ensembles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import lightning_unitscale.functional as U
from lightning_unitscale.functional import scale_bwd, scale_fwd
from lightning_unitscale.functional.scale import scale

B, T, D = 3, 4, 8


def _both(x: Tensor, factor: Tensor) -> Tensor:
    return scale(x, factor, 2 * factor)


Operation = Callable[[Tensor, Tensor], Tensor]
# Functions of an example ``(T, D)`` and a weight ``(D, D)``.
OPERATIONS: dict[str, Operation] = {
    "linear": lambda x, w: U.linear(x, w, w[0]),
    "linear_readout": lambda x, w: U.linear_readout(x, w),
    "matmul": lambda x, w: U.matmul(x, w, constraint=None),
    "conv1d": lambda x, w: U.conv1d(x.T, w[:, :, None]),
    "embedding": lambda x, w: U.embedding(x.argmax(-1), w),
    "gelu": lambda x, w: U.gelu(x * w[0], mult=2.0),
    "silu_glu": lambda x, w: U.silu_glu(x @ w, x),
    "softmax": lambda x, w: U.softmax(x @ w, dim=-1),
    "layer_norm": lambda x, w: U.layer_norm(x, (D,), w[0], w[1]),
    "rms_norm": lambda x, w: U.rms_norm(x, (D,), w[0]),
    "attention": lambda x, w: U.scaled_dot_product_attention(x @ w, x, x, is_causal=True),
    "add": lambda x, w: U.add(x, w[0]),
    "residual": lambda x, w: U.residual_apply(lambda h: U.linear(h, w), x, tau=0.3),
    "cross_entropy": lambda x, w: U.cross_entropy(U.linear(x, w), x.argmax(-1)),
    "mse_loss": lambda x, w: U.mse_loss(x @ w, x),
}


def _close(first: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OPERATIONS)
def test_per_example_gradients(name: str) -> None:
    operation = OPERATIONS[name]
    x, w, seed = torch.randn(B, T, D), torch.randn(D, D), torch.randn(T * D)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        y = operation(x, w)
        return (y.flatten() * seed[: y.numel()]).sum()

    expected, values = [], []
    for value in x:
        leaf = w.clone().requires_grad_()
        values.append(operation(value, w))
        expected.append(torch.autograd.grad(loss(leaf, value), leaf)[0])
        _close(grad(loss)(w, value), expected[-1])
    _close(vmap(operation, (0, None))(x, w), torch.stack(values))
    _close(vmap(grad(loss), (None, 0))(w, x), torch.stack(expected))
    # The batch may stand in any dimension, and the derivative be of all examples at once.
    _close(vmap(operation, (2, None))(x.movedim(0, 2), w), torch.stack(values))
    _close(grad(lambda w: vmap(loss, (None, 0))(w, x).sum())(w), sum(expected))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "backward"),
    [(scale_fwd, lambda f: f * 0 + 1), (scale_bwd, lambda f: f), (_both, lambda f: 2 * f)],
)
def test_per_example_factors(
    inner: Callable[..., Tensor], backward: Callable[[Tensor], Tensor]
) -> None:
    x, factors = torch.randn(B, T), torch.tensor([0.5, 3.0, -2.0])
    for given, dim, rows in ((x, 0, x), (x[0], None, x[:1].expand(B, T))):
        expected = [inner(row, factor) for row, factor in zip(rows, factors, strict=True)]
        _close(vmap(inner, (dim, 0))(given, factors), torch.stack(expected))
    derivative = vmap(jacrev(inner), (0, 0))(x, factors)
    _close(derivative, backward(factors)[:, None, None] * torch.eye(T))


def test_nested_vmap_with_second_derivatives() -> None:
    x, w = torch.randn(B, T, D), torch.randn(2, D, D)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return U.linear(U.gelu(x), w, constraint=None).square().mean()

    found = vmap(vmap(jacrev(grad(loss, 1), 1), (None, 0)), (0, None))(w, x)
    for model, weight in enumerate(w):

        def gradient(x: Tensor, weight: Tensor = weight) -> Tensor:
            return torch.autograd.grad(loss(weight, x), x, create_graph=True)[0]

        for example in range(B):
            leaf = x[example].clone().requires_grad_()
            _close(found[model, example], torch.autograd.functional.jacobian(gradient, leaf))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = U.gelu(U.linear(x, self.first.weight, self.first.bias))
        return U.linear_readout(U.dropout(h, 0.0), self.second.weight, self.second.bias)


def test_vmap_over_model_ensemble() -> None:
    models = [Model() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(5, D)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(models[0], (parameters, buffers), (x,))
        return result

    _close(vmap(call)(parameters, buffers), torch.stack([model(x) for model in models]))


@pytest.mark.slow
def test_transform_inside_compiled_function() -> None:
    x, w = torch.randn(B, T, D), torch.randn(D, D)

    def each(x: Tensor, w: Tensor) -> Tensor:
        return vmap(grad(lambda w, x: U.linear(x, w).square().sum()), (None, 0))(w, x)

    compiled = torch.compile(each, backend="aot_eager")
    _close(compiled(x, w), each(x, w))
