"""Run a module's ``forward`` as a pipeline, and its own step around it as it is.

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

from lightning_unitscale.pipeline.microbatches import split_evenly
from lightning_unitscale.pipeline.runner import PipelineRunner
from lightning_unitscale.pipeline.step_program import static_shapes
from lightning_unitscale.shadowing import shadowed
from lightning_unitscale.strategies import batches
from lightning_unitscale.strategies.pipelined_method import (
    PipelinedMethod,
    Pipelining,
    Rehearsal,
    Replay,
)
from lightning_unitscale.strategies.shared_metrics import (
    LoggedMetric,
    MetricChange,
    SharedMetrics,
)

# A call of ``forward``.
Given = tuple[tuple[Any, ...], dict[str, Any]]
# A call of ``self.log`` or ``self.log_dict``: method, positional and keyword arguments.
Logged = tuple[str, tuple[Any, ...], dict[str, Any]]
_LOGS = ("log", "log_dict")


class _ReachedError(BaseException):
    """The step has called ``forward``. No ``Exception``: the step may catch those."""

    def __init__(self, given: Given) -> None:
        self.given = given


class PipelinedForward(PipelinedMethod):
    """A ``forward`` whose graph runs on several ranks, below a step that runs on the last.

    Args:
        module: The module.
        how: The schedule, and the rest.
        plain: Entered where freed parameters may be captured, and not where the user's code runs.
        because: Why the whole step is no pipeline, if that was tried.
    """

    def __init__(
        self,
        module: nn.Module,
        how: Pipelining,
        plain: Callable[[], contextlib.AbstractContextManager[Any]],
        because: Exception | None = None,
    ) -> None:
        super().__init__(module, "forward", how)
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
        count = self.how.num_microbatches
        parts = split_evenly(batch, count)
        seed = self._common_seed()
        given = []
        for place, part in enumerate(parts):
            with self._seeded(seed + place):
                given.append(self._arguments(part, *args, **kwargs))
        # What a step does before ``forward`` may be another thing on another rank.
        batches.check_equal(given, self.how.group, what="arguments of forward")
        results: dict[int, tuple[Any, list[Logged]]] = {}
        counted = self._metrics.states()
        with static_shapes():
            with self._plain():
                rehearsal = self.rehearse(given)
                runner = self._runner(rehearsal)

            failed: list[Exception] = []

            def finish(place: int, outputs: tuple[Any, ...]) -> Tensor:
                values = list(outputs)
                try:
                    with self._seeded(seed + place):
                        result, logged = self._whole_step(
                            lambda *a, **k: self._replayed(rehearsal, given[place], values, a, k),
                            parts[place],
                            *args,
                            **kwargs,
                        )
                    loss = self._loss(result)
                except Exception as error:
                    failed.append(error)
                    raise
                results[place] = (tree_map(_detached, result), logged)
                return loss

            try:
                runner.step_flat(self.inputs_of(rehearsal), finish)
            except RuntimeError:
                # The engine reports an error of the user's step as one of its own.
                if failed:
                    raise failed[0] from None
                raise
        if runner.is_last:
            self._refuse_gradients_of_others()
        changes = self._metrics.changes(counted) if runner.is_last else {}
        return self._share(runner, results, changes)

    def _arguments(self, *args: Any, **kwargs: Any) -> Given:
        """What the step calls ``forward`` with."""

        def forward(*given: Any, **named: Any) -> Any:
            raise _ReachedError((given, named))

        tensors = [*self.module.parameters(), *self.module.buffers()]
        before = [one._version for one in tensors]
        ignored = dict.fromkeys(_LOGS, lambda *a, **k: None)
        try:
            with self._metrics.unchanged(), shadowed(self.module, forward=forward, **ignored):
                self._training_step(*args, **kwargs)
        except _ReachedError as reached:
            given = reached.given
        else:
            reason = f", and as a whole: {self._because}" if self._because else "."
            raise RuntimeError(
                f"{self._name} did not call self.forward; expected a step that calls self(...) "
                f"once, whose forward then runs as a pipeline (capture='forward'){reason}"
            ) from self._because
        if before != [one._version for one in tensors]:
            raise RuntimeError(
                f"{self._name} changes parameters or buffers before it calls self.forward, and "
                "with capture='forward' that code runs more often than the step; expected no such "
                "change; make it in on_train_batch_start or on_train_batch_end."
            )
        if any(isinstance(one, Tensor) and one.requires_grad for one in tree_flatten(given)[0]):
            raise RuntimeError(
                f"{self._name} calls self.forward with a tensor that needs a gradient; expected "
                "every parameter to be used within forward; move what makes the tensor there."
            )
        return given

    def _runner(self, rehearsal: Rehearsal) -> PipelineRunner:
        runner = self.runner_for(rehearsal, None)
        results = [one.meta.get("example_value") for one in runner.pipe.program.outputs
                   if isinstance(one, torch.fx.Node)]  # fmt: skip
        differentiable = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
        if len(differentiable) != 1:
            raise RuntimeError(
                f"{type(self.module).__name__}.forward returns {len(differentiable)} tensors with "
                "a gradient; expected one, since it is not known which of several the loss uses "
                "(capture='forward'); return one, or make training_step one graph."
            )
        return runner

    def _whole_step(
        self, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, list[Logged]]:
        logged: list[Logged] = []

        def recorder(method: str) -> Callable[..., None]:
            return lambda *a, **k: logged.append((method, *self._loggable(a, k)))

        calls: list[None] = []

        def once(*given: Any, **named: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise RuntimeError(
                    f"{self._name} calls self.forward more than once; expected one call "
                    "(capture='forward'); put both into forward."
                )
            return forward(*given, **named)

        with shadowed(self.module, forward=once, **{one: recorder(one) for one in _LOGS}):
            result = self._training_step(*args, **kwargs)
        return result, logged

    def _replayed(
        self,
        rehearsal: Rehearsal,
        before: Given,
        values: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What ``forward`` returns for the values of its graph."""
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
                replay = Replay("forward", rehearsal.graph, values)
                return step.rehearse(replay, *args, **kwargs)
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
        owned = self.how.ownership.names[dist.get_rank(self.how.group)]
        others = [
            name
            for name, one in self.module.named_parameters()
            if one.grad is not None and name not in owned
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

        found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(loggable, (args, kwargs))
        return found

    def _share(
        self,
        runner: PipelineRunner,
        results: dict[int, tuple[Any, list[Logged]]],
        changes: dict[str, MetricChange],
    ) -> Any:
        """The result for the batch, on all ranks; each of them logs and has counted the same."""
        payload: list[Any] = [None]
        if runner.is_last:
            found = [tree_flatten(results[place]) for place in sorted(results)]
            leaves, spec = [one[0] for one in found], found[0][1]
            if any(one[1] != spec for one in found):
                raise RuntimeError(
                    f"{self._name} logs or returns other things for one microbatch than for "
                    "another; expected the same names for each."
                )
            combined = [_mean(list(one)) for one in zip(*leaves, strict=True)]
            payload = [(tree_unflatten(combined, spec), changes)]
        dist.broadcast_object_list(payload, group=self.how.group, group_src=runner.last_rank)
        shared, changes = payload[0]
        if not runner.is_last:
            self._metrics.apply(changes)
        result, logged = tree_map(self._here, shared)
        for method, args, kwargs in logged:
            args, kwargs = tree_map(
                self._with_metrics,
                (args, kwargs),
                is_leaf=lambda one: isinstance(one, LoggedMetric),
            )
            getattr(self.module, method)(*args, **kwargs)
        return result

    def _with_metrics(self, value: Any) -> Any:
        return self._metrics.metric_of(value) if isinstance(value, LoggedMetric) else value

    def _here(self, value: Any) -> Any:
        return value.to(self.how.device) if isinstance(value, Tensor) else value

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        step: Callable[..., Any] = getattr(self.module, "training_step")  # noqa: B009
        return step(*args, **kwargs)

    def _common_seed(self) -> int:
        seed = torch.randint(2**62, (1,)).to(self.how.device)
        dist.broadcast(seed, group=self.how.group, group_src=0)
        return int(seed.item())

    @contextlib.contextmanager
    def _seeded(self, seed: int) -> Iterator[None]:
        """The step sees the same random numbers each time, on every rank."""
        device = self.how.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield


def _detached(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _mean(values: list[Any]) -> Any:
    if all(isinstance(one, float) for one in values):
        return sum(values) / len(values)
    return batches.combined([[one] for one in values])[0]


def _equal(first: Given, second: Given) -> bool:
    ours, theirs = tree_flatten(first), tree_flatten(second)
    if ours[1] != theirs[1]:
        return False
    return all(
        isinstance(b, Tensor) and torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
        for a, b in zip(ours[0], theirs[0], strict=True)
    )
