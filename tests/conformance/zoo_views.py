"""Aliases: results that share memory with an operand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.conformance.cases import Zoo, each, linear, noise, rows

zoo = Zoo("views")
CASES = zoo.cases


@zoo.step()
def einsum_that_transposes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    turned = torch.einsum("ij->ji", h)
    turned.mul_(2.0)
    return m.b(h) @ turned


@zoo.step()
def einsum_that_takes_the_diagonal(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) @ m.b(x).mT
    torch.einsum("ii->i", h).add_(1.0)
    return h @ x


@zoo.step()
def einsum_that_permutes(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).view(2, 2, 8)
    swapped = torch.einsum("abc->bca", h)
    swapped[0] = 3.0
    return m.b(h)


@zoo.step()
def float_of_a_float(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    same = h.float()
    same += 1.0
    return m.b(h)


@zoo.step()
def type_as_the_same(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.type_as(x).mul_(0.5)
    return m.b(h)


@zoo.step()
def to_the_same_type(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.to(torch.float32).mul_(0.5)
    h.to(x.device).add_(0.5)
    return m.b(h.cpu().to(h.device))


@zoo.step()
def as_tensor_of_a_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    torch.as_tensor(h).mul_(3.0)
    return m.b(h)


@zoo.step()
def asarray_of_a_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    torch.asarray(h, dtype=torch.float32).mul_(3.0)
    return m.b(h)


@zoo.step(each(lambda i: (noise(i, 4, 8), torch.arange(4) + i)))
def long_of_a_long(m: Any, x: Tensor, index: Tensor) -> Tensor:
    same = index.long()
    same += 1
    return m.b(m.a(x)[index % 4]) * index[:, None]


@zoo.step(each(lambda i: (noise(i, 4, 8), torch.arange(4) > i)))
def bool_of_a_bool(m: Any, x: Tensor, keep: Tensor) -> Tensor:
    same = keep.bool()
    same[0] = True
    return m.b(m.a(x)[keep])


@zoo.step(each(lambda i: (noise(i, 4, 8), torch.arange(4, dtype=torch.int32))))
def int_of_an_int(m: Any, x: Tensor, index: Tensor) -> Tensor:
    index.int().add_(2)
    return m.b(m.a(x)[index % 4])


@zoo.step()
def contiguous_of_a_contiguous(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.contiguous().clamp_(min=0.0)
    return m.b(h)


@zoo.step()
def broadcast_tensors(m: Any, x: Tensor) -> Tensor:
    wide, _ = torch.broadcast_tensors(m.a(x), torch.zeros(4, 8))
    other, row = torch.broadcast_tensors(x, m.b.bias)
    return m.b(wide + row) @ other.mT


@zoo.step()
def broadcast_to_and_expand(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    many = h.expand(3, 4, 8)
    return many @ torch.broadcast_to(m.b(x).mT, (3, 8, 4))


@zoo.step()
def views_of_views(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.view(2, 2, 8)[0].transpose(0, 1)[1:3].mul_(2.0)
    return m.b(h)


@zoo.step()
def as_strided(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    windows = torch.as_strided(h, (5, 8), (4, 1))
    return m.b(windows)


@zoo.step()
def unfold_windows(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).unfold(1, 4, 2)
    return h @ m.b.weight[:4]


@zoo.step()
def narrow_and_select(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.narrow(1, 2, 4).mul_(0.5)
    h.select(0, 1).zero_()
    return m.b(h)


@zoo.step()
def chunks_and_splits(m: Any, x: Tensor) -> Tensor:
    q, k = m.a(x).chunk(2, -1)
    u, v = m.b(x).split([4, 4], -1)
    return (q @ k.mT) @ (u * v)


@zoo.step()
def unbind_rows(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.b(row) for row in m.a(x).unbind(0)])


@zoo.step()
def diagonal_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x) @ m.b(x).mT
    h.diagonal().mul_(0.1)
    return h @ x


@zoo.step()
def flatten_and_unflatten(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).unflatten(1, (2, 4))
    return m.b(h.movedim(1, 0).flatten(0, 1).reshape(4, 8))


@zoo.step()
def squeeze_and_unsqueeze(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.unsqueeze(0).squeeze().add_(0.25)
    return m.b(h)


@zoo.step()
def detach_shares(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    shared = h.detach()
    return m.b(h) * shared


@zoo.step()
def detach_is_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.detach().mul_(0.5)
    return m.b(h)


@zoo.step()
def view_of_another_type(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    signs = h.detach().view(torch.int32) < 0
    return m.b(h) * signs


@zoo.step(on_cpu="NumPy shares no memory with a GPU")
def numpy_shares(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.detach().numpy()[:] *= 2
    return m.b(h)


@zoo.step(on_cpu="NumPy shares no memory with a GPU")
def numpy_of_an_input(m: Any, x: Tensor) -> Tensor:
    values = x.numpy()
    values[0] = np.float32(0.5)
    return m.b(m.a(x))


@zoo.step()
def from_numpy_in_the_step(m: Any, x: Tensor) -> Tensor:
    table = torch.from_numpy(np.sin(np.arange(32, dtype=np.float32)).reshape(4, 8))
    return m.b(m.a(x) + table.to(x.device))


@zoo.step(rows(4, 8, grad=True))
def the_input_is_the_output(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x, m.b(m.a(x))


@zoo.step(rows(4, 8, grad=True))
def a_view_of_the_input_is_the_output(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return x[1:], m.b(m.a(x)).mT


@zoo.step()
def the_same_tensor_twice(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = m.a(x)
    return h, h, m.b(h)


@zoo.step()
def a_parameter_is_the_output(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a.weight, m.b(m.a(x))


@zoo.step()
def both_operands_are_one_tensor(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return (h @ h.mT) @ (x @ x.mT) @ m.b(x)


@zoo.step()
def overlapping_operands(m: Any, x: Tensor) -> Tensor:
    h = m.a(x).reshape(-1)
    return h[:24].view(3, 8) @ h[8:].view(3, 8).mT


@zoo.step(a=linear(8, 16), b=lambda: nn.Linear(8, 8))
def real_and_imaginary_parts(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m.a(x).view(4, 8, 2))
    z.real.mul_(2.0)
    return m.b(z.imag) @ z.real.mT
