"""Metric objects that update on one rank are copied to the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

from lightning_unitscale.pipeline.rank_metrics import SharedMetrics


class Measured(nn.Module):
    """States of every kind: tensors, a list, and those that a group of metrics has in common."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.all, self.idle = MeanMetric(), CatMetric(), SumMetric()
        self.grouped = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])

    def count(self, logits: Tensor, target: Tensor) -> None:
        self.mean(logits.mean())
        self.all(logits[:, 0])
        self.grouped(logits, target)


def _results(module: Measured) -> list[Tensor]:
    found = [module.mean.compute(), module.all.compute(), *module.grouped.compute().values()]
    return [one.clone() for one in found]


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 3, generator=generator)
    return logits, torch.randint(3, (8,), generator=generator)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")
def test_metric_updates_are_copied_to_other_ranks() -> None:
    counting = Measured()
    waiting = copy.deepcopy(counting)
    for step in range(3):
        before = SharedMetrics(counting).states()
        counting.count(*_batch(step))
        changes = SharedMetrics(counting).changes(before)
        assert "idle" not in changes
        # Of a list only what is new is sent.
        assert [len(one) for one in changes["all"].values.values()] == [1]
        SharedMetrics(waiting).apply(changes)
        for found, expected in zip(_results(waiting), _results(counting), strict=True):
            assert torch.equal(found, expected)
    assert waiting.mean.update_count == 3


def test_emptied_list_state_is_sent_whole() -> None:
    counting = Measured()
    counting.count(*_batch(0))
    waiting = copy.deepcopy(counting)
    before = SharedMetrics(counting).states()
    counting.all.reset()
    for step in range(3):
        counting.count(*_batch(step))
    SharedMetrics(waiting).apply(SharedMetrics(counting).changes(before))
    assert torch.equal(waiting.all.compute(), counting.all.compute())


def test_updates_inside_unchanged_are_undone() -> None:
    module = Measured()
    module.count(*_batch(0))
    expected = _results(module)
    with SharedMetrics(module).unchanged():
        module.count(*_batch(1))
    for found, one in zip(_results(module), expected, strict=True):
        assert torch.equal(found, one)


def test_metric_is_logged_by_path() -> None:
    module = Measured()
    module.mean(torch.tensor(3.0))
    metrics = SharedMetrics(module)
    logged = metrics.loggable(module.mean)
    assert logged.path == "mean"
    metric = metrics.logged(logged._replace(value=torch.tensor(5.0)))
    assert metric is module.mean
    assert metric._forward_cache == 5.0
    stray: Metric = MulticlassAccuracy(3)
    with pytest.raises(RuntimeError, match="not a submodule"):
        metrics.loggable(stray)
