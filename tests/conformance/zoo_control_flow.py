"""Control flow, and batches and results that are not tensors."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from tests.conformance.cases import Zoo, each, linear, noise, rows

zoo = Zoo("control_flow")
CASES = zoo.cases


@zoo.step()
def branch_by_data(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h) if h.mean() > 0 else m.b(-h) * 2.0


@zoo.step()
def branch_by_item(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if float(x.abs().max()) > 10.0:
        h = h / 10.0
    return m.b(h) * x.std().item()


@zoo.step()
def loop_until_small(m: Any, x: Tensor) -> Tensor:
    h = x
    for _ in range(6):
        h = torch.tanh(m.a(h)) * 0.5
        if h.norm() < 1.0:
            break
    return m.b(h)


@zoo.step()
def loop_over_rows(m: Any, x: Tensor) -> Tensor:
    state = torch.zeros(8)
    states = []
    for row in x:
        state = torch.tanh(m.a(row) + m.b(state))
        states.append(state)
    return torch.stack(states)


@zoo.step()
def matmuls_of_what_is_not_zero(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    rows_kept = (h.mean(1) > 0).nonzero().squeeze(1)
    return m.b(h[rows_kept]).sum() + m.b(h).mean()


@zoo.step()
def unique_values_and_counts(m: Any, x: Tensor) -> Tensor:
    values, counts = torch.unique((x > 0).sum(1), return_counts=True)
    return m.b(m.a(x)) * counts.sum() + values.float().mean()


@zoo.step()
def bincount_in_the_step(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    counts = torch.bincount(h.argmax(-1), minlength=8)
    return m.b(h) * counts


@zoo.step()
def histogram_in_the_step(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h) * torch.histc(h.detach(), 8, -3.0, 3.0)


class ByLength(nn.Module):
    """A layer for each length that turns up, made when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(length): nn.Linear(8, 8) for length in (2, 4, 6)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[str(len(x))](x) @ x.mT


def _sizes(index: int) -> tuple[Tensor]:
    return (noise(index, 2 + 2 * index, 8),)


zoo.add("a_layer_for_each_length", ByLength, each(_sizes))


@zoo.step(each(_sizes))
def batches_of_other_sizes(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.a(x)) @ m.b(x).mT


@zoo.step(each(lambda i: (noise(i, 5 - i, 7 - 2 * i, 8),)))
def lengths_of_other_sizes(m: Any, x: Tensor) -> Tensor:
    return m.b((m.a(x) @ x.mT).softmax(-1) @ x)


@zoo.step(each(lambda i: (noise(i, 4 if i != 1 else 0, 8),)))
def a_batch_without_rows(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)).sum() + m.b.bias.sum()


@zoo.step(each(lambda i: (noise(i, 8) if i == 1 else noise(i, 4, 8),)))
def a_batch_of_another_rank(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@zoo.step(each(lambda i: (noise(i, 4, 8).to(torch.float64 if i == 1 else torch.float32),)))
def a_batch_of_another_type(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x.float())).to(x.dtype)


@zoo.step(each(lambda i: ({"x": noise(i, 4, 8), "parts": [noise(i, 4, 8), 2.0]},)))
def a_dictionary(m: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    h = m.a(batch["x"])
    return {"first": h, "second": m.b(h) * batch["parts"][1] + batch["parts"][0]}


@dataclass
class Pair:
    x: Tensor
    scale: float
    mask: Tensor | None = None


@zoo.step(each(lambda i: (Pair(noise(i, 4, 8), 0.5 + i),)))
def a_dataclass(m: Any, batch: Pair) -> Pair:
    h = m.b(m.a(batch.x)) * batch.scale
    return Pair(h, batch.scale, h > 0 if batch.mask is None else batch.mask)


class Sample(NamedTuple):
    x: Tensor
    y: Tensor


@zoo.step(each(lambda i: (Sample(noise(i, 4, 8), noise(i, 4, 8)),)))
def a_named_tuple(m: Any, batch: Sample) -> Sample:
    return batch._replace(x=m.a(batch.x), y=m.b(batch.y) @ batch.x.mT)


@zoo.step(each(lambda i: (OrderedDict(b=noise(i, 4, 8), a=noise(i, 4, 8)), "mean", None)))
def strings_and_none(m: Any, batch: dict[str, Tensor], how: str, mask: None) -> Tensor:
    h = m.a(batch["a"]) + m.b(batch["b"])
    return getattr(h if mask is None else h * mask, how)()


@zoo.step(each(lambda i: (noise(i, 4, 8).cpu().numpy(), i, 0.3 * i)))
def arrays_and_numbers(m: Any, x: np.ndarray, index: int, factor: float) -> Tensor:
    return m.b(m.a(torch.from_numpy(x).to(m.a.weight.device)) * factor) + index


@zoo.step(each(lambda i: ([noise(i, 1 + j, 8) for j in range(3)],)))
def a_list_of_rows(m: Any, batch: list[Tensor]) -> list[Tensor]:
    padded = nn.utils.rnn.pad_sequence([m.a(x) for x in batch], batch_first=True)
    return [m.b(padded), m.b(torch.cat(batch))]


@zoo.step(each(lambda i: (noise(i, 4, 8) * 2.0,)))
def a_batch_with_a_transposed_layout(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x.t().contiguous().t()))


