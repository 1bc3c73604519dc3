"""An optimizer with one rate per parameter keeps the user's parameter groups."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.rules.scaled_step import ScaledStep, scale_learning_rates
from tests.helpers import assert_same_bits
from tests.rules.stored import TINY, Stored, batches, step, train


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


def snapshot(optimizer: Optimizer) -> tuple[Any, ...]:
    groups = optimizer.param_groups
    return id(groups), [
        (id(group), {**group, "params": [id(value) for value in group["params"]]})
        for group in groups
    ]


def test_parameters_with_equal_factor_share_group() -> None:
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
def test_step_restores_param_groups(with_closure: bool) -> None:
    model, optimizer, _ = recorded()
    before = snapshot(optimizer)
    for _ in range(2):
        step(model, optimizer, with_closure)
    assert snapshot(optimizer) == before
    assert len(optimizer.seen) == 2


def test_closure_sees_and_changes_user_groups() -> None:
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


def test_error_in_step_restores_param_groups() -> None:
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


def test_group_values_written_by_step_are_kept() -> None:
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


class Counting(torch.optim.AdamW):
    """Writes into its groups before it runs the closure, and frees something when deleted."""

    freed = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)

    def __del__(self) -> None:
        Counting.freed += 1


@pytest.mark.parametrize("with_closure", [False, True])
def test_group_values_written_before_closure_are_kept(with_closure: bool) -> None:
    model = Stored((0.25, 0.25), 0.5)
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    optimizer = Counting(model.parameters())
    scale_learning_rates(optimizer, model.infos(), "match")
    for _ in range(3):
        step(model, optimizer, with_closure)
    assert optimizer.param_groups[0]["k"] == 3


def test_removal_does_not_free_optimizer_resources() -> None:
    model = Stored((0.25, 0.25), 0.5)
    optimizer = Counting(model.parameters())
    before = Counting.freed
    scale_learning_rates(optimizer, model.infos(), "match").remove()
    gc.collect()
    assert Counting.freed == before
    del optimizer
    gc.collect()
    assert Counting.freed == before + 1


def test_group_values_that_depend_on_rate_are_an_error() -> None:
    def write(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["largest_lr"] = group["lr"]

    model, optimizer, _ = recorded(during=write)
    with pytest.raises(RuntimeError, match="its step writes 'largest_lr'"):
        step(model, optimizer)


def test_attributes_written_by_step_are_kept() -> None:
    def write(optimizer: Any) -> None:
        optimizer.mode = "trained"

    model, optimizer, _ = recorded(during=write)
    step(model, optimizer)
    assert optimizer.mode == "trained"
    assert type(optimizer) is Recording


def test_state_dict_matches_plain_optimizer() -> None:
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


def test_restored_optimizer_continues_identically() -> None:
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


def test_second_attachment_replaces_first() -> None:
    model, optimizer, first = recorded()
    second = scale_learning_rates(optimizer, model.infos(), "u-mup")
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    step(model, optimizer)
    assert [group["lr_scale"] for group in optimizer.seen[-1]] == [6**-0.5, 8**-0.5]
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


def test_unknown_parameters_keep_their_rates() -> None:
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
    scale_learning_rates(unrelated, infos, "match")
    with pytest.raises(ValueError, match="LBFGS"):
        scale_learning_rates(torch.optim.LBFGS([model.first]), infos, "match")


def test_added_param_group_is_scaled_and_checked() -> None:
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
