"""Compiling on one thread does not affect other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_unitscale.compiling import is_compiling, is_exporting


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def _on_another_thread(ask: Callable[[], Any]) -> Any:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start(), thread.join()
    return answers[0]


def _answers() -> tuple[bool, bool]:
    return is_compiling(), is_exporting()


def test_is_compiling_is_false_in_eager_mode() -> None:
    assert _answers() == (False, False)


def test_is_compiling_is_per_thread_in_backend() -> None:
    seen: list[Any] = []

    def backend(graph_module: Any, _: Any) -> Any:
        # torch 2.11 does not say so while a backend compiles.
        own = is_compiling() == torch.compiler.is_compiling()
        seen.extend([_on_another_thread(_answers), own])
        return graph_module.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen == [(False, False), True]


def test_is_compiling_is_true_in_traced_code() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1 if is_compiling() else x - 1

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)) == 1
    assert step(torch.zeros(1)) == -1


class _Asking(nn.Module):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.ask = lambda: seen.append((_answers(), _on_another_thread(_answers)))

    def forward(self, x: Tensor) -> Tensor:
        self.ask()
        return self.layer(x)


def test_non_strict_export_is_per_thread() -> None:
    seen: list[Any] = []
    torch.export.export(_Asking(seen), (torch.ones(1, 2),), strict=False)
    assert seen
    assert set(seen) == {((True, True), (False, False))}


def test_is_exporting_is_true_in_strict_export() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if is_compiling() and is_exporting() else x - 1

    exported = torch.export.export(Module(), (torch.zeros(1),), strict=True)
    assert exported.module()(torch.zeros(1)) == 1


def test_is_compiling_is_false_in_disabled_function() -> None:
    seen: list[Any] = []

    @torch.compiler.disable
    def ask() -> None:
        seen.append(_answers())

    def step(x: Tensor) -> Tensor:
        y = checkpoint(torch.sin, x * 2, use_reentrant=False)
        ask()
        return y.sum()

    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(2):
        compiled(torch.ones(2, requires_grad=True)).backward()
    assert seen == [(False, False)] * 2