def _not_a_leaf(index: int) -> tuple[Tensor]:
    return (noise(index, 4, 8).requires_grad_() * 2.0,)


@zoo.step(each(_not_a_leaf))
def a_batch_that_is_no_leaf(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x))


@zoo.step(each(_not_a_leaf))
def a_batch_that_keeps_its_gradient(m: Any, x: Tensor) -> Tensor:
    x.retain_grad()
    return m.b(m.a(x))


def _numbers(m: Any, x: Tensor) -> Iterator[Tensor]:
    for row in x:
        yield m.a(row)


@zoo.step()
def a_python_generator(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.stack(list(_numbers(m, x))))


@zoo.step()
def a_torch_generator(m: Any, x: Tensor) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(len(x))
    mask = torch.rand(4, 8, generator=generator) > 0.5
    return m.b(m.a(x) * mask) + torch.randn(4, 8, generator=generator)


class OwnGenerator(nn.Module):
    """Noise from a generator that lives as long as the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn(4, 8, generator=self.generator)) @ x.mT


zoo.add("a_generator_of_its_own", OwnGenerator)


@zoo.step()
def random_numbers_of_all_kinds(m: Any, x: Tensor) -> Tensor:
    if random.random() < 0.7:
        x = x * float(np.random.rand())
    x = x[torch.randperm(4)] + 0.1 * torch.randn_like(x)
    return m.b(F.dropout(m.a(x), 0.2))


@zoo.step()
def forked_random_numbers(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        x = x + torch.randn(4, 8)
    return m.b(F.dropout(m.a(x), 0.2))


@zoo.step()
def numpy_in_the_step(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    angles = np.angle(np.fft.fft(h.detach().cpu().numpy())).astype(np.float32)
    return m.b(h) * torch.from_numpy(angles).to(h.device)


@zoo.step()
def exceptions_are_caught(m: Any, x: Tensor) -> Tensor:
    try:
        h = m.a(x) @ x
    except RuntimeError:
        h = m.a(x)
    return m.b(h)


@zoo.step()
def says_whether_it_is_compiled(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
        h = h * 2.0
    return m.b(h) * (3.0 if torch.jit.is_scripting() else 1.0)


@zoo.step()
def cond_of_torch(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda h: m.a(h), lambda h: m.b(h).sin(), (x,))


@zoo.step()
def scan_of_torch(m: Any, x: Tensor) -> Tensor:
    weight = m.a.weight

    def body(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(carry @ weight + row)
        return new, new.clone()

    last, outputs = scan(body, torch.zeros(8), x)
    return m.b(outputs) + last


@zoo.step()
def disabled_by_the_user(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.compiler.disable(lambda h: m.a(h) + 1.0)(x))


class PartlyCompiled(nn.Module):
    """A submodule, compiled by the user, between two that are not."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


zoo.add("compiled_block_eager", lambda: PartlyCompiled("eager"))
zoo.add("compiled_block_aot_eager", lambda: PartlyCompiled("aot_eager"))


class Mixture(nn.Module):
    """Experts that see the rows routed to them, some none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, rank = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(x[row]) * gates[row, rank, None])
        return out


zoo.add("mixture_of_experts", Mixture, rows(6, 8))


@zoo.step(a=linear(), b=linear(), layers=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
def layers_dropped_by_chance(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        if torch.rand(()) < 0.6:
            x = x + torch.relu(layer(x)) / 0.6
    return m.b(m.a(x))
