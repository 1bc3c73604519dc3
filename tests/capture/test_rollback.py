"""The changes of a rehearsed step are undone."""

from __future__ import annotations

import itertools
import queue
import random
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from lightning_unitscale.capture.rollback import find_once_only, restoring, undoers
from tests.helpers import assert_same_bits


class Restless(nn.Module):
    """Changes everything that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("late", None)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.history = [1]
        self.table = {"a": [1]}
        self.seen = {1}
        self.recent = deque([1], maxlen=3)
        self.counter = Counter("aa")
        self.plain = torch.zeros(2)
        with torch.inference_mode():
            self.inferred = torch.zeros(2)
        self.number = 0
        self.child = nn.Linear(4, 4)
        self.child.note = "old"
        self.child.weight.calls = 1  # as libraries of per-sample gradients count
        self.teacher = nn.Linear(4, 4)
        self.array = np.zeros(2)
        self.generators = [torch.Generator(), np.random.default_rng(1), np.random.RandomState(1)]
        self.draws = random.Random(1)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1  # a new tensor under the old name
        self.hidden.add_(1)
        self.late = torch.ones(3)
        self.history.append(2)
        self.table["b"] = 2
        self.table["a"].append(2)
        self.seen.add(2)
        self.recent.append(2)
        self.counter["a"] += 1
        self.plain += 1
        with torch.inference_mode():
            self.inferred += 1
        self.number += 1
        self.child.note = "new"
        self.child.weight.calls += 1
        self.child.bias.sizes = [5]
        self.extra = "made in the step"
        self.train(False)
        with torch.no_grad():
            self.child.weight.mul_(2)
            self.teacher.weight.data = self.teacher.weight.data * 2
        self.array += 1
        torch.rand(1, generator=self.generators[0])
        self.generators[1].random(), self.generators[2].rand(), self.draws.random()
        random.random(), np.random.rand(), torch.rand(1)
        return self.child(self.norm(x)).sum()


def _state(module: Restless) -> dict[str, object]:
    return {
        "buffers": {name: one.clone() for name, one in module.named_buffers()},
        "history": list(module.history),
        "table": {key: str(value) for key, value in module.table.items()},
        "seen": sorted(module.seen),
        "recent": list(module.recent),
        "counter": dict(module.counter),
        "plain": module.plain.clone(),
        "inferred": module.inferred.tolist(),
        "number": module.number,
        "note": module.child.note,
        "of parameters": [sorted(vars(one).items()) for one in module.parameters()],
        "extra": hasattr(module, "extra"),
        "modes": [one.training for one in module.modules()],
        "weights": {name: one.detach().clone() for name, one in module.named_parameters()},
        "array": module.array.tolist(),
        "generator": module.generators[0].get_state(),
        "generators": str(module.generators[1].bit_generator.state),
        "old generator": str(module.generators[2].get_state()),
        "draws": module.draws.getstate(),
        "torch": torch.get_rng_state(),
        "python": str(random.getstate()),
        "numpy": str(np.random.get_state()),
        "grads": [None if one.grad is None else one.grad.clone() for one in module.parameters()],
    }


@pytest.mark.parametrize("raises", [False, True])
def test_restoring_undoes_changes_of_step(raises: bool) -> None:
    module = Restless()
    kept = {name: getattr(module, name) for name in ("history", "table", "seen", "recent", "plain")}
    storages = [one.data_ptr() for one in module.parameters()]
    buffers = dict(module.named_buffers())
    next(module.parameters()).grad = torch.ones(4)
    before = _state(module)
    try:
        with restoring(module):
            module(torch.randn(5, 4)).backward()  # adds to the gradient that was there
            if raises:
                raise KeyError("in the rehearsal")
    except KeyError:
        assert raises
    assert_same_bits(_state(module), before)
    # The objects themselves are the old ones: others may hold them too.
    assert all(getattr(module, name) is one for name, one in kept.items())
    assert all(dict(module.named_buffers())[name] is one for name, one in buffers.items())
    assert [one.data_ptr() for one in module.parameters()] == storages


def test_restoring_keeps_type_of_parameters() -> None:
    module = nn.Linear(2, 2)
    with restoring(module), torch.no_grad():
        assert module.weight.grad is None
    assert set(dict(module.named_parameters())) == {"weight", "bias"}


def test_restoring_ignores_lazy_and_meta_parameters() -> None:
    module = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    with restoring(module):
        module[0](torch.ones(1, 3))
        assert module[0].weight.shape == (2, 3)
    assert is_lazy(module[0].weight)


def test_restoring_does_not_write_unchanged_state() -> None:
    class Guarded(dict):  # type: ignore[type-arg]
        def clear(self) -> None:
            raise AssertionError("cleared")

    module = nn.Linear(2, 2)
    module.table = Guarded(a=1)
    with restoring(module):
        pass
    assert module.table == {"a": 1}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (iter([1]), "it (list_iterator)"),
        ((number for number in [1]), "it (generator)"),
        (itertools.cycle([1]), "it (cycle)"),
        ({"a": [zip([1])]}, "it.a.0 (zip)"),
        (queue.Queue(), "it (Queue)"),
        (iter(torch.utils.data.DataLoader([1])), "it (_SingleProcessDataLoaderIter)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_shot_iterators_are_found(value: object, named: str, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    with (tmp_path / "log.txt").open("w") as file:
        module[0].file = file
        assert find_once_only(module) is None
        module[0].it = value
        assert find_once_only(module) == f"0.{named}"


class Reparametrized(nn.Module):
    """Registers a parametrization in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not parametrize.is_parametrized(self.layer):
            parametrize.register_parametrization(self.layer, "weight", nn.Tanh(), unsafe=True)
        return self.layer(x)


@pytest.mark.parametrize("undo", ["restoring", "undoers"])
def test_parameters_moved_by_step_are_restored(undo: str) -> None:
    module, x = Reparametrized(), torch.randn(2, 4)
    weight, kind = module.layer.weight, type(module.layer)
    expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    if undo == "restoring":
        with restoring(module):
            module(x)
    else:
        restorers = list(undoers(module))
        module(x)
        assert "layer.parametrizations.weight.original" in dict(module.named_parameters())
        for restore in reversed(restorers):
            restore()
    assert module.layer.weight is weight and type(module.layer) is kind
    assert dict(module.layer.named_children()) == {}
    assert expected.keys() == dict(module.named_parameters()).keys()
    if undo == "restoring":
        assert_same_bits(expected, {name: p.detach() for name, p in module.named_parameters()})
