"""Matmuls that read weights at unit scale outside the captured graphs."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import remat
from tests.helpers import assert_same_bits, run

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "autocast":
            hidden = self.in_autocast(x)
        elif self.where == "thread":
            hidden = self.on_thread(x)
        else:
            hidden = self.first(x)
        return self.second(hidden.float().relu()).square().mean()

    @torch.compiler.disable
    def in_autocast(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.first(x)

    @torch.compiler.disable
    def on_thread(self, x: Tensor) -> Tensor:
        results: list[Any] = []

        def work() -> None:
            try:
                # Not a call of the layer, which would be found on the stack.
                results.append(torch.nn.functional.linear(x, self.first.weight))
            except CaptureError as error:
                results.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if isinstance(results[0], CaptureError):
            raise results[0]
        return results[0]


@pytest.mark.parametrize("where", ["autocast", "thread"])
@pytest.mark.parametrize("trains", [True, False])
def test_uncaptured_matmul_in_step_is_an_error(where: str, trains: bool) -> None:
    scaled: Any = unit_scale(Net())
    run(scaled, X)
    scaled.where = where
    with (
        torch.set_grad_enabled(trains),
        pytest.raises(CaptureError, match=r"a matmul reads first.weight outside of the captured"),
    ):
        scaled(X)


def test_uncaptured_matmul_outside_steps_warns_once() -> None:
    scaled: Any = unit_scale(Net())
    scaled.first(X)  # its weights are not set yet
    run(scaled, X)
    with pytest.warns(UserWarning, match=r"Net: a matmul outside of its steps reads first.weight"):
        scaled.first(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled.first(X)
        run(scaled, X)
        vars(scaled)["_captured_steps"].passes[0].has_warned = False
        Net().first(X)  # another model
        X @ scaled.first.weight.T  # no call of the layer
        torch.randn(4, 8) @ torch.randn(8, 4)


class Experts(nn.Module):
    """A matmul inside of an operator of transformers, which runs on its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 6], dtype=torch.int32)
        run: Any = torch.ops.transformers.grouped_mm_fallback
        return run(x, self.weight, ends).square().mean()


def test_matmuls_in_planned_graph_are_captured() -> None:
    pytest.importorskip("transformers.integrations.moe")
    scaled = unit_scale(Experts())
    assert_same_bits(run(remat(unit_scale(Experts()), 0.0), X), run(scaled, X))
