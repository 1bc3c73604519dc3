"""Predicted peaks beside other callbacks, and of the optimizer's step, against the allocator's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_unitscale import RematCallback, ScaleMonitor, UnitScaleCallback
from tests.callbacks.runs import QUIET, MemoryLogger


class MLP(pl.LightningModule):
    """768-256x3-10: weights outweigh activations."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        widths = [768, *[256] * 3]
        pairs = itertools.pairwise(widths)
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(256, 10))
        self._make = make

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make(self.parameters())


def _fit(
    remat: RematCallback,
    *others: pl.Callback,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64 * 6, 768), torch.randint(10, (64 * 6,)))
    options = {**QUIET, "max_epochs": 1, "logger": MemoryLogger(), **options}
    trainer = pl.Trainer(callbacks=[*others, remat], **options)
    trainer.fit(MLP(make), DataLoader(data, batch_size=64))


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


BESIDE: dict[str, Callable[[], Sequence[pl.Callback]]] = {
    "beside units and a monitor": lambda: (UnitScaleCallback(), ScaleMonitor(every_n_steps=100)),
    "alone": lambda: (),
    "beside units": lambda: (UnitScaleCallback(),),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize("make", [torch.optim.AdamW, _sgd], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("beside", BESIDE)
def test_predicted_peak_matches_measured_peak(beside: str, make: Any) -> None:
    remat = RematCallback(1.0)
    _fit(remat, *BESIDE[beside](), make=make)
    assert remat.predicted_peak_bytes == pytest.approx(remat.measured_peak_bytes, rel=0.01)
    assert len(remat.reports) == 1
    in_optimizer = remat.reports[0].peak_at == "the optimizer's step"
    assert in_optimizer == (make is torch.optim.AdamW)


@pytest.mark.slow_cases
@pytest.mark.parametrize("beside", sorted(BESIDE))
def test_measured_peak_needs_no_recomputation(beside: str) -> None:
    remat = RematCallback(1.0)
    _fit(remat, *BESIDE[beside](), make=_sgd)
    assert remat.measured_peak_bytes is not None
    again = RematCallback(int(1.001 * remat.measured_peak_bytes))
    _fit(again, *BESIDE[beside](), make=_sgd)
    assert again.reports[0].recomputed_flops == 0


@pytest.mark.slow
def test_accumulated_batches_with_units() -> None:
    remat = RematCallback(1.0)
    _fit(remat, UnitScaleCallback(), accumulate_grad_batches=2)
    assert remat.predicted_peak_bytes == pytest.approx(remat.measured_peak_bytes, rel=0.01)


@pytest.mark.slow
def test_optimizer_step_limits_lowest_peak() -> None:
    remat = RematCallback("min")
    _fit(remat)
    assert remat.reports[0].peak_at == "the optimizer's step"
    assert remat.reports[0].recomputed_flops == 0
    with pytest.raises(ValueError, match=r"smallest achievable peak is .*, in the optim"):
        _fit(RematCallback("2MiB"))
