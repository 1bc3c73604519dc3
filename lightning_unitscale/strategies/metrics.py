"""Share the state of metric objects, of a step that runs on one rank, with all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection


class LoggedMetric(NamedTuple):
    """Stands for a metric object that a step logs; a tuple, so that its value is averaged.

    Attributes:
        path: Where the metric is in the module.
        value: What its last call returned, for one microbatch or, averaged, for all.
    """

    path: str
    value: Any


@dataclass(frozen=True)
class MetricState:
    """The state of a metric object, or how a step has changed it.

    Attributes:
        update_count: How often it was updated in all.
        values: Its states by name, tensors copied; of a list that only grew what was appended.
        appended: Names of those lists.
    """

    update_count: int
    values: Mapping[str, Tensor | list[Tensor]]
    appended: frozenset[str] = frozenset()


class SharedMetrics:
    """The metric objects of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def states(self) -> dict[str, MetricState]:
        """The states of all metric objects, by their paths."""
        return {path: _state(metric) for path, metric in self._metrics().items()}

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within this context metric objects count nothing that stays."""
        before = self.states()
        try:
            yield
        finally:
            for path, metric in self._metrics().items():
                if metric.update_count != before[path].update_count:
                    _set(metric, before[path].update_count, before[path].values)

    def changes(self, before: Mapping[str, MetricState]) -> dict[str, MetricState]:
        """How the metric objects have changed since ``before``, as tensors on the host."""
        return {
            path: _change(before[path], metric)
            for path, metric in self._metrics().items()
            if metric.update_count != before[path].update_count
        }

    def apply(self, changes: Mapping[str, MetricState]) -> None:
        """Change the metric objects of this rank in the same way."""
        metrics = self._metrics()
        for path, change in changes.items():
            metric = metrics[path]
            values: dict[str, Tensor | list[Tensor]] = {}
            for name, value in change.values.items():
                value = tree_map(lambda tensor, device=metric.device: tensor.to(device), value)
                before = getattr(metric, name)
                values[name] = [*before, *value] if name in change.appended else value
            _set(metric, change.update_count, values)

    def logged(self, metric: Metric) -> LoggedMetric:
        """The stand-in for a metric object that a step logs."""
        for path, submodule in self._module.named_modules():
            if submodule is metric:
                return LoggedMetric(path, metric._forward_cache)
        raise RuntimeError(
            f"{type(self._module).__name__}.training_step logs {metric!r}, which is no submodule; "
            "expected a metric that is an attribute of the module, so that every rank has it; "
            "make it in __init__."
        )

    def metric_of(self, logged: LoggedMetric) -> Metric:
        """The metric object that was logged, with the value of the whole batch."""
        metric = self._module.get_submodule(logged.path)
        assert isinstance(metric, Metric)
        metric._forward_cache = logged.value
        return metric

    def _metrics(self) -> dict[str, Metric]:
        metrics = {}
        for path, module in self._module.named_modules():
            if isinstance(module, MetricCollection):
                # Metrics of one compute group are updated once; this gives all of them the state.
                module.items(keep_base=True, copy_state=False)
            elif isinstance(module, Metric):
                metrics[path] = module
        return metrics


def _state(metric: Metric) -> MetricState:
    # A tensor may be added to in place; what a list has is not written into.
    values = {
        name: value.detach().clone() if isinstance(value, Tensor) else list(value)
        for name, value in metric.metric_state.items()
    }
    return MetricState(metric.update_count, values)


def _change(before: MetricState, metric: Metric) -> MetricState:
    values: dict[str, Tensor | list[Tensor]] = {}
    appended = set()
    for name, value in metric.metric_state.items():
        old = before.values[name]
        if _extends(value, old):
            appended.add(name)
            value = value[len(old) :]
        values[name] = tree_map(lambda tensor: tensor.detach().cpu(), value)
    return MetricState(metric.update_count, values, frozenset(appended))


def _extends(value: Tensor | list[Tensor], beginning: Tensor | list[Tensor]) -> bool:
    """Whether both are lists, and one begins with the tensors of the other."""
    if not isinstance(value, list) or len(value) < len(beginning):
        return False
    # Other objects may have the same numbers: a metric's own forward copies its states.
    return all(
        theirs is other or torch.equal(theirs, other)
        for theirs, other in zip(beginning, value, strict=False)
    )


def _set(metric: Metric, update_count: int, values: Mapping[str, Tensor | list[Tensor]]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            setattr(metric, name, value)
    metric._update_count = update_count
    metric._computed = None
