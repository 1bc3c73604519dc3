"""Run the module that a step calls as a pipeline, and the step around it unchanged.

For a step that is no single graph: one that prints, or that branches on the loss. Every rank runs
the step up to its call of the module (the LightningModule itself, as ``self(...)``, or the
submodule that has most of its parameters), which gives the pipeline's inputs. All microbatches then
run forward. The rank of the last stage joins their outputs and runs the whole step once, the module
returning the joined outputs. So the loss is the batch's own, whatever the step makes of the
outputs. What it logs and returns is given to all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection

from lightning_unitscale.graph.nodes import requires_grad
from lightning_unitscale.patching import shadowed
from lightning_unitscale.pipeline.called import (
    Arguments,
    as_attribute,
    first_called,
    forward_of,
    with_most_parameters,
    without,
)
from lightning_unitscale.pipeline.capture import static_shapes
from lightning_unitscale.pipeline.dataflow import parameters_behind
from lightning_unitscale.pipeline.program import leaves_of, split_evenly
from lightning_unitscale.ranks import broadcast
from lightning_unitscale.strategies.checks import check_equal
from lightning_unitscale.strategies.joint import JointStep, Logged, StepCall, detached
from lightning_unitscale.strategies.method import (
    NotPipelinedError,
    PipelinedGraph,
    PipelinedMethod,
    Pipelining,
)
from lightning_unitscale.strategies.metrics import LoggedMetric, MetricState, SharedMetrics

_LOGS = ("log", "log_dict")


class PipelinedForward:
    """The module that a step calls, on several ranks, below a step that runs on the last."""

    def __init__(
        self,
        module: nn.Module,
        pipelining: Pipelining,
        plain: Callable[[], contextlib.AbstractContextManager[Any]],
        because: Exception | None = None,
    ) -> None:
        self.module = module
        self.pipelining = pipelining
        self._plain = plain
        # Why the step, or a module that it calls, is no pipeline.
        self._reasons = [] if because is None else [str(because)]
        self._metrics = SharedMetrics(module)
        self._name = f"{type(module).__name__}.training_step"
        self._candidates = with_most_parameters(module)
        # The method that runs as a pipeline, once the step has called it.
        self._method: PipelinedMethod | None = None

    @property
    def called(self) -> str:
        """What the step calls, for messages."""
        return as_attribute("" if self._method is None else self._method.name.rpartition(".")[0])

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of one batch; the result of the step for it, without gradients."""
        seed = self._common_seed()
        call = StepCall((batch, *args), kwargs, seed, self.pipelining.device)
        with static_shapes():
            graph, inputs = self._captured(call)
            counted = self._metrics.states()
            joint = JointStep(graph, call, self.pipelining.device, self._around)
            try:
                graph.runner.step_flat(inputs, joint.finish)
            except RuntimeError:
                # The engine reports an error of the user's step as one of its own.
                if joint.failed:
                    raise joint.failed[0] from None
                raise
        changes: dict[str, MetricState] = {}
        outside: list[str] = []
        if graph.runner.is_last:
            outside = self._used_outside()
            changes = self._metrics.changes(counted)
        return self._share(graph, joint, outside, changes)

    def _captured(self, call: StepCall) -> tuple[PipelinedGraph, list[list[Any]]]:
        """The pipeline of what the step calls, with its inputs for each microbatch."""
        while True:
            try:
                with call.seeded():
                    path, arguments = self._arguments(call)
            except RuntimeError as error:
                if not self._reasons or self.pipelining.ownership.is_settled:
                    raise
                # Those of what is within a module say little of it.
                raise RuntimeError(
                    f"PipelineStrategy: {self._reasons[0]} Besides, {error}"
                ) from error
            if self._method is None:
                self._method = PipelinedMethod(self.module, forward_of(path), self.pipelining)
            # Before its call the step may do something else on another rank.
            check_equal(arguments, self.pipelining.group, what=f"arguments of {self.called}")
            call.arguments = arguments
            try:
                with self._plain():
                    found = self._pipelined(self._method, arguments)
            except NotPipelinedError as error:
                if self.pipelining.ownership.is_settled:
                    raise
                # Perhaps what it calls in turn can be one. All ranks come here.
                self._candidates = without(self._candidates, path)
                self._method = None
                self._reasons.append(str(error))
            else:
                self._candidates = [path]
                return found

    def _pipelined(
        self, method: PipelinedMethod, arguments: Arguments
    ) -> tuple[PipelinedGraph, list[list[Any]]]:
        parts = split_evenly(arguments, self.pipelining.num_microbatches)
        (whole,) = split_evenly(arguments, 1)
        calls = method.graph_calls(parts)
        graph = method.pipelined(calls, method.whole_call(whole, calls))
        if not any(map(requires_grad, graph.step.program.outputs)):
            raise NotPipelinedError(
                f"{self.called} returns no tensor with a gradient; expected the loss, or what the "
                "loss is computed of; return it."
            )
        return graph, graph.inputs(calls)

    def _arguments(self, call: StepCall) -> tuple[str, Arguments]:
        """What the step calls first of what may be the pipeline, and with which arguments."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        before = [tensor._version for tensor in tensors]
        ignored = dict.fromkeys(_LOGS, lambda *a, **k: None)
        with self._metrics.unchanged(), shadowed(self.module, **ignored):
            found = first_called(
                self.module,
                self._candidates,
                lambda: self._training_step(*call.args, **call.kwargs),
            )
        if found is None:
            raise RuntimeError(
                f"{self._name} calls no module that has most of its parameters; expected a step "
                "that calls self(...), or such a submodule, once, which then runs as a pipeline "
                "(capture='forward')."
            )
        path, arguments = found
        if before != [tensor._version for tensor in tensors]:
            raise RuntimeError(
                f"{self._name} changes parameters or buffers before it calls {as_attribute(path)}, "
                "and with capture='forward' that code runs more often than the step; expected no "
                "such change; make it in on_train_batch_start or on_train_batch_end."
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(arguments)):
            raise RuntimeError(
                f"{self._name} calls {as_attribute(path)} with a tensor that needs a gradient; "
                "expected every parameter before it to be used within it; move what makes the "
                "tensor there."
            )
        return path, arguments

    def _around(
        self, graph: PipelinedGraph, call: StepCall, values: list[Any]
    ) -> tuple[Any, list[Logged]]:
        """The result of the step and what it logs, for the values of the pipeline's graph."""
        logged: list[Logged] = []

        def recorder(method: str) -> Callable[..., None]:
            return lambda *a, **k: logged.append((method, *self._loggable(a, k)))

        calls: list[None] = []

        def once(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            if len(calls) > 1:
                raise RuntimeError(
                    f"{self._name} calls {self.called} more than once; expected one call "
                    "(capture='forward'); put both into one forward."
                )
            return self._replayed(graph, call.arguments, values, args, kwargs)

        logs = {method: recorder(method) for method in _LOGS}
        with shadowed(self.module, **logs), shadowed(self._called_module, forward=once):
            result = self._training_step(*call.args, **call.kwargs)
        return result, logged

    @property
    def _called_module(self) -> nn.Module:
        assert self._method is not None
        return self.module.get_submodule(self._method.name.rpartition(".")[0])

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
                f"{self._name} calls {self.called} with other arguments the second time; expected "
                "the same: with capture='forward' the step runs twice, with the same random "
                "numbers of torch; use those, and count calls in on_train_batch_end."
            )
        assert self._method is not None
        step = self._method.steps.steps[self._method.name]
        # The method was captured without what stands in for it, and for logging, now.
        below, logs = vars(self._called_module), {}
        own = below.pop("forward")
        for name in _LOGS:
            if name in vars(self.module):
                logs[name] = vars(self.module).pop(name)
        (whole,) = split_evenly((args, kwargs), 1)
        try:
            with self._plain():
                return step.rehearse(graph.replaying(values), *whole[0], **whole[1])
        finally:
            below["forward"] = own
            vars(self.module).update(logs)

    def _used_outside(self) -> list[str]:
        """Names of the parameters without an owner that have a gradient."""
        owned = set[str]().union(*self.pipelining.ownership.names)
        used = [name for name, one in self.module.named_parameters() if one.grad is not None]
        others = [name for name in used if name in owned - self.pipelining.owned]
        if others:
            raise RuntimeError(
                f"{self._name} uses {others[:3]} outside of {self.called}, which the rank of the "
                "last stage does not own; expected the parameters of a stage to be used within "
                f"{self.called} (capture='forward'); move the use there."
            )
        return [name for name in used if name not in owned]

    def _loggable(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def loggable(value: Any) -> Any:
            if isinstance(value, MetricCollection):
                named = value.items(keep_base=False, copy_state=False)
                return {name: loggable(metric) for name, metric in named}
            if isinstance(value, Metric):
                return tree_map(detached, self._metrics.logged(value))
            if isinstance(value, nn.Module):
                raise RuntimeError(
                    f"{self._name} logs {value!r}; expected tensors, numbers and metrics; log "
                    "one of those."
                )
            return detached(value)

        values: tuple[tuple[Any, ...], dict[str, Any]] = tree_map(loggable, (args, kwargs))
        return values

    def _share(
        self,
        graph: PipelinedGraph,
        joint: JointStep,
        outside: list[str],
        changes: dict[str, MetricState],
    ) -> Any:
        """The result for the batch, on all ranks; all log the same, and their metrics agree."""
        runner = graph.runner
        own = (joint.result, joint.logged, outside, joint.used, changes)
        result, logged, outside, used, changes = broadcast(
            own, runner.last_rank, self.pipelining.group
        )
        if not runner.is_last:
            self._metrics.apply(changes)
        if outside:
            self.pipelining.ownership.own(outside, runner.pipe.num_stages - 1)
        self._leave_without(graph, used)
        result, logged = tree_map(self._here, (result, logged))
        for method, args, kwargs in logged:
            args, kwargs = tree_map(
                self._with_metrics,
                (args, kwargs),
                is_leaf=lambda leaf: isinstance(leaf, LoggedMetric),
            )
            getattr(self.module, method)(*args, **kwargs)
        return result

    def _leave_without(self, graph: PipelinedGraph, used: tuple[int, ...]) -> None:
        """Take the gradients of parameters that lead only to outputs that the loss does not use."""
        outputs = graph.step.program.outputs
        if all(not requires_grad(value) or index in used for index, value in enumerate(outputs)):
            return
        reached = parameters_behind(graph.step.program.graph_module, [outputs[i] for i in used])
        for name, parameter in graph.runner.named_parameters().items():
            if name not in reached:
                parameter.grad = None

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


def _equal(first: Arguments, second: Arguments) -> bool:
    ours, theirs = leaves_of(first), leaves_of(second)
    return len(ours) == len(theirs) and all(
        isinstance(b, Tensor) and torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
        for a, b in zip(ours, theirs, strict=True)
    )
