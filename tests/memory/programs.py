"""Programs to partition, and random problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.memory.partitioner import aot_backend
from lightning_unitscale.memory.problem import Mask, NodeRegion, RematNode, RematProblem, recomputed


def random_problem(rng: np.random.Generator, num_forward: int) -> RematProblem:
    """Inputs, a forward pass with views and matmuls of two outputs, and a backward pass."""
    nodes = [
        RematNode(f"input_{i}", "placeholder", (), NodeRegion.INPUT, i, i, num_bytes=8)
        for i in range(2)
    ]

    def readable() -> list[int]:
        return [i for i, node in enumerate(nodes) if node.kind != "pair"]

    while len(nodes) < num_forward + 2:
        index = len(nodes)
        read = sorted({int(i) for i in rng.choice(readable(), size=int(rng.integers(1, 3)))})
        seconds = float(rng.integers(1, 20))
        roll = rng.random()
        if roll < 0.15:
            base = nodes[read[0]].base
            nodes.append(
                RematNode(
                    f"view_{index}",
                    "view",
                    (read[0],),
                    NodeRegion.FORWARD,
                    base,
                    nodes[base].owner,
                    can_save=False,
                )
            )
        elif roll < 0.3:
            nodes.append(
                RematNode(
                    f"pair_{index}",
                    "pair",
                    tuple(read),
                    NodeRegion.FORWARD,
                    index,
                    index,
                    seconds=seconds,
                    flops=seconds,
                    can_save=False,
                )
            )
            nodes += [
                RematNode(
                    f"item_{index + k}",
                    "item",
                    (index,),
                    NodeRegion.FORWARD,
                    index + k,
                    index,
                    num_bytes=int(rng.integers(1, 30)),
                )
                for k in (1, 2)
            ]
        else:
            nodes.append(
                RematNode(
                    f"op_{index}",
                    "op",
                    tuple(read),
                    NodeRegion.FORWARD,
                    index,
                    index,
                    num_bytes=int(rng.integers(1, 30)),
                    seconds=seconds,
                    flops=seconds,
                    can_recompute=bool(rng.random() < 0.9),
                )
            )
    loss = len(nodes) - 1
    tangent = len(nodes)
    nodes.append(RematNode("tangent", "placeholder", (), NodeRegion.BACKWARD, tangent, tangent, 4))
    for index in reversed([i for i in readable() if i < tangent and rng.random() < 0.6]):
        mine = len(nodes)
        nodes.append(
            RematNode(
                f"grad_{index}",
                "grad",
                (index, mine - 1),
                NodeRegion.BACKWARD,
                mine,
                mine,
                num_bytes=int(rng.integers(1, 30)),
            )
        )
    return RematProblem(tuple(nodes), (loss,), (len(nodes) - 1,))


def all_plans(problem: RematProblem) -> Iterator[Mask]:
    """Every set of values that may be saved and that suffices."""
    choices = [
        i
        for i, node in enumerate(problem.nodes)
        if node.region is NodeRegion.FORWARD and node.can_save
    ]
    for kept in itertools.product((False, True), repeat=len(choices)):
        saved = problem.region == NodeRegion.INPUT
        saved[choices] = kept
        try:
            recomputed(problem, saved)
        except ValueError:
            continue
        yield saved


def run(
    function: Callable[..., Any], parameters: Sequence[Tensor], *inputs: Any
) -> tuple[list[Tensor], Any]:
    """Return the result of a seeded step, its gradients and the generator's state afterwards."""
    for param in parameters:
        param.grad = None
    torch.manual_seed(5)
    output = function(*inputs)
    output = output if isinstance(output, tuple) else (output,)
    sum(tensor.float().square().mean() for tensor in output).backward()
    gradients = [param.grad.clone() for param in parameters if param.grad is not None]
    return [*(tensor.detach() for tensor in output), *gradients], torch.get_rng_state()


def compiled(function: Callable[..., Any], partition_fn: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    result: Callable[..., Any] = torch.compile(function, backend=aot_backend(partition_fn))
    return result


class Views(nn.Module):
    """Splits, transposes, slices, and a view of an input that is read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        y = (weights @ v).transpose(0, 1).reshape(x.shape)
        return self.second(y[..., :8].sin().repeat(1, 1, 2) + x.flip(0))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.mul_(2).relu_()
        z = torch.zeros_like(y)
        z[..., ::2] = y[..., ::2].exp()
        self.count.add_(z.detach().mean((0, 1)))
        return torch.tanh(self.layer(z)) * self.count


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.embedding(tokens)).tanh()
        return x @ self.embedding.weight.t(), x.var(-1)


class Dropouts(nn.Module):
    """Random values large enough to be replayed, and some that are not."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.3)
        x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)[0]
        return x * torch.rand(1)


class BatchNorms(nn.Module):
    """Buffers that the forward pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + F.relu(norm(convolution(x)))
        return F.max_pool2d(x, 2).mean((2, 3))


class Checkpointed(nn.Module):
    """Blocks that the user checkpoints, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(
                lambda y, layer=layer: F.dropout(F.gelu(layer(y)), 0.2), x, use_reentrant=False
            )
        return x


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "views": (Views, lambda: torch.randn(4, 6, 16)),
    "in place": (InPlace, lambda: torch.randn(4, 6, 16)),
    "tied": (Tied, lambda: torch.randint(11, (5, 7))),
    "dropout": (Dropouts, lambda: torch.randn(3, 128, 128)),
    "batch norm": (BatchNorms, lambda: torch.randn(4, 8, 12, 12)),
    "checkpointed": (Checkpointed, lambda: torch.randn(32, 64)),
}
