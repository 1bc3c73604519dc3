"""Code that checks for a package that is not installed is captured."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import ConfusionMatrix, F1Score, Metric
from torchmetrics.utilities import imports

from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.rules.transform import unit_scale
from lightning_unitscale.transforms import remat
from tests.helpers import IS_TORCH_2_11, assert_same_bits, captured_copy, run

X, LABELS = torch.randn(9, 4), torch.arange(9) % 3


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        try:
            importlib.metadata.version("no_such_package")
            x = x * 3
        except importlib.metadata.PackageNotFoundError as error:
            assert error.args == ("no_such_package",)
            x = x * 2
        return self.linear(x).square().sum()


@pytest.mark.skipif(IS_TORCH_2_11, reason="Dynamo of torch 2.11 traces the search, which breaks")
def test_check_for_missing_package_is_captured() -> None:
    module = Looks()
    tracked = captured_copy(module)
    assert_same_bits(run(tracked, X), run(module, X))
    assert "No graph breaks" in tracked.explain()  # type: ignore[operator]


class Counts(nn.Module):
    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.metric = metric

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        self.metric.update(scores, LABELS)
        return nn.functional.cross_entropy(scores, LABELS)


METRICS: dict[str, Callable[[], Metric]] = {
    "f1": lambda: F1Score(task="multiclass", num_classes=3, average="macro"),
    "confusion": lambda: ConfusionMatrix(task="multiclass", num_classes=3),
}


@pytest.fixture(autouse=True)
def _not_asked_yet() -> None:
    # torchmetrics remembers the answer.
    vars(imports._XLA_AVAILABLE).pop("available", None)


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", METRICS)
def test_classification_metrics_match_plain_module(name: str) -> None:
    plain = Counts(METRICS[name]())
    planned = remat(copy.deepcopy(plain), "min_cut")
    vars(imports._XLA_AVAILABLE).pop("available", None)
    assert_same_bits(run(planned, X), run(plain, X))
    assert torch.equal(planned.metric.compute(), plain.metric.compute())  # type: ignore[operator, union-attr]
    steps = steps_of(planned)
    assert steps is not None and steps.steps["forward"].graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_updated_under_rules(name: str) -> None:
    scaled = unit_scale(Counts(METRICS[name]()))
    scaled(X).backward()
    assert scaled.metric.update_called
