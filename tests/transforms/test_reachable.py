"""What a step can get hold of, and putting it back."""

from __future__ import annotations

import itertools
import queue
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.transforms.reachable import find_once_only, reachable, state_of
from lightning_unitscale.transforms.restoring import restoring

COUNTS: list[int] = []
NUMBER = 0
UNTOUCHED: dict[str, int] = {"a": 1}


class Color(Enum):
    """Not to be looked into."""

    RED = 1


class Buffer:
    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self.count = 0
        self.itself = self

    def add(self, value: Tensor) -> None:
        self.items.append(value)
        self.count += 1
        self.late = True


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0


class SlottedToo(Slotted):
    """With attributes of its own beside the slots of its base."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [0]


@dataclass(frozen=True)
class Frozen:
    rows: list[int]
    number: int = 0


class Forever:
    """An iterator whose state is Python's own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        return self.at


def _count_globally() -> None:
    global NUMBER
    NUMBER += 1
    COUNTS.append(NUMBER)


class Keeping(nn.Module):
    """Keeps its state where no module does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.buffer = {"deep": [Buffer()]}
        self.slotted = Slotted()
        self.slotted_too = SlottedToo()
        self.frozen = Frozen([0])
        self.space = SimpleNamespace(count=0)
        self.forever = Forever()
        self.hidden = [nn.BatchNorm1d(2)]
        self.color = Color.RED

    def forward(self, x: Tensor) -> Tensor:
        self.buffer["deep"][0].add(x)
        self.slotted.count += 1
        self.slotted.late = 1
        self.slotted_too.count += 1
        self.slotted_too.more.append(1)
        self.frozen.rows.append(1)
        object.__setattr__(self.frozen, "number", 1)
        self.space.count += next(self.forever)
        del self.color
        _count_globally()
        UNTOUCHED.get("a")
        return self.layer(self.hidden[0](x))


def _state(module: Keeping) -> list[Any]:
    buffer = module.buffer["deep"][0]
    return [
        sorted(vars(buffer)),
        len(buffer.items),
        buffer.count,
        module.slotted.count,
        hasattr(module.slotted, "late"),
        module.slotted_too.count,
        module.slotted_too.more,
        module.frozen.rows,
        module.frozen.number,
        module.space.count,
        module.forever.at,
        module.hidden[0].running_mean.tolist(),
        int(module.hidden[0].num_batches_tracked),
        module.color,
        list(COUNTS),
        NUMBER,
    ]


def test_objects_of_own_classes_globals_and_hidden_modules_are_put_back() -> None:
    module = Keeping()
    before = str(_state(module))
    kept = [module.buffer["deep"][0], module.frozen.rows, module.hidden[0], COUNTS]
    with restoring(module):
        module(torch.randn(3, 2))
        assert NUMBER == len(COUNTS) == 1
    assert str(_state(module)) == before
    after = [module.buffer["deep"][0], module.frozen.rows, module.hidden[0], COUNTS]
    assert all(one is other for one, other in zip(after, kept, strict=True))


def test_free_variables_are_put_back() -> None:
    state = {"n": 0}

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            state["n"] += 1
            return x

    module = Counting()
    with restoring(module):
        module(torch.ones(1))
        assert state == {"n": 1}
    assert state == {"n": 0}


def test_what_has_not_changed_is_not_written_to() -> None:
    class Guarded(dict):  # type: ignore[type-arg]
        def clear(self) -> None:
            raise AssertionError("cleared")

    module = nn.Linear(2, 2)
    module.table = Guarded(a=1)
    with restoring(module):
        pass
    assert module.table == {"a": 1}


def test_frameworks_and_the_standard_library_are_not_looked_into() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for one in (optimizer, Color.RED, types, print, queue.Queue(), torch.ones(1), 3, "a", Buffer):
        assert state_of(one) is None
    assert state_of(SimpleNamespace(a=1)) == {"a": 1}
    slotted = Slotted()
    assert state_of(slotted) == {"count": 0}


def test_everything_is_met_once() -> None:
    module = Keeping()
    met = [id(value) for _, value in reachable(module)]
    assert len(set(met)) == len(met)
    assert id(module.hidden[0].running_mean) in met
    assert id(module.layer.weight) not in met
    assert id(COUNTS) in met
    # Not those of torch's own code.
    assert id(nn.Linear.__init__.__globals__["math"]) not in met


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (iter([1]), "it (list_iterator)"),
        ((one for one in [1]), "it (generator)"),
        (itertools.cycle([1]), "it (cycle)"),
        ({"a": [zip([1])]}, "it.a.0 (zip)"),
        (queue.Queue(), "it (Queue)"),
        (SimpleNamespace(rows=map(str, [1])), "it.rows (map)"),
        (iter(torch.utils.data.DataLoader([1])), "it (_SingleProcessDataLoaderIter)"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_can_be_read_once_only_is_found(value: object, named: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert find_once_only(module) is None
    module[0].it = value
    assert find_once_only(module) == f"0.{named}"


def test_an_iterator_of_an_own_class_and_a_file_are_not_among_them(tmp_path: Any) -> None:
    module = Keeping()
    with (tmp_path / "log.txt").open("w") as file:
        module.file = file
        assert find_once_only(module) is None
