"""Writes into activations, inputs, parameters and shared memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conformance.cases import Zoo, each, linear, noise, rows

zoo = Zoo("writes")
CASES = zoo.cases


@zoo.step()
def in_place_arithmetic(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += x
    h *= 0.5
    h -= 1.0
    h /= 3.0
    return m.b(h)


@zoo.step()
def in_place_activations(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x), inplace=True)
    h = F.dropout(m.b(h), 0.3, inplace=True)
    return F.leaky_relu_(m.a(h.sigmoid_()), 0.1)


@zoo.step()
def items_are_assigned(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[0] = 3.0
    h[:, ::3] = x[:, ::3]
    h[h < -1.0] = 0.0
    return m.b(h)


@zoo.step()
def foreach_on_an_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    torch._foreach_mul_([h], 2.0)
    torch._foreach_add_([h], [x])
    return m.b(h)


@zoo.step()
def init_on_data(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    nn.init.zeros_(h.data[:2])
    return m.b(h)


@zoo.step()
def init_on_all_of_data(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    nn.init.zeros_(h.data)
    return m.b(h)


@zoo.step()
def init_draws_into_an_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    nn.init.normal_(h.data[1:], std=0.1)
    return m.b(h)


@zoo.step()
def write_through_data(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.data.mul_(0.5)
    return m.b(h)


@zoo.step()
def data_is_replaced(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.data = h.data * 2.0
    return m.b(h)


@zoo.step()
def write_under_no_grad(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h.mul_(0.5)
    return m.b(h)


@zoo.step()
def write_before_its_matmul_is_differentiated(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    result = m.b(h)
    with torch.no_grad():
        h.data.add_(1.0)
    return result


@zoo.step()
def input_is_written(m: Any, x: Tensor) -> Tensor:
    x.mul_(0.5)
    x[0] = 1.0
    return m.b(m.a(x))


@zoo.step()
def input_is_written_after_its_matmul(m: Any, x: Tensor) -> Tensor:
    result = m.b(m.a(x))
    x.data.zero_()
    return result


@zoo.step(each(lambda i: (noise(i, 4, 8), torch.zeros(4, 8))))
def output_tensor_is_given(m: Any, x: Tensor, out: Tensor) -> Tensor:
    with torch.no_grad():
        torch.mm(x, m.a.weight, out=out)
    return m.b(m.a(x)) + out


@zoo.step()
def addmm_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h = h.clone().addmm_(x, m.b.weight, beta=0.5, alpha=2.0)
    return m.b(h)


@zoo.step()
def baddbmm_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(2, 2, 8).clone()
    h.baddbmm_(x.view(2, 2, 8), m.b.weight.expand(2, 8, 8), alpha=0.1)
    return m.b(h)


@zoo.step()
def addmv_and_addr_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)[0].clone().addmv_(m.b.weight, x[1])
    return torch.addr(m.b.weight, h, x[2]) @ h


@zoo.step()
def addbmm_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).clone()
    h.addbmm_(x.reshape(2, 4, 4), m.b.weight.view(2, 4, 8), beta=0.5, alpha=0.3)
    return m.b(h)


@zoo.step()
def scatter_and_index_writes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    index = torch.tensor([3, 1, 0])
    h = h.index_add(0, index, x[:3])
    h.index_copy_(0, index[:1], m.b(x[:1]))
    h = h.scatter_add(1, torch.zeros(4, 2, dtype=torch.long), x[:, :2])
    return m.b(h.index_fill_(1, index[1:2], 0.5))


@zoo.step()
def masked_writes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).masked_fill_(x > 0, 0.0)
    h = torch.where(x > 1.0, h, m.b(x))
    return m.b(h.masked_scatter(x < 0, m.a(h)))


@zoo.step()
def copy_into_a_new_tensor(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(4, 16)
    out[:, :8] = m.a(x)
    out[:, 8:].copy_(m.b(x))
    return out @ out.mT


@zoo.step()
def set_onto_another_storage(m: Any, x: Tensor) -> Tensor:
    h = torch.empty(0)
    h.set_(x.detach().clone())
    return m.b(m.a(h))


@zoo.step()
def resize_in_the_step(m: Any, x: Tensor) -> Tensor:
    h = torch.empty(0).resize_(4, 8).copy_(x)
    return m.b(m.a(h))


@zoo.step(a=linear(), b=linear(), seen=lambda: torch.zeros(8))
def buffer_is_written_by_a_slice(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.seen[2:5] = h.detach().mean(0)[2:5]
    m.seen[0] += 1.0
    return m.b(h * m.seen)


@zoo.step()
def weight_is_written_in_the_step(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-0.1, 0.1)
    return m.b(m.a(x))


@zoo.step()
def weight_is_replaced_in_the_step(m: Any, x: Tensor) -> Tensor:
    weight = m.a.weight
    del m.a.weight
    m.a.weight = weight * (weight.abs() > 0.1)
    result = m.b(m.a(x))
    del m.a.weight
    m.a.weight = weight
    return result


@zoo.step()
def weight_is_written_between_its_uses(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).detach()
    with torch.no_grad():
        m.a.weight.mul_(0.5)
    return m.b(m.a(h))


@zoo.step()
def gradient_is_written_by_the_step(m: Any, x: Tensor) -> Tensor:
    if m.a.weight.grad is None:
        m.a.weight.grad = torch.full_like(m.a.weight, 0.5)
    return m.b(m.a(x))


@zoo.step()
def sorted_and_cumulated(m: Any, x: Tensor) -> Tensor:
    values, order = m.a(x).sort(-1)
    h = values.cumsum_(-1).gather(1, order)
    return m.b(h)


@zoo.step()
def transposed_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).clone().t_()
    h.unsqueeze_(0).squeeze_(0)
    return h @ m.b(x)


@zoo.step(rows(4, 8, grad=True))
def a_copy_of_the_input_is_written(m: Any, x: Tensor) -> Tensor:
    h = x.clone()
    h[1:].mul_(2.0)
    return m.b(m.a(h.fill_diagonal_(0.1)))


@zoo.step()
def random_numbers_into_an_activation(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:2].detach().normal_()
    h = h + torch.empty(4, 8).bernoulli_(0.5)
    return m.b(h)
