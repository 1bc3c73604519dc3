"""A graph break is reported in one line, with the line of the user's code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.capture.breaks import (
    graph_breaks_since,
    joined_reasons,
    num_graph_breaks,
    short_reason,
)
from lightning_unitscale.rules.transform import unit_scale
from tests.helpers import captured_copy

X = torch.randn(2, 3)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h * h.sum().item()  # the line
        return h.square().sum()


class Fails(nn.Module):
    """Runs, and fails on tensors without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return _real_only(self.linear(x)).sum()  # the line


def _real_only(h: Tensor) -> Tensor:
    assert not isinstance(h, torch._subclasses.FakeTensor), "numbers wanted"
    return h * 2


torch.compiler.allow_in_graph(_real_only)


def _line_of(kind: type) -> str:
    lines = Path(__file__).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"class {kind.__name__}"))
    return f"{__file__}:{next(i for i in range(start, 999) if '# the line' in lines[i]) + 1}"


def test_graph_break_reasons_since_mark() -> None:
    before = num_graph_breaks()

    def function(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch.compile(function, backend="eager")(torch.ones(2))
    (reason,) = graph_breaks_since(before)
    assert f"{__file__.rpartition('/')[2]}:" in reason
    assert graph_breaks_since(num_graph_breaks()) == []


def test_graph_break_is_reported_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    tracked = captured_copy(Breaks())
    tracked(X)
    report = tracked.explain()  # type: ignore[operator]
    (line,) = [one for one in report.splitlines() if "item" in one]
    assert line.endswith(f" at {_line_of(Breaks)}")
    assert len(line) < 200 + len(__file__)
    assert "Hint" not in report and "http" not in report
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_dynamo_error_under_rules_is_short_and_clear() -> None:
    scaled = unit_scale(Fails())
    with pytest.raises(RuntimeError, match=r"^Fails\.forward cannot be captured: ") as found:
        scaled(X)
    text = str(found.value)
    assert "numbers wanted" in text and _line_of(Fails) in text
    assert len(text) < 500 + len(__file__)
    assert found.value.__cause__ is None


def test_uncaptured_step_warns_once() -> None:
    module = Fails()
    tracked = captured_copy(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            assert torch.equal(tracked(X), module(X))
    ours = [str(one.message) for one in caught if "Dynamo fails" in str(one.message)]
    assert len(ours) == 1
    assert _line_of(Fails) in ours[0] and len(ours[0]) < 600


def test_break_reasons_are_shortened() -> None:
    text = "Some title\n  Explanation: Dynamo does not know `print`.\n  Hint: Do not.\n"
    assert short_reason(text) == "Dynamo does not know `print`"
    assert short_reason("Only a title") == "Only a title"
    assert len(short_reason("many words " * 100)) <= 160
    # Neither this package's objects nor addresses, which are other ones in each process.
    backend = "Explanation: Backend compiler `<GraphBackend object at 0x7f3f>` failed with {}"
    assert short_reason(backend.format("aten.nonzero.default. Adding a graph break.")) == (
        "Dynamo does not capture `aten.nonzero.default`"
    )
    assert short_reason(backend.format("an error. Adding a graph break.")) == (
        "Backend compiler `<GraphBackend object>` failed with an error. Adding a graph break"
    )
    assert joined_reasons(["a", "b", "a", "c", "d", "e"]) == "a; b; c; and 2 more"


class SavesInside(nn.Module):
    def __init__(self, block: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.block = block
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.hooked(x).square().sum() * 2

    def hooked(self, x: Tensor) -> Tensor:
        with self.block():
            return self.inner(x)


def _hooks() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)


@pytest.mark.parametrize("block", [_hooks, torch.autograd.graph.save_on_cpu])
def test_block_with_saved_tensor_hooks_is_reported(block: Any) -> None:
    module = SavesInside(block)
    tracked = captured_copy(module)
    with pytest.warns(UserWarning, match="saves tensors in its own way") as caught:
        assert torch.equal(tracked(X), module(X))
        tracked(X)
    assert len(caught) == 1
    assert f"{__file__}:" in str(caught[0].message)


def test_saved_tensor_hooks_around_step_do_not_break_graph() -> None:
    module = SavesInside(nullcontext)
    tracked = captured_copy(module)
    with _hooks():
        assert torch.equal(tracked(X), module(X))
    assert "No graph breaks" in tracked.explain()  # type: ignore[operator]
