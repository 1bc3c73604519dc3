"""Optimizers on held parameters, against the same optimizers on the true ones: the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_unitscale.lossless.gauge import GaugePair
from lightning_unitscale.lossless.scaled_parameters import HeldParameters
from tests.helpers import assert_same_bits
from tests.lossless.stored import Lion

UNITS = {
    "0.weight": GaugePair(-4, -21),
    "0.bias": GaugePair(0, -13),
    "1.weight": GaugePair(3, 5),
    "1.bias": GaugePair(-9, -30),
}
OTHER_UNITS = {"0.weight": GaugePair(1, -3), "0.bias": GaugePair(-2, -13)}


Make = Callable[[list[dict[str, Any]]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam, L2, amsgrad": lambda p: optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
    "Adam, maximize, one by one": lambda p: optim.Adam(p, 0.01, maximize=True, foreach=False),
    "Adam, fused": lambda p: optim.Adam(p, 0.01, weight_decay=0.1, fused=True),
    "Adam, large eps": lambda p: optim.Adam(p, 0.01, eps=1e-3),
    "Adam, rate in a tensor": lambda p: optim.Adam(p, torch.tensor(0.01), foreach=False),
    "AdamW": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, 0.01, weight_decay=0.1),
    "NAdam, decoupled": lambda p: optim.NAdam(
        p, 0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda p: optim.RAdam(p, 0.01, betas=(0.9, 0.99), weight_decay=0.1),
    "RAdam, decoupled": lambda p: optim.RAdam(
        p, 0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "Adamax": lambda p: optim.Adamax(p, 0.01, weight_decay=0.1),
    "Adagrad": lambda p: optim.Adagrad(
        p, 0.01, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3
    ),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, weight_decay=0.1),
    "RMSprop, centered, momentum": lambda p: optim.RMSprop(p, 0.01, centered=True, momentum=0.9),
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "SGD, Nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": lambda p: Lion(p, 0.01, 0.1),
}
if hasattr(optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: optim.Muon(
        [{**one, "params": [q for q in one["params"] if q.dim() == 2]} for one in p], 0.01
    )


def _module(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(dtype)


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    first, *others = module.parameters()
    return [{"params": [first]}, {"params": others, "lr": 0.03}]


def _gradients(step: int, module: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) * 1e-4 for p in module.parameters()]


def _train(
    module: nn.Module,
    optimizer: Optimizer,
    steps: range,
    held: HeldParameters | None = None,
    before: Callable[[], None] = lambda: None,
) -> None:
    for step in steps:
        for parameter, gradient in zip(module.parameters(), _gradients(step, module), strict=True):
            unit = GaugePair() if held is None else held.units_of(parameter)
            parameter.grad = (gradient * 2.0**-unit.log2_gamma).to(parameter.dtype)
        before()
        optimizer.step()


def _state(module: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((dict(module.state_dict()), optimizer.state_dict()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_true_parameters(name: str) -> None:
    """Held from the third step on, in other units from the sixth, true again after the ninth."""
    plain, module = _module(), _module()
    optimizers = [OPTIMIZERS[name](_groups(one)) for one in (plain, module)]
    held = HeldParameters(module, [optimizers[1]])

    def both(first: int, last: int) -> None:
        _train(plain, optimizers[0], range(first, last))
        _train(module, optimizers[1], range(first, last), held)
        assert_same_bits(_state(module, optimizers[1]), _state(plain, optimizers[0]))

    both(0, 2)
    held.attach()
    held.take(UNITS)
    both(2, 5)
    assert not torch.equal(next(module.parameters()), next(plain.parameters()))
    held.take(OTHER_UNITS)
    both(5, 9)
    held.release()
    held.release()
    assert_same_bits(list(module.parameters()), list(plain.parameters()))
    both(9, 12)
    assert optimizers[1].param_groups[1]["lr"] in (0.03, optimizers[0].param_groups[1]["lr"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_go_both_ways(name: str) -> None:
    """What was saved while held is a plain one, and a plain one can be loaded while held."""
    plain, module = _module(), _module()
    optimizers = [OPTIMIZERS[name](_groups(one)) for one in (plain, module)]
    _train(plain, optimizers[0], range(4))
    held = HeldParameters(module, [optimizers[1]])
    held.attach()
    held.take(UNITS)
    saved = _state(plain, optimizers[0])
    before = copy.deepcopy(saved)
    module.load_state_dict(saved[0])
    optimizers[1].load_state_dict(saved[1])
    assert_same_bits(saved, before)
    assert_same_bits(_state(module, optimizers[1]), saved)
    _train(plain, optimizers[0], range(4, 7))
    _train(module, optimizers[1], range(4, 7), held)
    assert_same_bits(_state(module, optimizers[1]), _state(plain, optimizers[0]))
    # A part of the module speaks for itself.
    assert_same_bits(dict(module[1].state_dict()), dict(plain[1].state_dict()))


@pytest.mark.parametrize("name", ["Adam, L2, amsgrad", "SGD, momentum"])
def test_clipping_is_that_of_true_gradients(name: str) -> None:
    plain, module = _module(), _module()
    optimizers = [OPTIMIZERS[name](_groups(one)) for one in (plain, module)]
    held = HeldParameters(module, [optimizers[1]])
    held.attach()
    held.take(UNITS)
    for limit, by_value in ((3e-4, False), (1.0, False), (5e-5, True)):
        ours, theirs = list(module.parameters()), list(plain.parameters())

        def clip_plain(limit: float = limit, by_value: bool = by_value, p: Any = theirs) -> None:
            clip = nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_
            clip(p, limit)

        def clip_held(limit: float = limit, by_value: bool = by_value, p: Any = ours) -> None:
            (held.clip_by_value if by_value else held.clip_by_norm)(p, limit)

        _train(plain, optimizers[0], range(3), before=clip_plain)
        _train(module, optimizers[1], range(3), held, before=clip_held)
        assert_same_bits(_state(module, optimizers[1]), _state(plain, optimizers[0]))
    assert held.true_norm([]) == 0


def test_fp16_keeps_what_true_units_would_lose() -> None:
    """Gradients of 1e-8, whose squares FP16 does not know, train as in FP32.

    Elements are of one size: the squares in FP16 span 40 powers of two, not more.
    """
    reference, half = _module(), _module(torch.float16)
    reference.load_state_dict(half.state_dict())
    optimizers = [optim.AdamW(one.parameters(), 0.01, eps=1e-12) for one in (reference, half)]
    held = HeldParameters(half, [optimizers[1]])
    held.attach()
    held.take({name: GaugePair(-2, -27) for name, _ in half.named_parameters()})
    for step in range(8):
        for one, module in enumerate((reference, half)):
            gradients = _gradients(step, module)
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                unit = 2.0**27 if one else 1.0
                even = (gradient.sign() * 0.5e-4 + gradient / 4) * 1e-4
                parameter.grad = (even * unit).to(parameter.dtype)
            optimizers[one].step()
    state, true_state = _state(half, optimizers[1]), _state(reference, optimizers[0])
    torch.testing.assert_close(state[0], true_state[0], rtol=0.03, atol=5e-4)
    squares = [one[1]["state"][0]["exp_avg_sq"] for one in (state, true_state)]
    assert squares[0].dtype == torch.float32 and 0 < squares[0].max() < 1e-14
    torch.testing.assert_close(*squares, rtol=0.02, atol=1e-19)
    # Saved, loaded into another one that is held, and saved again: nothing is lost on the way.
    again = _module(torch.float16)
    other = optim.AdamW(again.parameters(), 0.01, eps=1e-12)
    held_again = HeldParameters(again, [other])
    held_again.attach()
    held_again.take({name: GaugePair(-2, -27) for name, _ in half.named_parameters()})
    again.load_state_dict(state[0])
    other.load_state_dict(state[1])
    assert_same_bits(_state(again, other), state)
    held.release()
    assert {one.dtype for one in half.parameters()} == {torch.float16}
    assert_same_bits(optimizers[1].state_dict()["state"][0]["exp_avg_sq"], squares[0])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RMSprop", "RAdam"])
def test_squares_that_fp16_has_not_make_no_large_steps(name: str) -> None:
    """The square of a gradient of 2**-11 of its unit, a thousandth of it at first, is zero."""
    parameter = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    module = nn.Module()
    module.weight = parameter
    optimizer = OPTIMIZERS[name]([{"params": [parameter]}])
    for group in optimizer.param_groups:
        group.update(weight_decay=0.0, eps=1e-15)
    held = HeldParameters(module, [optimizer])
    held.attach()
    held.take({"weight": GaugePair(0, -20)})
    for _ in range(12):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([2.0**-11] * 4 + [1.0] * 4, dtype=torch.float16)
        optimizer.step()
        moved = (parameter.detach() - before).abs()
        # RMSprop does not correct for its first averages, so all of its first steps are large.
        assert moved.max() < (0.011 if name != "RMSprop" else 0.11)
    assert parameter.all()


def test_a_sum_of_squares_outgrows_fp16() -> None:
    module = _module(torch.float16)
    with pytest.raises(ValueError, match=r"^optimizer=Adagrad\(...\): it sums .*; expected param"):
        HeldParameters(module, [optim.Adagrad(module.parameters())])


def test_others_are_stopped_and_true_values_are_there_for_them() -> None:
    module = _module()
    plain = copy.deepcopy(module)
    optimizer = optim.SGD(module.parameters(), 0.1)
    running = [False]
    held = HeldParameters(module, [optimizer], lambda: running[0])
    held.attach()
    x = torch.ones(2, 6)
    assert_same_bits(module(x), plain(x))
    held.take(UNITS)
    with pytest.raises(RuntimeError, match=r"^Linear is called outside .*; expected true values"):
        module(x)
    with held.true_values():
        assert_same_bits(module(x), plain(x))
        assert_same_bits(dict(module.state_dict()), dict(plain.state_dict()))
    running[0] = True
    assert not torch.equal(module(x), plain(x))
    held.release()
    running[0] = False
    assert_same_bits(module(x), plain(x))


class _Own(optim.Adam):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class _Named(optim.AdamW):
    """A subclass that changes nothing of the step."""


@pytest.mark.parametrize(
    "make",
    [
        optim.Adadelta,
        optim.ASGD,
        optim.Rprop,
        optim.LBFGS,
        optim.Adafactor,
        _Own,
        lambda p: optim.SparseAdam(list(p)),
    ],
)
def test_optimizers_that_are_not_known(make: Any) -> None:
    module = _module()
    before = copy.deepcopy(module.state_dict())
    optimizer = make(module.parameters())
    with pytest.raises(ValueError, match=rf"^optimizer={type(optimizer).__name__}\(...\): .*Muon;"):
        HeldParameters(module, [optim.Adam(module.parameters()), optimizer])
    assert_same_bits(dict(module.state_dict()), dict(before))


def test_subclasses_that_change_nothing_are_known() -> None:
    module = _module()
    HeldParameters(module, [_Named(module.parameters())])


def test_state_that_is_not_known() -> None:
    module = _module()
    optimizer = optim.Adam(module.parameters())
    _train(module, optimizer, range(1))
    optimizer.state[next(module.parameters())]["memory"] = torch.ones(3)
    held = HeldParameters(module, [optimizer])
    with pytest.raises(RuntimeError, match=r"^Adam: it keeps 'memory'.*; expected exp_avg"):
        held.take(UNITS)
