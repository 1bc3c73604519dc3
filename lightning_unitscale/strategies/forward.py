"""Run a module's ``forward`` as a pipeline, and the step around it unchanged.

For a step that is no single graph: one that prints, or that branches on the loss. Every rank runs
the step up to its call of ``forward``, which gives the pipeline's inputs. The rank of the last
stage then runs the whole step once for each microbatch, ``forward`` returning the pipeline's
output; what it logs and returns is given to all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torchmetrics import Metric, MetricCollection

from lightning_unitscale.graph.nodes import requires_grad, tensors_in
from lightning_unitscale.patching import shadowed
from lightning_unitscale.pipeline.capture import static_shapes
from lightning_unitscale.pipeline.engine import PipelineRunner
from lightning_unitscale.pipeline.program import split_evenly
from lightning_unitscale.strategies.checks import check_equal
from lightning_unitscale.strategies.metrics import LoggedMetric, MetricState, SharedMetrics
from lightning_unitscale.strategies.steps import (
    Arguments,
    PipelinedGraph,
    PipelinedMethod,
    Pipelining,
    combined,
)

# A call of ``self.log`` or ``self.log_dict``: method, positional and keyword arguments.
Logged = tuple[str, tuple[Any, ...], dict[str, Any]]
_LOGS = ("log", "log_dict")


class _ReachedError(BaseException):
    """The step has called ``forward``. No ``Exception``: the step may catch those."""

    def __init__(self, call: Arguments) -> None:
        self.call = call


class PipelinedForward(PipelinedMethod):
    """A ``forward`` whose graph runs on several ranks, below a step that runs on the last.

    Args:
        module: The module.
        pipelining: Settings of the module's pipelines.
        plain: Entered where freed parameters may be captured, and not where the user's code runs.
        because: Why the whole step is no pipeline, if that was tried.
    """

    def __init__(
        self,
        module: nn.Module,
        pipelining: Pipelining,
        plain: Callable[[], contextlib.AbstractContextManager[Any]],
        because: Exception | None = None,
    ) -> None:
        super().__init__(module, "forward", pipelining)
        self._plain = plain
        self._because = because
        self._metrics = SharedMetrics(module)
        self._name = f"{type(module).__name__}.training_step"

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch; the result of the step for it, without gradients.

        Raises:
            RuntimeError: If the step does not call ``forward`` once, with what does not depend on a
                parameter, or uses parameters outside of it that another rank owns.
        """
        count = self.pipelining.num_microbatches
        parts = split_evenly(batch, count)
        seed = self._common_seed()
        calls = []
        for index, part in enumerate(parts):
            with self._seeded(seed + index):
                calls.append(self._arguments(part, *args, **kwargs))
        # Before ``forward`` the step may do something else on another rank.
        check_equal(calls, self.pipelining.group, what="arguments of forward")
        results: dict[int, tuple[Any, list[Logged]]] = {}
        counted = self._metrics.states()
        with static_shapes():
            with self._plain():
                of_graph = self.graph_calls(calls)
                graph = self._checked(self.pipelined(of_graph[0]))

            failed: list[Exception] = []

            def finish(index: int, outputs: tuple[Any, ...]) -> Tensor:
                values = list(outputs)
                try:
                    with self._seeded(seed + index):
                        result, logged = self._whole_step(
                            lambda *a, **k: self._replayed(graph, calls[index], values, a, k),
                            parts[index],
                            *args,
                            **kwargs,
                        )
                    loss = self._loss(result)
                except Exception as error:
                    failed.append(error)
                    raise
                results[index] = (tree_map(_detached, result), logged)
                return loss

            try:
                graph.runner.step_flat(graph.inputs(of_graph), finish)
            except RuntimeError:
                # The engine reports an error of the user's step as one of its own.
                if failed:
                    raise failed[0] from None
                raise
        changes: dict[str, MetricState] = {}
        if graph.runner.is_last:
            self._refuse_gradients_of_others()
            changes = self._metrics.changes(counted)
        return self._share(graph.runner, results, changes)

    def _arguments(self, *args: Any, **kwargs: Any) -> Arguments:
        """The arguments that the step calls ``forward`` with."""

        def forward(*arguments: Any, **named: Any) -> Any:
            raise _ReachedError((arguments, named))

        tensors = [*self.module.parameters(), *self.module.buffers()]
        before = [tensor._version for tensor in tensors]
        ignored = dict.fromkeys(_LOGS, lambda *a, **k: None)
        try:
            with self._metrics.unchanged(), shadowed(self.module, forward=forward, **ignored):
                self._training_step(*args, **kwargs)
        except _ReachedError as reached:
            arguments = reached.call
        else:
            reason = f", and as a whole: {self._because}" if self._because else "."
            raise RuntimeError(
                f"{self._name} did not call self.forward; expected a step that calls self(...) "
                f"once, whose forward then runs as a pipeline (capture='forward'){reason}"
            ) from self._because
        if before != [tensor._version for tensor in tensors]:
            raise RuntimeError(
                f"{self._name} changes parameters or buffers before it calls self.forward, and "
                "with capture='forward' that code runs more often than the step; expected no such "
                "change; make it in on_train_batch_start or on_train_batch_end."
            )
        if any(tensor.requires_grad for tensor in tensors_in(arguments)):
            raise RuntimeError(
                f"{self._name} calls self.forward with a tensor that needs a gradient; expected "
                "every parameter to be used within forward; move what makes the tensor there."
            )
        return arguments

    def _checked(self, graph: PipelinedGraph) -> PipelinedGraph:
        count = sum(map(requires_grad, graph.step.program.outputs))
        if count != 1:
            raise RuntimeError(
                f"{type(self.module).__name__}.forward returns {count} tensors with a gradient; "
                "expected one, since it is not known which of several the loss uses "
                "(capture='forward'); return one, or make training_step one graph."
            )
        return graph

    def _whole_step(
        self, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, list[Logged]]:
        logged: list[Logged] = []

        def recorder(method: str) -> Callable[..., None]:
            return lambda *a, **k: logged.append((method, *self._loggable(a, k)))

        calls: list[None] = []

        def once(*arguments: Any, **named: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise RuntimeError(
                    f"{self._name} calls self.forward more than once; expected one call "
                    "(capture='forward'); put both into forward."
                )
            return forward(*arguments, **named)

        with shadowed(self.module, forward=once, **{method: recorder(method) for method in _LOGS}):
            result = self._training_step(*args, **kwargs)
        return result, logged

    def _replayed(
        self,
        graph: PipelinedGraph,
        before: Arguments,
        values: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of ``forward`` for the values of its graph."""
        if not _equal(before, (args, kwargs)):
            raise RuntimeError(
                f"{self._name} calls self.forward with other arguments the second time; expected "
                "the same: with capture='forward' the step runs twice, with the same random "
                "numbers of torch; use those, and count calls in on_train_batch_end."
            )
        attributes = self.module.__dict__
        methods = {name: attributes.pop(name) for name in ("forward", *_LOGS) if name in attributes}
        try:
            with self._plain():
                step = self.steps.steps["forward"]
                return step.rehearse(graph.replaying(values), *args, **kwargs)
        finally:
            attributes.update(methods)

    def _loss(self, result: Any) -> Tensor:
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(
                f"{self._name} returned {type(loss).__name__}; expected a loss of one number with "
                "a gradient, or a dict with the key 'loss', for every microbatch."
            )
        return loss

    def _refuse_gradients_of_others(self) -> None:
        others = [
            name
            for name, param in self.module.named_parameters()
            if param.grad is not None and name not in self.pipelining.owned
        ]
        if others:
            raise RuntimeError(
                f"{self._name} uses {others[:3]} outside of forward, which the rank of the last "
                "stage does not own; expected every parameter to be used within forward "
                "(capture='forward'); move the use there."
            )

    def _loggable(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def loggable(value: Any) -> Any:
            if isinstance(value, MetricCollection):
                named = value.items(keep_base=False, copy_state=False)
                return {name: loggable(metric) for name, metric in named}
            if isinstance(value, Metric):
                return tree_map(_detached, self._metrics.logged(value))
            if isinstance(value, nn.Module):
                raise RuntimeError(
                    f"{self._name} logs {value!r}; expected tensors, numbers and metrics; log "
                    "one of those."
                )
            return _detached(value)

        values: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(loggable, (args, kwargs))
        return values

    def _share(
        self,
        runner: PipelineRunner,
        results: dict[int, tuple[Any, list[Logged]]],
        changes: dict[str, MetricState],
    ) -> Any:
        """The result for the batch, on all ranks; all log the same, and their metrics agree."""
        payload: list[Any] = [None]
        if runner.is_last:
            flattened = [tree_flatten(results[index]) for index in sorted(results)]
            leaves, spec = [flat[0] for flat in flattened], flattened[0][1]
            if any(flat[1] != spec for flat in flattened):
                raise RuntimeError(
                    f"{self._name} logs or returns other things for one microbatch than for "
                    "another; expected the same names for each."
                )
            means = [_mean(list(values)) for values in zip(*leaves, strict=True)]
            payload = [(tree_unflatten(means, spec), changes)]
        dist.broadcast_object_list(payload, group=self.pipelining.group, group_src=runner.last_rank)
        shared, changes = payload[0]
        if not runner.is_last:
            self._metrics.apply(changes)
        result, logged = tree_map(self._here, shared)
        for method, args, kwargs in logged:
            args, kwargs = tree_map(
                self._with_metrics,
                (args, kwargs),
                is_leaf=lambda leaf: isinstance(leaf, LoggedMetric),
            )
            getattr(self.module, method)(*args, **kwargs)
        return result

    def _with_metrics(self, value: Any) -> Any:
        return self._metrics.metric_of(value) if isinstance(value, LoggedMetric) else value

    def _here(self, value: Any) -> Any:
        return value.to(self.pipelining.device) if isinstance(value, Tensor) else value

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        step: Callable[..., Any] = getattr(self.module, "training_step")  # noqa: B009
        return step(*args, **kwargs)

    def _common_seed(self) -> int:
        seed = torch.randint(2**62, (1,)).to(self.pipelining.device)
        dist.broadcast(seed, group=self.pipelining.group, group_src=0)
        return int(seed.item())

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """The step sees the same random numbers each time, on every rank."""
        device = self.pipelining.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


def _detached(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _mean(values: list[Any]) -> Any:
    if all(isinstance(value, float) for value in values):
        return sum(values) / len(values)
    return combined([[value] for value in values])[0]


def _equal(first: Arguments, second: Arguments) -> bool:
    ours, theirs = tree_flatten(first), tree_flatten(second)
    if ours[1] != theirs[1]:
        return False
    return all(
        isinstance(b, Tensor) and torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
        for a, b in zip(ours[0], theirs[0], strict=True)
    )
