"""Tensors that are zero when units are first measured, by rules and in captured steps."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale import UnitScaleCallback
from lightning_unitscale.rules.unit_weights import ParameterGradients
from lightning_unitscale.transforms import simulate_fp8, unit_scale
from tests.callbacks.late_modules import LATE, WIDTH
from tests.callbacks.runs import QUIET, Capturing

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scaling='u-mup'.*:UserWarning")

FORMATS: dict[str, dict[str, Any]] = {"simulated": {"simulate": "fp8"}, "FP8": {"precision": "fp8"}}


def _run(
    make: Any,
    method: str = "unit-scaling",
    steps: int = 24,
    others: tuple[pl.Callback, ...] = (),
    **options: Any,
) -> tuple[Any, UnitScaleCallback]:
    callback = UnitScaleCallback(method, recalibrate=None, **options)  # type: ignore[arg-type]
    module = make() if callable(make) else make
    pl.seed_everything(4, verbose=False)
    settings = {"max_steps": steps, "max_epochs": -1, **QUIET}
    pl.Trainer(callbacks=[callback, *others], **settings).fit(module)
    return module, callback


class _Watched(pl.LightningModule):
    """Mixed into a module: the RMS of each gradient as its optimizer reads it."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[str, list[float]] = getattr(self, "seen", {})
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                rms = parameter.grad.square().mean().sqrt()
                self.seen.setdefault(name, []).append(float(rms))


def _watched(name: str) -> Any:
    kind: Any = LATE[name]
    return type(kind.__name__, (_Watched, kind), {})


@pytest.mark.slow_cases
@pytest.mark.parametrize("method", ["unit-scaling", "u-mup", "lossless"])
@pytest.mark.parametrize("name", LATE)
def test_formats_train_like_fp32(name: str, method: str) -> None:
    make: Any = LATE[name]
    if method == "u-mup":
        rate = 0.3

        class Fast(make):  # type: ignore[misc]
            def configure_optimizers(self) -> Any:
                return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], rate)

        make = Fast
    # By rules steps are captured anyway.
    others = (Capturing(),) if method == "lossless" else ()
    wide, _ = _run(make, method, others=others)
    for options in FORMATS.values():
        module, callback = _run(make, method, others=others, **options)
        assert module.losses[-1] == pytest.approx(wide.losses[-1], rel=0.05)
        # With the units of the first batch only, whatever the schedule.
        assert "First units for" in callback.explain()
        assert "no unit yet" not in callback.explain().partition("\n\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LATE)
def test_late_gradients_are_flushed_for_one_step_at_most(name: str) -> None:
    wide, _ = _run(_watched(name))
    first = {fqn: _first(seen) for fqn, seen in wide.seen.items()}
    assert max(first.values()) > 0
    for options in FORMATS.values():
        module, _ = _run(_watched(name), **options)
        for fqn, seen in module.seen.items():
            assert _first(seen) <= first[fqn] + 1, fqn


def _first(seen: list[float]) -> int:
    return next(step for step, rms in enumerate(seen) if rms > 0)


@pytest.mark.slow_cases
@pytest.mark.parametrize("options", [{}, *FORMATS.values()], ids=["FP32", *FORMATS])
@pytest.mark.parametrize("name", LATE)
def test_late_gradients_are_scaled_to_rms_1(name: str, options: Any) -> None:
    module, _ = _run(_watched(name), **options)
    for fqn, seen in module.seen.items():
        at = _first(seen)
        # As it is when an optimizer first reads it; later it goes where training takes it.
        assert math.log2(seen[at]) == pytest.approx(0, abs=0.6), fqn
        assert math.log2(seen[at + 2]) == pytest.approx(0, abs=4), fqn


@pytest.mark.slow
def test_lossless_late_units_in_captured_steps() -> None:
    module = LATE["zero head"]()
    callback = UnitScaleCallback(remat="min_cut", recalibrate=None)
    plain = LATE["zero head"]()
    for each, callbacks in ((module, [callback]), (plain, [])):
        pl.Trainer(callbacks=callbacks, max_steps=6, max_epochs=-1, **QUIET).fit(each)  # type: ignore[arg-type]
    assert module.losses == plain.losses
    assert callback.gauge["head.linear:weight"].log2_sigma < 0


@pytest.mark.slow
def test_tensors_that_stay_zero_are_reported() -> None:
    class Dead(LATE["annealed loss"]):  # type: ignore[misc]
        def late_share(self, step: int) -> float:
            return 0.0

    _, callback = _run(Dead, simulate="fp8")
    text = str(callback.explain())
    (line,) = [line for line in text.splitlines() if "have no unit yet" in line]
    assert "other.0" in line and "other.2" in line and "encoder" not in line


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return 1e-4 * (self.b(self.a(x)) - x).square().mean()


@pytest.mark.parametrize("rounds", [False, True])
def test_late_gradients_of_transforms_are_near_rms_1(rounds: bool) -> None:
    torch.manual_seed(0)
    model = unit_scale(_Adapted())
    if rounds:
        model = simulate_fp8(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        x = torch.randn(WIDTH, WIDTH)
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    gradients = {name: p.grad.square().mean().sqrt() for name, p in model.named_parameters()}
    for name, rms in gradients.items():
        assert abs(math.log2(rms)) < 3, name


def _parameter(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def _rms(parameter: nn.Parameter) -> float:
    assert parameter.grad is not None
    return float(parameter.grad.square().mean().sqrt())


def test_factors_of_late_gradients() -> None:
    gradients = ParameterGradients()
    late, zero, broken = _parameter(3e-5, -4e-5), _parameter(0.0), _parameter(math.inf)
    named = {"m.late": late, "n.zero": zero, "n.broken": broken}
    gradients.scale_new(named.items())
    assert _rms(late) == pytest.approx(3.5e-5, rel=0.1)  # no training has begun
    gradients.log2_factors["m.known"] = -1
    gradients.measures_late = True
    gradients.scale_new(named.items())
    assert 0.7 < _rms(late) < 1.5 and _rms(zero) == 0 and _rms(broken) == math.inf
    # The next backward pass comes before the numbers are read: it is scaled once more.
    late.grad = torch.tensor([3e-5, 4e-5])
    gradients.scale_new(named.items())
    assert 0.7 < _rms(late) < 1.5
    gradients.settle()
    exponent = -round(math.log2(3.5355e-5))
    assert gradients.log2_factors == {"m.known": -1, "m.late": exponent}
    late.grad = torch.ones(2)
    gradients.scale_new(named.items())
    assert torch.equal(late.grad, torch.ones(2))


def test_rounding_errors_do_not_set_factors() -> None:
    gradients = ParameterGradients()
    gradients.start(num_accumulated=1)
    gradients.log2_factors["m.weight"] = 0
    noise, weight, bias = (_parameter(value) for value in (1e-12, 2.0**-10, 1e-12))
    gradients.scale_new({"m.bias": noise, "n.weight": weight, "n.bias": bias}.items())
    gradients.settle()
    assert gradients.log2_factors == {"m.weight": 0, "m.bias": 0, "n.weight": 10, "n.bias": 10}
    assert _rms(noise) == pytest.approx(1e-12) and _rms(weight) == 1.0
