"""Derivatives within the step, and derivatives of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.cases import Zoo, rows

zoo = Zoo("derivatives")
CASES = zoo.cases


@zoo.step(rows(4, 8, grad=True))
def force_field(m: Any, x: Tensor) -> Tensor:
    energy = m.b(torch.tanh(m.a(x / 40.0))).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return force.square().mean() + energy


@zoo.step()
def gradient_penalty(m: Any, x: Tensor) -> Tensor:
    mixed = (x * torch.rand(4, 1)).requires_grad_()
    score = m.b(F.silu(m.a(mixed)))
    (gradient,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
    return (gradient.norm(dim=1) - 1.0).square().mean() - score.mean()


@zoo.step(a=lambda: nn.Conv2d(3, 4, 3), b=lambda: nn.Conv2d(4, 2, 3), batches=rows(2, 3, 7, 7))
def gradient_penalty_of_convolutions(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    score = m.b(torch.tanh(m.a(x)))
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return gradient.flatten(1).norm(dim=1).mean() + score.mean()


@zoo.step()
def gradient_penalty_of_attention(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    h = torch.softmax(m.a(x) @ x.mT / 8.0, -1) @ m.b(x)
    (gradient,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return gradient.square().mean() + h.mean()


@zoo.step()
def third_derivative(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = m.b(torch.sin(m.a(x))).sum()
    for _ in range(2):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.sum()
    return y


@zoo.step()
def gradient_within_the_step(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(m.a(x).square().sum(), x)
    return m.b(x + 0.01 * gradient)


@zoo.step()
def backward_within_the_step(m: Any, x: Tensor) -> Tensor:
    m.a(x).square().mean().backward()
    return m.b(x)


@zoo.step()
def inner_steps_of_meta_learning(m: Any, x: Tensor) -> Tensor:
    weight = m.a.weight
    for _ in range(2):
        inner = F.linear(x / 40.0, weight).square().mean()
        (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
        weight = weight - 0.1 * gradient
    return m.b(F.linear(x, weight))


@zoo.step()
def batched_gradients_of_a_layer(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    (rows_of_bias,) = torch.autograd.grad(
        y.sum(0), m.a.bias, torch.eye(8), is_grads_batched=True, retain_graph=True
    )
    return m.b(rows_of_bias[:4]) + y
