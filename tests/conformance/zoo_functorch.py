"""Function transformations: vmap, grad, Jacobians, functional calls, forward mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

from tests.conformance.cases import Zoo, linear, rows

zoo = Zoo("functorch")
CASES = zoo.cases


@zoo.step()
def vmap_over_rows(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: m.b(torch.tanh(m.a(row))))(x)


@zoo.step()
def vmap_of_matmuls(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(2, 2, 8)
    return vmap(torch.mm, in_dims=(0, None))(h, m.b.weight)


@zoo.step()
def vmap_of_dots(m: Any, x: Tensor) -> Tensor:
    return vmap(torch.dot)(m.a(x), m.b(x))


@zoo.step()
def vmap_in_chunks(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: m.a(row) @ m.b.weight, chunk_size=2)(x)


@zoo.step()
def vmap_with_random_numbers(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: m.b(F.dropout(m.a(row), 0.3)), randomness="different")(x)


@zoo.step()
def vmap_of_vmap(m: Any, x: Tensor) -> Tensor:
    return vmap(vmap(torch.dot, in_dims=(None, 0)), in_dims=(0, None))(m.a(x), m.b(x))


@zoo.step()
def grad_of_a_function(m: Any, x: Tensor) -> Tensor:
    return m.b(grad(lambda y: torch.tanh(m.a(y)).sum())(x))


@zoo.step()
def gradients_per_sample(m: Any, x: Tensor) -> Tensor:
    params = dict(m.a.named_parameters())

    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(m.a, params, (row,)).square().mean()

    gradients = vmap(grad(loss), in_dims=(None, 0))(params, x / 40.0)
    norms = gradients["weight"].flatten(1).norm(dim=1)
    return m.b(x) / (1.0 + norms[:, None])


@zoo.step()
def gradient_and_value(m: Any, x: Tensor) -> Tensor:
    gradient, value = grad_and_value(lambda y: m.a(y).square().mean())(x)
    return m.b(gradient) + value


@zoo.step()
def jacobian_reverse(m: Any, x: Tensor) -> Tensor:
    return m.b(vmap(jacrev(lambda row: torch.tanh(m.a(row))))(x / 40.0)).square().mean()


@zoo.step()
def jacobian_forward(m: Any, x: Tensor) -> Tensor:
    return m.b(jacfwd(lambda row: torch.tanh(m.a(row)))(x[0] / 40.0))


@zoo.step()
def hessian_of_an_energy(m: Any, x: Tensor) -> Tensor:
    return m.b(hessian(lambda row: torch.tanh(m.a(row)).sum())(x[0] / 40.0))


@zoo.step()
def jvp_and_vjp(m: Any, x: Tensor) -> Tensor:
    value, tangent = jvp(lambda y: torch.tanh(m.a(y)), (x,), (torch.ones_like(x),))
    _, pull = vjp(lambda y: m.b(y), value)
    return pull(tangent)[0] + tangent


@zoo.step()
def linearized(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        value, push = linearize(lambda y: torch.tanh(m.a(y)), x)
        tangent = push(torch.ones_like(x))
    return m.b(value) + tangent


@zoo.step()
def forward_mode_duals(m: Any, x: Tensor) -> Tensor:
    with fwAD.dual_level():
        dual = fwAD.make_dual(x, torch.ones_like(x))
        value, tangent = fwAD.unpack_dual(m.a(dual))
        value, tangent = value.clone(), tangent.clone()
    return m.b(value) + tangent


@zoo.step()
def functional_call_with_other_weights(m: Any, x: Tensor) -> Tensor:
    halved = {name: param * 0.5 for name, param in m.a.named_parameters()}
    return m.b(functional_call(m.a, halved, (x,)))


@zoo.step()
def functionalized(m: Any, x: Tensor) -> Tensor:
    def writes(y: Tensor) -> Tensor:
        h = m.a(y)
        h.mul_(0.5)
        return h

    return m.b(functionalize(writes)(x))


class Ensemble(nn.Module):
    """The parameters of several models, stacked, and one call for all of them."""

    def __init__(self) -> None:
        super().__init__()
        models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(3)]
        params, _ = stack_module_state(models)
        self.names = list(params)
        self.stacked = nn.ParameterList(params.values())
        self._base = [models[0].to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        def call(params: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(self._base[0], params, (x,))

        return vmap(call, in_dims=(0, None))(dict(zip(self.names, self.stacked, strict=True)), x)


zoo.add("ensemble", Ensemble)


@zoo.step(a=lambda: nn.Conv2d(3, 4, 3), batches=rows(2, 3, 6, 6))
def vmap_of_a_convolution(m: Any, x: Tensor) -> Tensor:
    return vmap(lambda image: m.a(image[None])[0])(x)


@zoo.step(a=lambda: nn.Conv1d(3, 4, 3), batches=rows(2, 3, 6))
def gradients_per_sample_of_a_convolution(m: Any, x: Tensor) -> Tensor:
    params = dict(m.a.named_parameters())

    def loss(params: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(m.a, params, (image[None],)).square().mean()

    gradients = vmap(grad(loss), in_dims=(None, 0))(params, x)
    return m.a(x).mean() + gradients["weight"].square().mean()


@zoo.step(a=linear(8, 8), b=linear(8, 8))
def batched_vjp(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = torch.tanh(m.a(x))[0]
    (rows_of_jacobian,) = torch.autograd.grad(
        y, x, torch.eye(8), is_grads_batched=True, create_graph=True
    )
    return m.b(rows_of_jacobian).mean()


@zoo.step()
def jacobian_of_autograd(m: Any, x: Tensor) -> Tensor:
    def function(row: Tensor) -> Tensor:
        return torch.tanh(m.a(row))

    jacobian = torch.autograd.functional.jacobian(function, x[0] / 40.0, create_graph=True)
    return m.b(jacobian)
