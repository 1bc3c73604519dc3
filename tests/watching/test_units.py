"""Units of products at the dispatcher: stored values, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.dispatch.calls import RanProduct
from lightning_unitscale.formats import FP16
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.watching import watcher as watcher_file
from lightning_unitscale.watching.watcher import StepWatcher


class Products:
    """In place of a session: says of each linear layer's product in which units it ran."""

    def __init__(self, units: tuple[int, int], gamma: int) -> None:
        self.units = units
        self.gamma = gamma
        self.casts = False
        self.ran: list[RanProduct] = []

    @contextmanager
    def watching(self) -> Iterator[list[RanProduct]]:
        self.ran = []
        yield self.ran

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        storages = tuple(
            0 if self.casts else one.untyped_storage().data_ptr() for one in (x, weight)
        )
        self.ran.append(RanProduct("linear", storages, self.units, self.gamma))
        return _linear(x, weight)


_linear = torch.nn.functional.linear


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 2**-12)

    def step(self, x: Tensor) -> Tensor:
        return (torch.nn.functional.linear(x * 2.0**-10, self.weight) * 2.0**-20).sum()


def sample(watcher: StepWatcher, model: Model, step: int) -> ScaleSnapshot:
    loss = watcher.run(model, model.step, (torch.ones(4, 8),), {})
    loss.backward()
    sent = watcher.take(step)
    assert sent is not None
    return sent()


class _Function(torch.overrides.TorchFunctionMode):
    """Puts another function in the place of ``linear``, below everybody else."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _linear:
            return self.products.linear(*args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("casts", [True, False])
def test_stored_values(histogram: bool, casts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products((-10, -12), -20)
    products.casts = casts
    monkeypatch.setattr(watcher_file, "watching", products.watching)
    watcher = StepWatcher(RowLayout((FP16,), histogram=histogram), lambda *_: True)
    model = Model()
    with _Function(products):
        for step in range(3):
            if step == 2:
                products.units, products.gamma = (-9, -11), -18
            found = sample(watcher, model, step)
            units = dict(zip(found.names, found.log2_sigma.tolist(), strict=True))
            assert units["mul"] == products.units[0]
            assert units["weight"] == products.units[1]
            assert units["linear"] == 0
            gammas = dict(zip(found.names, found.log2_gamma.tolist(), strict=True))
            assert gammas == {**dict.fromkeys(found.names, 0), "linear": products.gamma}
            # 2**-10 is subnormal in no format's eyes once it is divided by its unit.
            stored, meant = (found.statistics("mul", stored=one) for one in (True, False))
            assert stored is not None
            assert meant is not None
            assert stored.rms == 2.0 ** (-10 - products.units[0])
            assert meant.rms == 2.0**-10
            assert stored.fraction(FP16, "subnormal") == 0
            gradient = found.statistics("linear", "backward", stored=True)
            assert gradient is not None
            assert gradient.rms == 2.0 ** (-20 - products.gamma)
            assert gradient.fraction(FP16, "subnormal") == 0
            weight = found.statistics("weight", stored=True)
            assert weight is not None
            expected = model.weight.detach().abs() * 2.0 ** -products.units[1] < 2.0**-14
            assert weight.fraction(FP16, "subnormal") == pytest.approx(
                float(expected.float().mean()), abs=1e-9
            )


def test_before_units(monkeypatch: pytest.MonkeyPatch) -> None:
    products = Products((0, 0), 0)
    monkeypatch.setattr(watcher_file, "watching", products.watching)
    watcher, model = StepWatcher(RowLayout((FP16,)), lambda *_: True), Model()
    assert not watcher.is_before_units
    with _Function(products):
        watcher.run(model, model.step, (torch.ones(4, 8),), {})
        assert watcher.is_before_units
        watcher.clear()
        products.units = (-10, -12)
        watcher.run(model, model.step, (torch.ones(4, 8),), {})
        assert not watcher.is_before_units
