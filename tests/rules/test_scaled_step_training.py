"""A model with scaled rates learns the same as the unscaled one, also under schedules and decay."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_unitscale.rules.scaled_step import scale_learning_rates
from tests.helpers import assert_same_bits
from tests.rules.stored import TINY, Lion, Stored, batches, step, train


def assert_matches(
    make: Callable[[list[nn.Parameter]], Optimizer],
    tolerance: float = 1e-10,
    sigmas: tuple[float, float] = (0.037, 0.21),
    bias: bool = True,
    with_closure: bool = False,
) -> None:
    plain = Stored((1.0, 1.0), 1.0, bias)
    stored = Stored(sigmas, 0.13, bias)
    expected = train(plain, make(list(plain.parameters())))
    untouched = Stored((1.0, 1.0), 1.0, bias).effective()
    optimizer = make(list(stored.parameters()))
    scale_learning_rates(optimizer, stored.infos(), "match")
    got = train(stored, optimizer, with_closure)
    for name, value in expected.items():
        assert (value - untouched[name]).abs().max() > 0.01
        error = (got[name] - value).abs().max() / value.abs().max()
        assert error < tolerance, (name, float(error))


MATCHED: dict[str, Callable[[Any], Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=TINY),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=TINY, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=TINY, weight_decay=0.5),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=TINY, weight_decay=0.5, fused=True),
    "AdamW, tensor rate": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01, dtype=torch.float64), eps=TINY, weight_decay=0.5, fused=True
    ),
    "NAdam": lambda p: torch.optim.NAdam(
        p, lr=0.01, eps=TINY, weight_decay=0.5, decoupled_weight_decay=True
    ),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=TINY),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=TINY, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, eps=TINY),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, eps=(TINY, 0.5), weight_decay=0.5),
}


@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.parametrize("with_closure", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_match_is_exact(name: str, with_closure: bool) -> None:
    assert_matches(MATCHED[name], with_closure=with_closure)


def test_match_is_exact_with_a_sign() -> None:
    assert_matches(lambda p: Lion(p, lr=1e-3, weight_decay=0.5))


def test_match_is_exact_with_radam_after_warmup() -> None:
    def make(parameters: Any) -> Optimizer:
        """Return RAdam, whose first five steps, which are not normalized, have rate 0."""
        optimizer = torch.optim.RAdam(parameters, lr=0.01, eps=TINY, betas=(0.9, 0.99))
        steps = iter(range(100))

        def set_rate(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.01 if next(steps) >= 5 else 0.0

        optimizer.register_step_pre_hook(set_rate)
        return optimizer

    assert_matches(make)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_match_is_exact_with_muon_and_powers_of_two() -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.5, eps=TINY)

    assert_matches(make, sigmas=(2.0**-5, 2.0**-2), bias=False)
    assert_matches(make, tolerance=0.03, bias=False)  # BF16 rounds the other gradients otherwise


def test_match_gives_sgd_u_mup_rates() -> None:
    for options in ({}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}):
        stored = Stored((0.1, 0.2), 0.13)
        by_hand = copy.deepcopy(stored)
        optimizer = torch.optim.SGD(stored.parameters(), lr=0.1, weight_decay=0.01, **options)
        scale_learning_rates(optimizer, stored.infos(), "match")
        groups = [
            {"params": [by_hand.first], "lr": 0.1 * 6**-0.5, "weight_decay": 0.01 * (1 / 6**-0.5)},
            {
                "params": [by_hand.second, by_hand.bias],
                "lr": 0.1 * 8**-0.5,
                "weight_decay": 0.01 * (1 / 8**-0.5),
            },
        ]
        other = torch.optim.SGD(groups, lr=0.1, weight_decay=0.01, **options)
        assert_same_bits(train(stored, optimizer), train(by_hand, other))


@pytest.mark.parametrize("after", [False, True])
def test_schedulers_see_user_rates_without_warning(after: bool) -> None:
    def run(scaled: bool) -> list[float]:
        model = Stored((0.25, 0.25), 0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99))
        if scaled and not after:
            scale_learning_rates(optimizer, model.infos(), "u-mup")
        one_cycle = OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
        if scaled and after:
            scale_learning_rates(optimizer, model.infos(), "u-mup")
        rates = []
        for _ in range(10):
            step(model, optimizer)
            one_cycle.step()
            rates += [optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]]
        return rates

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(True) == run(False)


@pytest.mark.parametrize("kind", ["none", "lambda", "one cycle", "one cycle after", "tensor rate"])
def test_independent_decay_follows_schedule(kind: str) -> None:
    """Each step shrinks a weight by ``weight_decay * lr / peak``, whatever its rate."""
    model = Stored((1.0, 1.0), 1.0)
    peak: Any = torch.tensor(0.5, dtype=torch.float64) if kind == "tensor rate" else 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.125)
    scheduler: Any = None
    if kind == "one cycle after":
        optimizer.param_groups[0]["lr"] = 7.0  # what the scheduler overwrites
        scale_learning_rates(optimizer, model.infos(), "u-mup")
    if kind.startswith("one cycle"):
        scheduler = OneCycleLR(optimizer, max_lr=0.5, total_steps=8, cycle_momentum=False)
    elif kind != "none":
        scheduler = LambdaLR(optimizer, lambda step: step / 4)  # the first step has rate 0
    if kind != "one cycle after":
        scale_learning_rates(optimizer, model.infos(), "u-mup")
    for _ in range(5):
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        for item in model.parameters():
            item.grad = torch.zeros_like(item)
        share = float(optimizer.param_groups[0]["lr"]) / 0.5
        optimizer.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.detach(), before[name] * (1 - 0.125 * share))
        if scheduler is not None:
            scheduler.step()


def test_zero_learning_rate_gives_no_nan() -> None:
    model = Stored((0.1, 0.2), 0.13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    scale_learning_rates(optimizer, model.infos(), "u-mup")
    step(model, optimizer)
    assert_same_bits(dict(model.state_dict()), dict(before))


def test_fused_optimizers_unscale_with_grad_scaler() -> None:
    def run(scale: float) -> dict[str, Tensor]:
        model = Stored((0.25, 0.5), 0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scale_learning_rates(optimizer, model.infos(), "match")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for x, y in batches(5):
            optimizer.zero_grad()
            scaler.scale(model.loss(x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert not hasattr(optimizer, "found_inf")
        return model.effective()

    assert_same_bits(run(1.0), run(1024.0))


@pytest.mark.slow
def test_compiled_step_uses_scaled_rates() -> None:
    def run(by_hand: bool) -> dict[str, Tensor]:
        model = Stored((0.25, 0.5), 0.5)
        groups = [
            {"params": [value], "weight_decay": 0.5 / factor if by_hand else 0.5}
            for value, factor in ((model.first, 4), (model.second, 2), (model.bias, 2))
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        if not by_hand:
            scale_learning_rates(optimizer, model.infos(), "match")
        compiled = torch.compile(optimizer.step, backend="eager")
        for index, (x, y) in enumerate(batches(4)):
            for group, factor in zip(optimizer.param_groups, (4, 2, 2), strict=True):
                group["lr"] = 2.0 ** -(6 + index) * (factor if by_hand else 1)
            optimizer.zero_grad()
            model.loss(x, y).backward()
            compiled()
        return {name: value.detach() for name, value in model.effective().items()}

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("foreach", [False, True])
def test_tensor_learning_rate_is_read_in_every_step(foreach: bool) -> None:
    model = Stored((0.25, 0.25), 0.5)
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, foreach=foreach)
    scale_learning_rates(optimizer, model.infos(), "match")
    for value in (0.5, 0.25):
        rate.fill_(value)
        before = model.second.detach().clone()
        step(model, optimizer, closure=False)
        expected = before - value * 8**-0.5 * model.second.grad
        torch.testing.assert_close(model.second.detach(), expected)
    assert optimizer.param_groups[0]["lr"] is rate
