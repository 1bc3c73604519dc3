"""The fast lookup of a matmul finds the same matmul as the session."""

from __future__ import annotations

import copy
import functools
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale import UnitScaleCallback, attach
from lightning_unitscale.matmuls import kernels, session, steady
from lightning_unitscale.matmuls.execute import Matmul, run_in_units
from tests.helpers import assert_same_bits

NUM_STEPS = 8


class Alternating(torch.autograd.Function):
    """A product whose backward pass computes its two gradients in either order."""

    order = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if Alternating.order % 2:
            return gradient @ weight.mT, x.mT @ gradient
        of_weight = x.mT @ gradient
        return gradient @ weight.mT, of_weight


class Square(nn.Module):
    """Square matrices of equal shape, and one that is multiplied by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        for index, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight, std=4.0 ** (index - 1))
        self.summed = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        # The strides of a sum's gradient are 0, also transposed. So its matmul with the weight,
        # which runs if the input needs a gradient, looks like the one with the input.
        total = self.summed(x).sum()
        for layer in self.layers:
            x = layer(x).tanh()
        x = Alternating.apply(x, self.weight)
        return (x @ x.mT).mul(0.01).logsumexp(0).sum() + 0.01 * total


class Adapted(nn.Linear):
    """Two operators of one name, and one whose name depends on its matrix."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.down = nn.Parameter(torch.randn(8, 2))
        self.up = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        matrices = [self.up.t().contiguous().t() if x.shape[0] % 2 else self.up, self.weight.t()]
        y = x @ self.down
        for matrix in matrices:
            y = y @ matrix
        return super().forward(x) + y


