"""An optimizer with a rate for each parameter, and groups that stay the user's."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_unitscale.transforms.parameter_info import ParameterInfo, Role
from lightning_unitscale.transforms.scaled_step import ScaledStep, scale_learning_rates
from tests.helpers import assert_same_bits

TINY = 1e-60


class Stored(nn.Module):
    """Two layers that store ``W / sigma`` and ``b / s``, and compute with ``W`` and ``b``."""

    def __init__(self, sigmas: tuple[float, float], s: float, bias: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3

        self.scales = {"first": sigmas[0], "second": sigmas[1], "bias": s}
        self.first = nn.Parameter(drawn(8, 6) / sigmas[0])
        self.second = nn.Parameter(drawn(2, 8) / sigmas[1])
        self.bias = nn.Parameter(drawn(8) / s) if bias else None

    def effective(self) -> dict[str, Tensor]:
        return {name: one * self.scales[name] for name, one in self.named_parameters()}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        effective = self.effective()
        hidden = F.gelu(F.linear(x, effective["first"], effective.get("bias")))
        return F.mse_loss(F.linear(hidden, effective["second"]), y)

    def infos(self) -> dict[Tensor, ParameterInfo]:
        return {
            one: ParameterInfo(
                name,
                Role.BIAS if name == "bias" else Role.HIDDEN,
                fan_in=one.shape[-1],
                fan_out=one.shape[0],
                model_width=8,
                sigma=1.0 if name == "bias" else self.scales[name],
                output_scale=self.scales["bias"],
            )
            for name, one in self.named_parameters()
        }


def batches(number: int = 20) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    for _ in range(number):
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        yield x, x[:, :2].tanh()


def train(model: Stored, optimizer: Optimizer, with_closure: bool = False) -> dict[str, Tensor]:
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = model.loss(x, y)
            loss.backward()
            return loss

        if with_closure:
            assert optimizer.step(closure) is not None
        else:
            closure()
            optimizer.step()
    return {name: one.detach() for name, one in model.effective().items()}


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
    for name, one in expected.items():
        assert (one - untouched[name]).abs().max() > 0.01
        error = (got[name] - one).abs().max() / one.abs().max()
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
@pytest.mark.parametrize("with_closure", [False, True])
def test_match_is_exact(name: str, with_closure: bool) -> None:
    assert_matches(MATCHED[name], with_closure=with_closure)


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for one in group["params"]:
                momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.sub_(momentum.lerp(one.grad, 0.1).sign(), alpha=group["lr"])
                momentum.lerp_(one.grad, 0.01)
        return loss


def test_match_is_exact_with_a_sign() -> None:
    assert_matches(lambda p: Lion(p, lr=1e-3, weight_decay=0.5))


def test_match_is_exact_with_radam_once_it_is_normalized() -> None:
    def make(parameters: Any) -> Optimizer:
        """Its first five steps, which are not normalized, have rate 0."""
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


def test_sgd_gets_the_rates_of_u_mup() -> None:
    for options in ({}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}):
        stored = Stored((0.1, 0.2), 0.13)
        by_hand = copy.deepcopy(stored)
        optimizer = torch.optim.SGD(stored.parameters(), lr=0.1, weight_decay=0.01, **options)
        handle = scale_learning_rates(optimizer, stored.infos(), "match")
        assert "rates of u-muP" in handle.notes[0]
        groups = [
            {"params": [by_hand.first], "lr": 0.1 * 6**-0.5, "weight_decay": 0.01 * (1 / 6**-0.5)},
            {"params": [by_hand.second], "lr": 0.1 * 8**-0.5, "weight_decay": 0.01 * (1 / 8**-0.5)},
            {"params": [by_hand.bias]},
        ]
        other = torch.optim.SGD(groups, lr=0.1, weight_decay=0.01, **options)
        assert_same_bits(train(stored, optimizer), train(by_hand, other))


# --- the groups stay the user's ---------------------------------------------------------------


class Recording(torch.optim.AdamW):
    """Notes the groups of every step, and may do what a test asks for within it."""

    def __init__(self, params: Any, during: Callable[[Any], None] = lambda _: None, **kw: Any):
        super().__init__(params, lr=0.01, **kw)
        self.during = during
        self.seen: list[list[dict[str, Any]]] = []

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.seen.append([dict(group) for group in self.param_groups])
        self.during(self)
        return result


def recorded(**options: Any) -> tuple[Stored, Recording, ScaledStep]:
    model = Stored((0.25, 0.25), 0.5)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from here on its own step has hooks
    optimizer = Recording(model.named_parameters(), weight_decay=0.1, **options)
    return model, optimizer, scale_learning_rates(optimizer, model.infos(), "match")


def step(model: Stored, optimizer: Optimizer, closure: bool = True) -> None:
    x, y = next(batches())

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(x, y)
        loss.backward()
        return loss

    if closure:
        optimizer.step(run)
    else:
        run()
        optimizer.step()


def snapshot(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = optimizer.param_groups
    return id(groups), [
        (id(group), {**group, "params": [id(one) for one in group["params"]]}) for group in groups
    ]


def test_parameters_of_equal_factor_share_a_group_in_their_order() -> None:
    model, optimizer, _ = recorded()
    step(model, optimizer)
    (groups,) = optimizer.seen
    assert [group["param_names"] for group in groups] == [["first", "second"], ["bias"]]
    assert [group["lr_scale"] for group in groups] == [4.0, 2.0]
    assert [group["lr"] for group in groups] == [0.04, 0.02]
    assert [group["weight_decay"] for group in groups] == [0.025, 0.05]
    assert groups[0]["params"][1] is model.second
    assert all(group["betas"] == (0.9, 0.999) for group in groups)


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_leaves_the_groups_alone(with_closure: bool) -> None:
    model, optimizer, _ = recorded()
    before = snapshot(optimizer)
    for _ in range(2):
        step(model, optimizer, with_closure)
    assert snapshot(optimizer) == before
    assert len(optimizer.seen) == 2


def test_the_closure_sees_the_groups_and_what_it_sets_counts() -> None:
    model, optimizer, _ = recorded()
    extra = nn.Parameter(torch.ones(3))
    groups = optimizer.param_groups

    def closure() -> Tensor:
        assert optimizer.param_groups is groups
        assert "lr_scale" not in groups[0]
        groups[0]["lr"] = 1.0
        optimizer.add_param_group({"params": [("extra", extra)]})
        loss = model.loss(*next(batches())) + extra.sum()
        loss.backward()
        return loss

    for form in ({"closure": closure}, {}):
        optimizer.seen.clear()
        del groups[1:]
        assert optimizer.step(**form) if form else optimizer.step(closure)
        assert [group["lr"] for group in optimizer.seen[0]] == [4.0, 2.0, 0.01]
        assert optimizer.seen[0][2] == groups[1]


def test_an_error_in_a_step_leaves_the_groups_alone() -> None:
    def fail(_: Any) -> None:
        raise KeyError("no")

    model, optimizer, _ = recorded(during=fail)
    before = snapshot(optimizer)
    with pytest.raises(KeyError, match="no"):
        step(model, optimizer)
    assert snapshot(optimizer) == before
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert snapshot(optimizer) == before
    optimizer.during = lambda _: None
    step(model, optimizer)
    assert [group["lr"] for group in optimizer.seen[-1]] == [0.04, 0.02]
    assert snapshot(optimizer) == before


def test_what_the_optimizer_writes_into_its_groups_is_kept() -> None:
    def write(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["average"] = torch.tensor(0.5)

    model, optimizer, _ = recorded(during=write)
    for _ in range(3):
        step(model, optimizer)
    (group,) = optimizer.param_groups
    assert group["k"] == 3
    assert group["average"] == 0.5
    assert "lr_scale" not in group


def test_what_differs_between_the_parts_of_a_group_is_refused() -> None:
    def write(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["largest_lr"] = group["lr"]

    model, optimizer, _ = recorded(during=write)
    with pytest.raises(RuntimeError, match="its step writes 'largest_lr'"):
        step(model, optimizer)


def test_what_the_optimizer_writes_onto_itself_is_kept() -> None:
    def write(optimizer: Any) -> None:
        optimizer.mode = "trained"

    model, optimizer, _ = recorded(during=write)
    step(model, optimizer)
    assert optimizer.mode == "trained"
    assert type(optimizer) is Recording


def test_state_dicts_are_those_of_the_optimizer_without_it() -> None:
    def make() -> tuple[Stored, Optimizer]:
        model = Stored((1.0, 1.0), 1.0)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, plain = make()
    train(model, plain)
    other, scaled = make()
    scale_learning_rates(scaled, other.infos(), "match")  # all factors are 1
    train(other, scaled)
    assert_same_bits(scaled.state_dict(), plain.state_dict())

    model, optimizer, _ = recorded()
    step(model, optimizer)
    assert optimizer.state_dict()["param_groups"][0].keys() == (
        plain.state_dict()["param_groups"][0].keys() | {"param_names"}
    )


def test_a_restored_optimizer_goes_on_as_the_one_that_was_saved() -> None:
    def make(weights: dict[str, Tensor] | None = None) -> tuple[Stored, Optimizer]:
        model = Stored((0.1, 0.2), 0.13)
        model.load_state_dict(weights or model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scale_learning_rates(optimizer, model.infos(), "match")
        return model, optimizer

    model, optimizer = make()
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, resumed = make(saved[0])
    resumed.load_state_dict(saved[1])
    assert_same_bits(train(model, optimizer), train(other, resumed))
    assert_same_bits(optimizer.state_dict(), resumed.state_dict())


def test_copies_are_plain_optimizers() -> None:
    model, optimizer, handle = recorded()
    step(model, optimizer)
    plain = torch.optim.AdamW([model.first], lr=0.01)
    step(model, plain)
    scale_learning_rates(plain, model.infos(), "match")
    for copied in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert_same_bits(copied.state_dict(), plain.state_dict())
        assert type(copied) is torch.optim.AdamW
        copied.step()
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.01
    handle.remove()


def test_attaching_again_replaces_and_removing_ends() -> None:
    model, optimizer, first = recorded()
    second = scale_learning_rates(optimizer, model.infos(), "u-mup")
    step(model, optimizer)
    assert [group["lr_scale"] for group in optimizer.seen[-1]] == [6**-0.5, 8**-0.5, 1.0]
    first.remove()
    step(model, optimizer)
    assert "lr_scale" in optimizer.seen[-1][0]
    with pytest.raises(ValueError, match="no-such"):
        scale_learning_rates(optimizer, model.infos(), "no-such")  # type: ignore[arg-type]
    second.remove()
    second.remove()
    step(model, optimizer)
    assert optimizer.seen[-1] == optimizer.param_groups
    third = scale_learning_rates(optimizer, model.infos(), "match")
    step(model, optimizer)
    assert len(optimizer.seen[-1]) == 2
    third.remove()
    fresh = Recording(model.parameters())
    assert vars(optimizer).keys() == vars(fresh).keys()


def test_parameters_without_info_and_optimizers_without_parameters_stay() -> None:
    model, optimizer, _ = recorded()
    infos = {model.first: model.infos()[model.first]}
    scale_learning_rates(optimizer, infos, "u-mup")
    step(model, optimizer)
    known, others = optimizer.seen[-1]
    assert known["param_names"] == ["first"]
    assert others["param_names"] == ["second", "bias"]
    assert (others["lr"], others["weight_decay"]) == (0.01, 0.1)
    # Refused where it has something to scale, left alone where it has not.
    unrelated = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    assert scale_learning_rates(unrelated, infos, "match").notes == []
    with pytest.raises(ValueError, match="LBFGS"):
        scale_learning_rates(torch.optim.LBFGS([model.first]), infos, "match")


def test_a_group_added_later_is_scaled_and_checked() -> None:
    model = Stored((0.25, 0.25), 0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.01, eps=TINY)
    scale_learning_rates(optimizer, model.infos(), "match")
    optimizer.add_param_group({"params": [model.first, model.second], "lr": 0.5})
    before = model.first.detach().clone()
    step(model, optimizer)
    moved = (model.first - before).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 2.0))
    optimizer.add_param_group({"params": [model.bias], "weight_decay": 0.1})
    with pytest.raises(ValueError, match="decoupled"):
        step(model, optimizer)


# --- schedules, decay, scalers ----------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
def test_schedulers_see_their_own_rates_and_do_not_warn(after: bool) -> None:
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


@pytest.mark.parametrize("kind", ["none", "lambda", "one cycle", "tensor rate"])
def test_independent_decay_is_a_share_of_the_schedule(kind: str) -> None:
    """Each step shrinks a weight by ``weight_decay * lr / peak``, whatever its rate."""
    model = Stored((1.0, 1.0), 1.0)
    peak: Any = torch.tensor(0.5, dtype=torch.float64) if kind == "tensor rate" else 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.125)
    scheduler: Any = None
    if kind == "one cycle":
        scheduler = OneCycleLR(optimizer, max_lr=0.5, total_steps=8, cycle_momentum=False)
    elif kind != "none":
        scheduler = LambdaLR(optimizer, lambda step: step / 4)  # the first step has rate 0
    scale_learning_rates(optimizer, model.infos(), "u-mup")
    for _ in range(5):
        before = {name: one.detach().clone() for name, one in model.named_parameters()}
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        share = float(optimizer.param_groups[0]["lr"]) / 0.5
        optimizer.step()
        for name, one in model.named_parameters():
            torch.testing.assert_close(one.detach(), before[name] * (1 - 0.125 * share))
        if scheduler is not None:
            scheduler.step()


def test_a_rate_of_zero_makes_no_nan() -> None:
    model = Stored((0.1, 0.2), 0.13)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    scale_learning_rates(optimizer, model.infos(), "u-mup")
    step(model, optimizer)
    assert_same_bits(dict(model.state_dict()), dict(before))


def test_fused_optimizers_unscale_by_the_gradient_scaler() -> None:
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


def test_a_compiled_step_reads_the_rates_too() -> None:
    def run(by_hand: bool) -> dict[str, Tensor]:
        model = Stored((0.25, 0.5), 0.5)
        groups = [
            {"params": [one], "weight_decay": 0.5 / factor if by_hand else 0.5}
            for one, factor in ((model.first, 4), (model.second, 2), (model.bias, 2))
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
        return {name: one.detach() for name, one in model.effective().items()}

    torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_capturable_rate_is_read_anew_in_every_step(foreach: bool) -> None:
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
