"""Stored (scaled) values of matmul operands, and their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.formats import FP16
from lightning_unitscale.matmuls.calls import RanMatmul
from lightning_unitscale.monitor import watcher as watcher_file
from lightning_unitscale.monitor.watcher import StepWatcher
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot


class Matmuls:
    """A stand-in for a session that reports the units of each linear layer's matmul."""

    def __init__(self, units: tuple[int | None, int | None], gamma: int | None) -> None:
        self.units = units
        self.gamma = gamma
        self.casts = False
        self.see: Callable[[RanMatmul], None]

    @contextmanager
    def watching(self, see: Callable[[RanMatmul], None]) -> Iterator[None]:
        self.see = see
        yield

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        operands = (x.bfloat16().float(), weight.bfloat16().float()) if self.casts else (x, weight)
        result = _linear(*operands)
        number = result.grad_fn._sequence_nr()  # type: ignore[union-attr]
        names = ("linear:input", "linear:weight")
        nodes = range(number, number + 1)
        self.see(RanMatmul(operands, self.units, self.gamma, nodes, names, (-1, -2)))
        return result


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

    def __init__(self, matmuls: Matmuls) -> None:
        super().__init__()
        self.matmuls = matmuls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _linear:
            return self.matmuls.linear(*args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("histogram", [True, False])
@pytest.mark.parametrize("casts", [True, False])
def test_stored_values_match_scaled_operands(
    histogram: bool, casts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmuls = Matmuls((-10, -12), -20)
    matmuls.casts = casts
    monkeypatch.setattr(watcher_file, "watching", matmuls.watching)
    watcher = StepWatcher(RowLayout((FP16,), histogram=histogram), lambda *_: True)
    model = Model()
    with _Function(matmuls):
        for step in range(3):
            if step == 2:
                matmuls.units, matmuls.gamma = (-9, -11), -18
            found = sample(watcher, model, step)
            units = dict(zip(found.names, found.log2_sigma.tolist(), strict=True))
            assert units["mul"] == matmuls.units[0]
            assert units["weight"] == matmuls.units[1]
            assert units["linear"] == 0
            gammas = dict(zip(found.names, found.log2_gamma.tolist(), strict=True))
            assert gammas == {**dict.fromkeys(found.names, 0), "linear": matmuls.gamma}
            # 2**-10 is subnormal in no format's eyes once it is divided by its unit.
            stored, meant = (found.statistics("mul", stored=one) for one in (True, False))
            assert stored is not None
            assert meant is not None
            assert stored.rms == 2.0 ** (-10 - matmuls.units[0])
            assert meant.rms == 2.0**-10
            assert stored.fraction(FP16, "subnormal") == 0
            gradient = found.statistics("linear", "backward", stored=True)
            assert gradient is not None
            assert gradient.rms == 2.0 ** (-20 - matmuls.gamma)
            assert gradient.fraction(FP16, "subnormal") == 0
            weight = found.statistics("weight", stored=True)
            assert weight is not None
            expected = model.weight.detach().abs() * 2.0 ** -matmuls.units[1] < 2.0**-14
            assert weight.fraction(FP16, "subnormal") == pytest.approx(
                float(expected.float().mean()), rel=2**-10
            )


def test_tensors_lack_units_before_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls = Matmuls((None, None), None)
    monkeypatch.setattr(watcher_file, "watching", matmuls.watching)
    watcher, model = StepWatcher(RowLayout((FP16,)), lambda *_: True), Model()
    with _Function(matmuls):
        found = sample(watcher, model, 0)
        lacking = dict(zip(found.names, found.lacking_units, strict=True))
        assert lacking["weight"] == lacking["mul"] == (True, False)
        assert lacking["linear"] == (False, True)
        # An operand that is all zero has none for longer than the others.
        matmuls.units, matmuls.gamma = (-10, None), -20
        found = sample(watcher, model, 1)
        lacking = dict(zip(found.names, found.lacking_units, strict=True))
        assert [name for name, each in lacking.items() if any(each)] == ["weight"]
        assert found.log2_sigma[found.names.index("weight")] == 0


def test_tensor_no_longer_read_by_matmul_is_unscaled(monkeypatch: pytest.MonkeyPatch) -> None:
    matmuls = Matmuls((-10, -12), -20)
    monkeypatch.setattr(watcher_file, "watching", matmuls.watching)
    watcher, model = StepWatcher(RowLayout((FP16,)), lambda *_: True), Model()
    with _Function(matmuls):
        sample(watcher, model, 0)
    # The same step, whose matmul the dispatcher does not see now.
    found = sample(watcher, model, 1)
    assert not found.log2_sigma.any() and not found.log2_gamma.any()
    weight = found.statistics("weight", stored=True)
    assert weight is not None
    expected = model.weight.detach().abs() < 2.0**-14
    assert weight.fraction(FP16, "subnormal") == pytest.approx(
        float(expected.float().mean()), rel=2**-10
    )
