"""Uncommon layers and hooks: embeddings, ragged rows, changing lengths."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale import RematCallback, UnitScaleCallback
from tests.callbacks.modules import Regression, adamw, momentum
from tests.callbacks.rule_runs import plan_of
from tests.callbacks.runs import ARRANGEMENTS, assert_same_run, loader, run, unit_scale_of
from tests.helpers import assert_same_bits

EXACT = ["both", "both, captured", "monitor"]


class Looking(Regression):
    """Rows of embeddings in place of numbers."""

    def __init__(self, *embeddings: nn.Module) -> None:
        super().__init__(momentum, norm=False)
        self.embeddings = nn.ModuleList(embeddings)

    def forward(self, x: Tensor) -> Tensor:
        index = (x * 200).long().abs() % 5
        rows = [one(index) for one in self.embeddings]
        return super().forward(sum(one if one.dim() == 2 else one.sum(1) for one in rows))


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", EXACT)
def test_embeddings_with_max_norm(how: str) -> None:
    def make() -> Looking:
        return Looking(
            nn.Embedding(5, 6, padding_idx=0, max_norm=0.5),
            nn.EmbeddingBag(5, 6, max_norm=0.5, mode="mean"),
            nn.Embedding(5, 6, scale_grad_by_freq=True),
        )

    assert_same_run(make, ARRANGEMENTS[how])


@pytest.mark.parametrize("how", EXACT)
def test_embeddings_with_sparse_gradients(how: str) -> None:
    class Sparse(Looking):
        def __init__(self) -> None:
            super().__init__(nn.Embedding(5, 6, sparse=True), nn.EmbeddingBag(5, 6, sparse=True))
            self.optimizer_of = lambda module: torch.optim.SGD(module.parameters(), lr=0.05)

    assert_same_run(Sparse, ARRANGEMENTS[how])


class SparseStep(Regression):
    """A module with sparse gradients of embeddings, which its manual step reads."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__(momentum, norm=False, dropout=0.0)
        self.automatic_optimization = not by_hand
        self.table = nn.Embedding(5, 6, sparse=True)
        self.bag = nn.EmbeddingBag(5, 6, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        index = (x * 200).long().abs() % 5
        return super().forward(self.table(index).sum(1) + self.bag(index))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.parameters(), lr=0.05)
        dense = [*self.first.parameters(), *self.second.parameters()]
        sparse = [self.table.weight, self.bag.weight]
        return torch.optim.SparseAdam(sparse, lr=0.01), torch.optim.Adam(dense, lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        loss = self.loss(batch)
        for one in self.optimizers():
            one.zero_grad()
        self.manual_backward(loss)
        self.table.weight.grad.coalesce().values().clamp_(-1, 1)
        for one in self.optimizers():
            one.step()
        return None


@pytest.mark.slow_cases
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.filterwarnings("ignore:RematCallback. training_step is captured in")
def test_sparse_gradients_in_a_plan(by_hand: bool) -> None:
    """Nor does a warning say that the step is not captured, which would be an error here."""
    make = functools.partial(SparseStep, by_hand=by_hand)
    found, plain = run(make, [RematCallback("min_cut")]), run(make)
    assert_same_bits((found.outputs, found.weights), (plain.outputs, plain.weights))


class Graph(Regression):
    """Averages over neighbors by a sparse matrix, between separate layers."""

    def __init__(self) -> None:
        super().__init__(momentum, norm=False, dropout=0.0)
        self.layers = nn.ModuleList(Hidden(6) for _ in range(2))
        neighbors = (torch.eye(4) / 2).roll(1, 0).to_sparse()
        self.register_buffer("neighbors", neighbors, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sparse.mm(self.neighbors, layer(x))
        return super().forward(x)


class Hidden(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:RematCallback. training_step is captured in")
def test_sparse_matrix_in_a_plan() -> None:
    found, plain = run(Graph, [RematCallback("min_cut")]), run(Graph)
    assert_same_bits((found.outputs, found.weights), (plain.outputs, plain.weights))


@pytest.mark.slow_cases
@pytest.mark.parametrize("by_hand", [False, True])
def test_sparse_gradients_by_rules(by_hand: bool) -> None:
    """Under rules the model has other weights, and the same gradients."""
    found = run(functools.partial(SparseStep, by_hand=by_hand), [UnitScaleCallback("u-mup")])
    module = found.module
    gradients = [module.table.weight.grad, module.bag.weight.grad]
    assert all(one is not None and one.is_sparse for one in gradients)
    plans = plan_of(module).parameters
    assert plans["table.weight"].action == plans["bag.weight"].action == "scaled"


@pytest.mark.parametrize("how", EXACT)
def test_sparse_gradients_with_separate_optimizer(how: str) -> None:
    class Sparse(Looking):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(nn.Embedding(5, 6, sparse=True))

        def configure_optimizers(self) -> Any:
            dense = [*self.first.parameters(), *self.second.parameters()]
            return (
                torch.optim.SparseAdam(list(self.embeddings.parameters()), lr=0.01),
                torch.optim.Adam(dense, lr=0.01),
            )

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            for one in self.optimizers():
                one.zero_grad()
            self.manual_backward(loss)
            for one in self.optimizers():
                one.step()

    assert_same_run(Sparse, ARRANGEMENTS[how])


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", EXACT)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_rows(how: str) -> None:
    class Ragged(Regression):
        def forward(self, x: Tensor) -> Tensor:
            rows = [x[i : i + 1 + i % 2] for i in range(len(x))]
            hidden = self.first(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
            return self.second(torch.tanh(hidden.values()))[: len(x)]

    _, callbacks = assert_same_run(Ragged, ARRANGEMENTS[how])
    if how != "monitor":
        assert unit_scale_of(callbacks).gauge.pair("first.linear:input").log2_sigma < -4


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-4, 1e-4)


def _clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-4, 1e-4)


def _clip_all(module: Any, gradients: Any, *_: Any) -> Any:
    return tuple(None if one is None else _clip(one) for one in gradients)


class Clipping(Regression):
    """Gradients that are clipped on their way see true ones, wherever that is."""

    def __init__(self, where: str) -> None:
        super().__init__(norm=False)
        self.where = where
        self.act = nn.Tanh()
        if where == "module":
            self.second.register_full_backward_hook(_clip_all)
            self.act.register_full_backward_pre_hook(_clip_all)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        active = self.act(hidden)
        matmul = self.second(active)
        if self.where == "hooks":
            for one in (hidden, active, matmul):
                if one.requires_grad:
                    one.register_hook(_clip)
        if self.where == "function":
            matmul = _Clipped.apply(matmul * _Clipped.apply(active).mean())
        return matmul + 0.1 * active[:, :2]


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", EXACT)
@pytest.mark.parametrize("where", ["hooks", "function", "module"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_gradients_clipped_by_user(where: str, how: str) -> None:
    assert_same_run(lambda: Clipping(where), ARRANGEMENTS[how])


def _of_one_length(samples: list[Any]) -> Any:
    x, y = (torch.stack(one) for one in zip(*samples, strict=True))
    return x[:, : int(x.abs().sum() * 1000) % 4 + 2], y


class Attending(Regression):
    """Attention over sequences whose length changes from batch to batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__(adamw, norm=False)
        self.first = nn.Linear(1, 8)
        self.project = nn.Linear(8, 24)
        self.rate = dropout
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[..., None])
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        heads = self.project(hidden).unflatten(-1, (2, 12)).transpose(1, 2)
        query, key, value = heads.chunk(3, -1)
        # An odd power of two between the units of query and key.
        mixed = F.scaled_dot_product_attention(query * 1.5, key, value, dropout_p=self.rate)
        return self.second((hidden + mixed.transpose(1, 2).flatten(2)).mean(1))


@pytest.mark.slow_cases
@pytest.mark.parametrize("how", EXACT)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_changing_sequence_lengths(dropout: float, how: str) -> None:
    options: dict[str, Any] = {
        "data": lambda: loader(30, 3, collate_fn=_of_one_length),
        "max_steps": 10,
    }
    plain = run(lambda: Attending(dropout), **options)
    names = []
    for _ in range(2):  # the second run begins with lengths as symbols
        callbacks = ARRANGEMENTS[how]()
        found = run(lambda: Attending(dropout), callbacks, **options)
        assert_same_bits(found.compared(), plain.compared())
        if how != "monitor":
            names.append(set(unit_scale_of(callbacks).gauge))
    if names:
        assert names[0] == names[1]
        fused = [name for name in names[0] if "scaled_dot_product_attention:" in name]
        # The two attentions and their three operands, where torch runs each as one kernel.
        assert (len(fused) == 6) == (dropout == 0)
