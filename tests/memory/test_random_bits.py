"""Captured steps draw the random numbers of an ordinary step, also under autocast."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_unitscale.capture.aot_backend import plain_kernels
from lightning_unitscale.transforms import compile as compiled
from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0].permute(0, 3, 1, 2),
}
DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "channels": lambda x: F.dropout2d(x, 0.3),
    "all": lambda x: F.dropout(x, 1.0),
    "none": lambda x: F.dropout(x, 0.3, training=False),
}


class Dropped(nn.Module):
    """A scaled image with dropout in some layout."""

    def __init__(self, layout: Callable[[Tensor], Tensor], drop: Callable[[Tensor], Tensor]):
        super().__init__()
        self.layout, self.drop = layout, drop
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, image: Tensor) -> Tensor:
        dropped = self.drop(self.layout(image) * self.scale)
        return (dropped * torch.linspace(0, 1, dropped.shape[-1])).sum(dtype=torch.float32)


class Mixed(nn.Module):
    """Layers that autocast runs in BF16, with dropout and normalization between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.first(x)), 0.1)
        return (F.log_softmax(self.norm(self.second(hidden)), -1) * x).sum()


def _step(module: nn.Module, batch: Tensor, *, autocast: bool = False) -> list[Tensor]:
    """The losses and gradients of two steps, and the generator's state after them."""
    torch.manual_seed(3)
    results = []
    for _ in range(2):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = module(batch)
        loss.backward()
        gradients = [param.grad.clone() for param in module.parameters() if param.grad is not None]
        results += [loss.detach(), *gradients]
    return [*results, torch.get_rng_state()]


@pytest.mark.slow_cases
@pytest.mark.parametrize("drop", DROPOUTS.values(), ids=DROPOUTS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_bit_identical(
    layout: Callable[[Tensor], Tensor], drop: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 4, 6, 6).to(dtype)
    plain = Dropped(layout, drop).to(dtype)
    planned = remat(copy.deepcopy(plain), "min_cut")
    assert_same_bits(_step(planned, image), _step(plain, image))


class Stacked(nn.Module):
    """Recurrent layers with dropout between them, whose states are the result."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(6, 8, num_layers=3, dropout=0.3, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0].square().mean()


RECURRENT = {
    "lstm": Stacked("LSTM"),
    "lstm, both ways": Stacked("LSTM", bidirectional=True, batch_first=True),
    "lstm without bias": Stacked("LSTM", bias=False),
    "lstm of one sequence": Stacked("LSTM"),
    "rnn": Stacked("RNN", batch_first=True),
    "rnn, both ways": Stacked("RNN", bidirectional=True, nonlinearity="relu"),
    "gru": Stacked("GRU"),
    "gru, both ways": Stacked("GRU", bidirectional=True, batch_first=True),
    "evaluated": Stacked("LSTM").eval(),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("lstm", "evaluated") else [pytest.mark.slow])
        for name in RECURRENT
    ],
)
def test_recurrent_dropout_is_bit_identical(name: str) -> None:
    torch.manual_seed(0)
    plain = RECURRENT[name]
    planned = remat(copy.deepcopy(plain), "min_cut")
    x = torch.randn(4, 6) if "sequence" in name else torch.randn(4, 5, 6)
    found, expected = _step(planned, x), _step(plain, x)
    assert_same_bits(found[-1], expected[-1])
    if "gru" in name:  # its decomposition adds the gradients of its gates in another order
        torch.testing.assert_close(found, expected)
    else:
        assert_same_bits(found, expected)
    assert len(planned.remat_reports()) == 1


def test_recurrent_dropout_under_inductor(torch_kernels: None) -> None:
    torch.manual_seed(0)
    plain, x = Stacked("LSTM"), torch.randn(4, 5, 6)
    assert_same_bits(_step(compiled(copy.deepcopy(plain)), x), _step(plain, x))


@pytest.mark.parametrize("autocast", [False, True])
def test_backward_pass_outside_autocast_is_bit_identical(autocast: bool) -> None:
    torch.manual_seed(0)
    plain, batch = Mixed(), torch.randn(8, 16)
    planned = remat(copy.deepcopy(plain), "min_cut")
    assert_same_bits(
        _step(planned, batch, autocast=autocast), _step(plain, batch, autocast=autocast)
    )


UNREAD: dict[str, Callable[[Tensor], object]] = {
    "noise": lambda x: torch.randn_like(x),
    "dropout": lambda x: F.dropout(x * 2, 0.3),
    "written": lambda x: torch.empty(3).uniform_(),
    "permutation": lambda x: torch.randperm(7),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
}


class Unread(Mixed):
    """Draws numbers that no result depends on, before and after others that are read."""

    def __init__(self, draw: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        self.draw(x)
        result = super().forward(x)
        self.draw(self.first(x))
        return result


@pytest.mark.slow_cases
@pytest.mark.parametrize("draw", UNREAD.values(), ids=UNREAD)
def test_unread_random_draws_happen_once(draw: Callable[[Tensor], object]) -> None:
    torch.manual_seed(0)
    plain, batch = Unread(draw), torch.randn(8, 16)
    expected = _step(plain, batch)
    for budget in ("min_cut", "min"):
        assert_same_bits(_step(remat(copy.deepcopy(plain), budget), batch), expected)
    results = []
    for module in (plain, remat(copy.deepcopy(plain), "min_cut")):
        torch.manual_seed(4)
        with torch.no_grad():
            results.append([module(batch), torch.get_rng_state()])
    assert_same_bits(*results)


def test_inductor_draws_same_random_numbers() -> None:
    torch.manual_seed(0)
    plain, batch = Mixed(), torch.randn(8, 16)
    expected = _step(plain, batch)
    found = _step(compiled(copy.deepcopy(plain)), batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_plain_kernels_restores_dropout() -> None:
    operators = (torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default)
    before = [dict(operator.py_kernels) for operator in operators]
    with plain_kernels():
        assert [operator.py_kernels for operator in operators] != before
    assert [operator.py_kernels for operator in operators] == before
