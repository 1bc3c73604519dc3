"""Share the state of metric objects when a step runs on one rank only."""

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
    """A stand-in for a logged metric object. It is a tuple, so that its value is averaged."""

    path: str
    value: Any  # the result of its last call


@dataclass(frozen=True)
class MetricState:
    """The state of a metric object, or the change that a step has made."""

    update_count: int
    values: Mapping[str, Tensor | list[Tensor]]  # its states by name
    # The lists that only grew. Their values are the new elements.
    appended: frozenset[str] = frozenset()


class SharedMetrics:
    """The metric objects of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def states(self) -> dict[str, MetricState]:
        """Return the states of all metric objects, by their paths."""
        # Metrics write into tensors in place, but not into the elements of lists.
        return {
            path: MetricState(
                metric.update_count,
                {
                    name: value.detach().clone() if isinstance(value, Tensor) else list(value)
                    for name, value in metric.metric_state.items()
                },
            )
            for path, metric in self._metrics().items()
        }

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the metric objects at the end of this context."""
        before = self.states()
        try:
            yield
        finally:
            for path, metric in self._metrics().items():
                if metric.update_count != before[path].update_count:
                    _set(metric, before[path].update_count, before[path].values)

    def changes(self, before: Mapping[str, MetricState]) -> dict[str, MetricState]:
        """Return the changes of the metric objects since ``before``, as tensors on the CPU."""
        return {
            path: _change(before[path], metric)
            for path, metric in self._metrics().items()
            if metric.update_count != before[path].update_count
        }

    def apply(self, changes: Mapping[str, MetricState]) -> None:
        """Apply another rank's changes to the metric objects of this rank."""
        metrics = self._metrics()
        for path, change in changes.items():
            metric = metrics[path]
            values: dict[str, Tensor | list[Tensor]] = {}
            for name, value in change.values.items():
                value = tree_map(lambda tensor, device=metric.device: tensor.to(device), value)
                before = getattr(metric, name)
                values[name] = [*before, *value] if name in change.appended else value
            _set(metric, change.update_count, values)

    def loggable(self, value: Any) -> Any:
        """Convert a logged value into a value that can be sent to other ranks."""
        if isinstance(value, MetricCollection):
            named = value.items(keep_base=False, copy_state=False)
            return {name: self.loggable(metric) for name, metric in named}
        if not isinstance(value, nn.Module):
            return detached(value)
        step = f"{type(self._module).__name__}.training_step"
        if not isinstance(value, Metric):
            raise RuntimeError(f"{step} logs {value!r}. Log tensors, numbers and metrics only.")
        for path, submodule in self._module.named_modules():
            if submodule is value:
                return LoggedMetric(path, tree_map(detached, value._forward_cache))
        raise RuntimeError(
            f"{step} logs {value!r}, which is not a submodule. Every rank needs the metric. Make "
            "it an attribute of the module in __init__."
        )

    def logged(self, value: Any) -> Any:
        """Return the metric object that was logged, with the value of the whole batch."""
        if not isinstance(value, LoggedMetric):
            return value
        metric = self._module.get_submodule(value.path)
        assert isinstance(metric, Metric)
        metric._forward_cache = value.value
        return metric

    def _metrics(self) -> dict[str, Metric]:
        metrics = {}
        for path, module in self._module.named_modules():
            if isinstance(module, MetricCollection):
                # Metrics of one compute group are updated once. This gives the state to all.
                module.items(keep_base=True, copy_state=False)
            elif isinstance(module, Metric):
                metrics[path] = module
        return metrics


def detached(value: Any) -> Any:
    """Move a tensor to the CPU without its gradient. Return other values as they are."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _change(before: MetricState, metric: Metric) -> MetricState:
    values: dict[str, Tensor | list[Tensor]] = {}
    appended = set()
    for name, value in metric.metric_state.items():
        old = before.values[name]
        if isinstance(value, list) and len(value) >= len(old):
            # Numbers as well as objects, because a metric's forward copies its states.
            pairs = zip(old, value, strict=False)
            if all(ours is theirs or torch.equal(ours, theirs) for ours, theirs in pairs):
                appended.add(name)
                value = value[len(old) :]
        values[name] = tree_map(lambda tensor: tensor.detach().cpu(), value)
    return MetricState(metric.update_count, values, frozenset(appended))


def _set(metric: Metric, update_count: int, values: Mapping[str, Tensor | list[Tensor]]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            setattr(metric, name, value)
    metric._update_count = update_count
    metric._computed = None