class Varied(nn.Module):
    """Modules that other ones share, call again, skip, reorder, recompute and replace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.adapted = Adapted()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.shared = self.layers[1]
        self.step = 0

    def convolve(self, x: Tensor) -> Tensor:
        # One call for two operators, with a bias and without.
        for number in range(2):
            bias = self.convolution.bias if (self.step + number) % 3 else None
            turned = self.step % 2 == number
            x = torch.convolution(x, self.convolution.weight, bias, [1], [1], [1], turned, [0], 1)
        return x

    def deeper(self, x: Tensor, depth: int) -> Tensor:
        return self.deeper(self.shared(x).tanh(), depth - 1) if depth else x

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2] if self.step % 2 else [2, 0]
        for index in order * (1 + self.step % 3):
            x = self.layers[index](x).tanh()
        x = self.deeper(x, self.step % 4)
        is_reentrant = self.training and self.step % 2 == 0
        x = checkpoint(self.layers[0], self.adapted(x).tanh(), use_reentrant=is_reentrant)
        with torch.no_grad():
            x = x + self.layers[2](x)
        attended, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        return self.convolve(attended.mT).logsumexp(1).sum() + (x @ x.mT).mul(0.01).sum()


def train(
    *callbacks: Any, batch_sizes: tuple[int, ...] = (8,), make: Any = Square, inner: Any = None
) -> list[Tensor]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ExitStack() as attached:
        attached.enter_context(attach(model, optimizer, callbacks))
        if inner is not None:
            attached.enter_context(attach(model.layers[1], callbacks=inner))
        for step in range(NUM_STEPS):
            Alternating.order = model.step = step % 4
            # Without one of two gradients the other one is the first of its node.
            model.layers[1].weight.requires_grad_(step % 4 != 3)
            optimizer.zero_grad()
            x = torch.randn(batch_sizes[step % len(batch_sizes)], 8)
            loss = model(x.requires_grad_(step % 4 != 3))
            loss.backward(retain_graph=step % 3 == 2)
            if step % 3 == 2:
                loss.backward()
            if step == 5:
                for parameter in model.parameters():
                    parameter.data.mul_(1.01)
                model.layers[2] = copy.deepcopy(model.layers[2])
                optimizer.add_param_group({"params": model.layers[2].parameters()})
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Matmuls:
    """Names of the matmuls that run, and how many of them the short paths have found."""

    def __init__(self, patch: pytest.MonkeyPatch, *, is_short: bool) -> None:
        self.names: list[tuple[str, str, tuple[int, ...]]] = []
        self.num_forward = self.num_backward = 0
        prepared: dict[int, Matmul] = {}

        def note(matmul: Matmul) -> None:
            self.names.append((matmul.site.name, matmul.slot, matmul.log2_units))

        def run(matmul: Matmul, *args: Any) -> Any:
            note(matmul)
            return run_in_units(matmul, *args)

        def prepare(matmul: Matmul, *args: Any) -> None:
            PREPARE(matmul, *args)
            prepared.update((id(again), matmul) for again in matmul.again.values())

        def find(function: Any, *args: Any) -> Any:
            found = function(*args) if is_short else None
            if found is not None:
                note(prepared[id(found)])
                self.num_forward += function is FORWARD
                self.num_backward += function is BACKWARD
            return found

        patch.setattr(session, "run_in_units", run)
        patch.setattr(steady, "prepare_again", prepare)
        patch.setattr(kernels, "steady_forward", functools.partial(find, FORWARD))
        patch.setattr(kernels, "steady_backward", functools.partial(find, BACKWARD))


FORWARD, BACKWARD = steady.steady_forward, steady.steady_backward
PREPARE = steady.prepare_again


@pytest.mark.slow_cases
@pytest.mark.parametrize("batch_sizes", [(8,), (3, 8, 5)], ids=str)
@pytest.mark.parametrize(("make", "num_backward"), [(Square, 4), (Varied, 1)])
def test_fast_lookup_finds_same_matmuls_and_units(
    make: Any, num_backward: int, batch_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(batch_sizes=batch_sizes, make=make)
    known = Matmuls(monkeypatch, is_short=False)
    assert_same_bits(train(UnitScaleCallback(), batch_sizes=batch_sizes, make=make), plain)
    found = Matmuls(monkeypatch, is_short=True)
    assert_same_bits(train(UnitScaleCallback(), batch_sizes=batch_sizes, make=make), plain)
    assert found.names == known.names
    assert known.num_forward == known.num_backward == 0
    # Many of the layers' matmuls in all but the first steps.
    assert found.num_forward >= 2 * (NUM_STEPS - 2)
    assert found.num_backward >= num_backward * (NUM_STEPS - 2)


def test_nested_session_keeps_its_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(make=Varied)
    lists = []
    for is_short in (False, True):
        found = Matmuls(monkeypatch, is_short=is_short)
        outer, inner = UnitScaleCallback(), UnitScaleCallback()
        assert_same_bits(train(outer, make=Varied, inner=inner), plain)
        lists.append(found.names)
    assert lists[0] == lists[1]
    assert found.num_forward > 2 * NUM_STEPS
    names = {name for name, _, _ in lists[1]}
    assert "linear" in names and "layers.1.linear" not in names


def test_loaded_units_use_full_lookup_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Matmuls(monkeypatch, is_short=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(model, optimizer, UnitScaleCallback()) as attachment:
        counts = []
        for step in range(8):
            if step == 4:
                before = attachment.state_dict()
                attachment.load_state_dict(before)
            found.num_backward = found.num_forward = 0
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            counts.append((found.num_forward, found.num_backward))
    # Of three backward matmuls (the input needs no gradient), the first of a pass is not short.
    assert counts[3] == counts[7] == (2, 2)
    assert counts[4] == (0, 0)


class Bare(nn.Module):
    """Matmuls in the root's own methods, one of which calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList([nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.step = 0

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.product(x).tanh() @ self.weight.mT
        return self.product(self.layers[1](x)).square().mean()


def test_matmuls_of_root_module_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(make=Bare)
    lists = []
    for is_short in (False, True):
        found = Matmuls(monkeypatch, is_short=is_short)
        assert_same_bits(train(UnitScaleCallback(), make=Bare), plain)
        lists.append(found.names)
    assert lists[0] == lists[1]
    assert found.num_forward >= 4 * (NUM_STEPS - 2)
