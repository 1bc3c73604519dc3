"""A step that appends to lists is captured once, and the lists get the right values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.side_effects import only_appended_to
from tests.helpers import assert_same_bits

NUM_CALLS = 5


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.outputs: Any = []
        self.others: Any = []

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.linear(batch)
        return out


class Appends(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        out = self(batch)
        loss = out.square().mean()
        self.outputs.append(loss.detach())
        self.others.extend(out.detach().argmax(-1).unbind())
        self.outputs.append((out.detach(), len(batch)))
        return loss

    def on_train_epoch_end(self) -> Tensor:
        """Reads the list, but outside the step."""
        return torch.stack([one for one in self.outputs if isinstance(one, Tensor)]).mean()


class ByHelpers(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.keep(self(batch).square().mean())

    def keep(self, loss: Tensor) -> Tensor:
        self.outputs.append(loss.detach())
        return _keep_in(self, loss)


def _keep_in(module: Base, loss: Tensor) -> Tensor:
    module.others.append(loss.detach())
    return loss


class ByBase(Appends):
    """``super()`` mentions the class, whose other methods may read the list."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = super().training_step(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_fit_end(self) -> int:
        return len(self.outputs)


class InForward(Base):
    def forward(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.sum())
        return super().forward(batch)

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


class Breaks(Base):
    """The list is given a number, by code between two graphs."""

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self(batch).square().mean()
        self.outputs.append(loss.item())
        return loss * 2


def _batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4) for _ in range(NUM_CALLS)]


def _captured(kind: type[Base]) -> tuple[Any, ModuleSteps]:
    torch.manual_seed(0)
    module = kind()
    steps = ModuleSteps(module, ("training_step",))
    steps.attach("test")
    return module, steps


def _plain(kind: type[Base]) -> Any:
    torch.manual_seed(0)
    module: Any = kind()
    for batch in _batches():
        module.training_step(batch)
    return module


class MentionsAny(Appends):
    """A class that refuses ``isinstance``."""

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(cast(Any, batch))


@pytest.mark.parametrize("kind", [Appends, ByHelpers, ByBase, InForward, MentionsAny])
def test_step_that_appends_is_captured_once(kind: type[Base]) -> None:
    module, steps = _captured(kind)
    for batch in _batches():
        module.training_step(batch)
    expected = _plain(kind)
    assert len(steps.steps["training_step"].graphs) == 1
    assert len(module.outputs) >= NUM_CALLS
    assert_same_bits(module.outputs, expected.outputs)
    assert_same_bits(module.others, expected.others)


def test_numbers_appended_between_graphs() -> None:
    module, steps = _captured(Breaks)
    for batch in _batches():
        module.training_step(batch)
    assert module.outputs == _plain(Breaks).outputs
    # One before the number and one after it, the second of which takes it as an input from the
    # second call on.
    assert len(steps.steps["training_step"].graphs) == 3


def test_list_replaced_between_steps() -> None:
    module, steps = _captured(Appends)
    for batch in _batches():
        module.outputs = before = []
        module.training_step(batch)
        assert module.outputs is before and len(before) == 2
    assert len(steps.steps["training_step"].graphs) == 1


def test_rehearsal_does_not_append() -> None:
    module, steps = _captured(Appends)
    module.outputs.append("before")
    steps.steps["training_step"].rehearse(lambda graph, inputs: graph.base(*inputs), _batches()[0])
    assert module.outputs == ["before"] and module.others == []


class Fails(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch)
        if batch.shape[0] == 3:
            raise KeyError("three")
        return self(batch).mean()


def test_lists_are_restored_after_error() -> None:
    module, _ = _captured(Fails)
    with pytest.raises(KeyError, match="three"):
        module.training_step(torch.ones(3, 4))
    assert module.outputs == []
    module.training_step(torch.ones(2, 4))
    assert len(module.outputs) == 1


# Code in the step that reads a list has to see its items.


class Length(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * len(self.outputs)


class Last(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * self.last

    @property
    def last(self) -> Tensor:
        last: Tensor = self.outputs[-1]
        return last


class ByName(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * len(getattr(self, "outputs"))  # noqa: B009


class ByFunction(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * _number(self)


def _number(module: Base) -> int:
    return len(module.outputs)


def _number_elsewhere(module: Base) -> int:
    return len(module.outputs)


# Of another package of the user's.
_number_elsewhere.__module__ = "somewhere.else"


class ByFunctionElsewhere(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * _number_elsewhere(self)


class Held:
    def number(self, module: Base) -> int:
        return len(module.outputs)


class ByHelper(Base):
    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * self.held.number(self)


class Inner(nn.Module):
    def __init__(self, outer: nn.Module) -> None:
        super().__init__()
        # In a list, so that it is no submodule.
        self.outer = [outer]

    def forward(self, out: Tensor) -> Tensor:
        outer: Any = self.outer[0]
        return out * len(outer.outputs)


class BySubmodule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(self)

    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        out: Tensor = self.inner(self(batch)).mean()
        return out


class InPlace(Base):
    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs += [batch.mean()]
        return self(batch).mean()


class Alias(Base):
    def __init__(self) -> None:
        super().__init__()
        self.same = self.outputs

    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        return self(batch).mean() * len(self.same)


class Bounded(Base):
    """Deques that keep their last two items, at either end."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = deque(maxlen=2)
        self.others = deque(maxlen=2)

    def training_step(self, batch: Tensor) -> Tensor:
        self.outputs.append(batch.mean())
        self.others.extendleft([batch.sum(), batch.min()])
        newest: Tensor = self.others[0]
        total: Tensor = sum(self.outputs, self(batch).mean())
        return total * newest * len(self.others)


@pytest.mark.slow_cases(3)
@pytest.mark.parametrize(
    "kind",
    [
        Bounded,
        Length,
        Last,
        ByName,
        ByFunction,
        ByFunctionElsewhere,
        ByHelper,
        BySubmodule,
        InPlace,
        Alias,
    ],
)
def test_step_that_reads_its_list_matches_plain_step(kind: type[Base]) -> None:
    module, _ = _captured(kind)
    found = [module.training_step(batch) for batch in _batches()]
    torch.manual_seed(0)
    plain: Any = kind()
    expected = [plain.training_step(batch) for batch in _batches()]
    assert_same_bits(found, expected)
    assert_same_bits(list(module.outputs), list(plain.outputs))
    assert_same_bits(list(module.others), list(plain.others))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Appends, {"outputs", "others"}),
        (ByHelpers, {"outputs", "others"}),
        (ByBase, {"outputs", "others"}),
        (InForward, {"outputs"}),
        (Base, set()),
        *((one, set()) for one in (Length, Last, ByName, ByFunction, ByFunctionElsewhere)),
        *((one, set()) for one in (ByHelper, BySubmodule, InPlace)),
    ],
)
def test_append_only_lists_are_detected(kind: type[Base], names: set[str]) -> None:
    module: Any = kind()
    step: Callable[..., Any] = getattr(module, "training_step", module.forward)
    assert only_appended_to(module, step, {"outputs", "others", "training"}) == names


def test_manual_optimization_has_no_append_only_lists() -> None:
    class Manual(Appends):
        automatic_optimization = False

    module = Manual()
    assert only_appended_to(module, module.training_step, {"outputs"}) == set()
