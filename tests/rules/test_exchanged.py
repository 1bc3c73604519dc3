"""A layer that replaces another one after the rules have decided gets factors of its own."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_unitscale.rules.exchanged import PlannedParameters
from lightning_unitscale.rules.plan import RulePlan
from lightning_unitscale.rules.transform import unit_scale
from tests.helpers import assert_same_bits, run

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.extra = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.extra(self.head(self.body(x))), torch.arange(6) % 4)


def new_head(net: Any) -> None:
    net.head = nn.Linear(16, 4)


def wider_head(net: Any) -> None:
    net.head = nn.Linear(16, 40)


def new_weight(net: Any) -> None:
    net.head.weight = nn.Parameter(torch.randn(4, 16) / 10)


def one_more_layer(net: Any) -> None:
    net.extra = nn.Linear(4, 7)


def moved_layers(net: Any) -> None:
    net.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *net.body)


CHANGES = [new_head, wider_head, new_weight, moved_layers]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_copied", [False, True])
def test_exchanged_layer_matches_initial_layer(
    change: Callable[[Any], None], is_copied: bool
) -> None:
    late, early = Net(), Net()
    for net, make in ((early, change), (late, lambda net: None)):
        torch.manual_seed(2)
        make(net)
    late_scaled: Any = unit_scale(late)
    run(late_scaled, X)
    late_scaled.zero_grad()
    if is_copied:
        late_scaled = copy.deepcopy(late_scaled)
    torch.manual_seed(2)
    change(late_scaled)
    if change is new_weight:  # the old bias was learned
        early.head.bias.data.zero_()
    # Gradients differ by the powers of two that bring them to RMS 1.
    assert_same_bits(late_scaled(X), unit_scale(early)(X))


def test_added_layer_is_set_to_unit_scale() -> None:
    scaled: Any = unit_scale(Net())
    run(scaled, X)
    decided = scaled.head.weight.detach().clone()
    one_more_layer(scaled)
    run(scaled, X)
    assert rms(scaled.extra.weight) == pytest.approx(1, rel=0.02)
    assert not scaled.extra.bias.any()
    assert_same_bits(scaled.head.weight.detach(), decided)
    assert re.search(r"extra\S* +linear +rule", str(scaled.explain()))


def rms(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt())


def test_copy_of_old_weight_is_not_rescaled() -> None:
    scaled: Any = unit_scale(Net())
    before = run(scaled, X)
    scaled.zero_grad()
    scaled.head = copy.deepcopy(scaled.head)
    weight = scaled.head.weight.detach().clone()
    after = run(scaled, X)
    assert_same_bits(scaled.head.weight.detach(), weight)
    assert_same_bits(after, before)


def test_swapped_layers_are_not_replanned(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: Any = unit_scale(Net())
    run(scaled, X)
    head, other = scaled.head, nn.Linear(16, 4)
    scaled.head = other
    run(scaled, X)
    weights = [one.weight.detach().clone() for one in (head, other)]
    monkeypatch.setattr("lightning_unitscale.rules.transform.plan_step", None)
    for one in (head, other, head):
        scaled.head = one
        run(scaled, X)
    assert_same_bits([one.weight.detach() for one in (head, other)], weights)


def test_record_is_pickled_with_module() -> None:
    record, net, file = PlannedParameters(), Net(), io.BytesIO()
    scaled: Any = unit_scale(net)
    run(scaled, X)
    plan = vars(scaled)["_captured_steps"].passes[0].plan
    record.record(net, plan)
    torch.save((net, record), file)
    file.seek(0)
    net, record = torch.load(file, weights_only=False)
    assert record.find_exchanged(net, plan) == []
    new_head(net)
    assert record.find_exchanged(net, plan) == ["head.weight", "head.bias"]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_traced_layer_is_recognized() -> None:
    net = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Linear(4, 4), torch.ones(2, 4)))
    record, plan = PlannedParameters(), RulePlan()
    assert record.find_exchanged(net, plan) == record.find_exchanged(net, plan) == []
    net[0] = nn.Linear(4, 4)
    assert record.find_exchanged(net, plan) == ["0.weight", "0.bias"]
