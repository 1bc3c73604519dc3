"""Run the module that a step calls as a pipeline, and leave the step around it unchanged.

This is for a step that is not one graph because it prints or branches on the loss. Every rank runs
the step up to its call of the module. This gives the pipeline's inputs. The module is the
LightningModule itself (``self(...)``) or the submodule with most parameters. All microbatches then
run forward. The rank of the last stage joins their outputs and runs the whole step once with them.
So the loss is that of the batch, whatever the step does with the outputs. All ranks get its result
and its calls of the log methods.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map, tree_map_only
from typing_extensions import override

from lightning_unitscale.capture.dynamo_capture import static_shapes
from lightning_unitscale.capture.graph_nodes import requires_grad, returned_loss
from lightning_unitscale.capture.module_steps import steps_of
from lightning_unitscale.loops.ranks import broadcast
from lightning_unitscale.matmuls.scaled_methods import begin_microbatch
from lightning_unitscale.patching import shadowed
from lightning_unitscale.pipeline.captured_program import (
    LOGS,
    Arguments,
    as_attribute,
    first_called,
    forward_of,
    with_most_parameters,
    without,
    without_logs,
)
from lightning_unitscale.pipeline.checks import check_equal
from lightning_unitscale.pipeline.data_parallel import GridStrategy
from lightning_unitscale.pipeline.dataflow import find_gradients
from lightning_unitscale.pipeline.pipelined_method import (
    NotPipelinedError,
    PipelinedGraph,
    PipelinedMethod,
)
from lightning_unitscale.pipeline.program import leaves_of, split_evenly
from lightning_unitscale.pipeline.rank_metrics import (
    LoggedMetric,
    MetricState,
    SharedMetrics,
    detached,
)

# A call of ``self.log`` or ``self.log_dict``: method, positional and keyword arguments.
Logged = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass
class StepCall:
    """A call of a step that runs up to the pipeline, and once more as a whole."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int  # every run, on every rank, draws the same random numbers
    device: torch.device
    arguments: Arguments = ((), {})  # the arguments that the step passes to the pipeline

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """Seed the random numbers of the step within this context."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield


@dataclass
class JointStep:
    """The step on the rank of the last stage, run on the outputs of all microbatches."""

    graph: PipelinedGraph
    # Runs the step, and returns its result and its calls of the log methods.
    run: Callable[[list[Any]], tuple[Any, list[Logged]]]
    outputs: dict[int, list[Any]] = field(default_factory=dict)
    # The detached result of the step, and its calls of the log methods.
    result: Any = None
    logged: list[Logged] = field(default_factory=list)
    used: tuple[int, ...] = ()  # positions of the outputs that the loss depends on
    failed: Exception | None = None  # the error of the user's code

    def finish(self, index: int, outputs: Sequence[Any]) -> Tensor:
        """Add the outputs of a microbatch, and return the tensor that starts its backward pass."""
        leaves = tree_map_only(
            Tensor, lambda value: value.detach().requires_grad_(value.requires_grad), list(outputs)
        )
        self.outputs[index] = leaves
        if len(self.outputs) == self.graph.runner.num_microbatches:
            try:
                self._finish_all()
            except Exception as error:
                self.failed = error
                raise
        pairs = zip(leaves, outputs, strict=True)
        needed = [pair for pair in pairs if isinstance(pair[0], Tensor) and pair[0].requires_grad]
        return _StartOfBackward.apply(
            [leaf for leaf, _ in needed], *(output for _, output in needed)
        )

    def _finish_all(self) -> None:
        parts = [self.outputs[index] for index in sorted(self.outputs)]
        result, self.logged = self.run(self.graph.joined(parts))
        loss = returned_loss(result)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise RuntimeError(
                f"training_step returned {type(loss).__name__}. Return a loss of one number with a "
                "gradient, or a dict with the key 'loss'."
            )
        # The caller's autocast applies to forward passes only.
        runner = self.graph.runner
        with torch.autocast(runner.device.type, enabled=False):
            (loss / runner.num_accumulated).backward()
        self.used = tuple(
            place
            for place, leaves in enumerate(zip(*parts, strict=True))
            if any(isinstance(leaf, Tensor) and leaf.grad is not None for leaf in leaves)
        )
        self.result = tree_map(detached, result)


class _StartOfBackward(torch.autograd.Function):
    """The start of a microbatch's backward pass, with the gradients of the joint step."""

    @staticmethod
    @override
    def forward(ctx: Any, leaves: list[Tensor], *outputs: Tensor) -> Tensor:
        """Return zero. The joint step computes the gradients later."""
        ctx.leaves = leaves
        return outputs[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients, and zeros for outputs that the loss does not use."""
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return None, *found


class PipelinedForward:
    """A step on the last rank around a module that runs on several ranks."""

    def __init__(
        self,
        strategy: GridStrategy,
        plain: Callable[[], contextlib.AbstractContextManager[Any]],
        because: NotPipelinedError | None = None,
    ) -> None:
        self.module = module = strategy.own_module
        self.strategy, self._group = strategy, strategy.grid.pipeline
        self._plain = plain
        # Why the step, or a module that it calls, cannot be the pipeline.
        self._reasons = [] if because is None else [because]
        self._metrics = SharedMetrics(module)
        self._name = f"{type(module).__name__}.training_step"
        self._candidates = with_most_parameters(module)
        # The method that runs as the pipeline, known after the first call.
        self._method: PipelinedMethod | None = None
        self._path = ""

    @property
    def called(self) -> str:
        """Return the name of the module that the step calls, for messages."""
        return as_attribute(self._path)

    @property
    def _called(self) -> nn.Module:
        return self.module.get_submodule(self._path)

    @property
    def _own_step(self) -> Callable[..., Any]:
        """Return the user's own step, even if callbacks have captured it."""
        steps = steps_of(self.module)
        return self.module.training_step if steps is None else steps.original("training_step")

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of one batch, and return the step's detached result."""
        seed = broadcast(int(torch.randint(2**62, (1,))), 0, self._group)
        call = StepCall((batch, *args), kwargs, seed, self.strategy.root_device)
        with static_shapes():
            graph, inputs = self._captured(call)
            counted = self._metrics.states()
            joint = JointStep(graph, partial(self._around, graph, call))
            assert self._method is not None
            try:
                self._method.run(graph, inputs, joint.finish)
            except RuntimeError:
                # The engine would report an error of the user's step as its own.
                if joint.failed is not None:
                    raise joint.failed from None
                raise
        return self._share(graph, joint, counted)

    def _captured(self, call: StepCall) -> tuple[PipelinedGraph, list[list[Any]]]:
        """Return the pipeline of the module that the step calls, and its inputs."""
        while True:
            try:
                with call.seeded():
                    path, arguments = self._arguments(call)
            except RuntimeError as error:
                if not self._reasons or self.strategy.ownership.is_settled:
                    raise
                texts = [str(self._reasons[0]), *(one.reason for one in self._reasons[1:])]
                raise RuntimeError(
                    f"PipelineStrategy: {' '.join(texts)} Besides, {error}"
                ) from error
            if self._method is None:
                self._method = PipelinedMethod(forward_of(path), self.strategy)
                self._path = path
            # The step may have run other code before the call on another rank.
            check_equal(arguments, self._group, what=f"arguments of {self.called}")
            call.arguments = arguments
            try:
                with self._plain():
                    found = self._pipelined(self._method, arguments)
            except NotPipelinedError as error:
                if self.strategy.ownership.is_settled:
                    raise
                # It, or a module within it, may work as the pipeline. All ranks reach this line.
                args, kwargs = arguments
                run = partial(self._called, *args, **kwargs)
                if not self._reasons and self._method.sets_up(run):
                    continue
                self._candidates = without(self._candidates, path)
                self._method = None
                self._reasons.append(error)
            else:
                self._candidates = [path]
                return found

    def _pipelined(
        self, method: PipelinedMethod, arguments: Arguments
    ) -> tuple[PipelinedGraph, list[list[Any]]]:
        parts = split_evenly(arguments, self.strategy.num_microbatches)
        (whole,) = split_evenly(arguments, 1)
        calls, whole_call = method.graph_calls(parts, whole)
        graph = method.pipelined(calls, whole_call)
        if not any(map(requires_grad, graph.step.program.outputs)):
            raise NotPipelinedError(
                f"{self.called} returns no tensor with a gradient. Return the loss, or the tensors "
                "from which it is computed."
            )
        return graph, graph.inputs(calls)

    def _arguments(self, call: StepCall) -> tuple[str, Arguments]:
        """Return the candidate that the step calls first, and the arguments of the call."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        before = [tensor._version for tensor in tensors]
        with self._metrics.unchanged(), without_logs(self.module):
            run = partial(self._own_step, *call.args, **call.kwargs)
            found = first_called(self.module, self._candidates, run)
        if found is None:
            raise RuntimeError(
                f"{self._name} calls no module that has most of its parameters. With "
                "capture='forward' that module is the pipeline. Call self(...), or such a "
                "submodule, once in the step."
            )
        path, arguments = found
        if before != [tensor._version for tensor in tensors]:
            raise RuntimeError(
                f"{self._name} changes parameters or buffers before it calls {as_attribute(path)}, "
                "but with capture='forward' that code runs more than once. Make the change in "
                "on_train_batch_start or on_train_batch_end."
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves_of(arguments)):
            raise RuntimeError(
                f"{self._name} calls {as_attribute(path)} with a tensor that needs a gradient. "
                "Parameters must be used within the module. Move the code that makes the tensor "
                "there."
            )
        return path, arguments

    def _around(
        self, graph: PipelinedGraph, call: StepCall, values: list[Any]
    ) -> tuple[Any, list[Logged]]:
        """Run the step with the pipeline's results, and return its result and its logs."""
        logged: list[Logged] = []

        def recorder(method: str) -> Callable[..., None]:
            return lambda *a, **k: logged.append(
                (method, *tree_map(self._metrics.loggable, (a, k)))
            )

        num_calls = itertools.count()

        def once(*args: Any, **kwargs: Any) -> Any:
            if next(num_calls):
                raise RuntimeError(
                    f"{self._name} calls {self.called} more than once. With capture='forward' a "
                    "step can call it once. Put both calls into one forward."
                )
            return self._replayed(graph, call.arguments, values, (args, kwargs))

        logs = {method: recorder(method) for method in LOGS}
        replaced = shadowed(self._called, forward=once)
        # The step's own matmuls are numbered as before the stages ran.
        begin_microbatch(self.module, "training_step", 0)
        with call.seeded(), shadowed(self.module, **logs), replaced:
            result = self._own_step(*call.args, **call.kwargs)
        return result, logged

    def _replayed(
        self, graph: PipelinedGraph, before: Arguments, values: list[Any], given: Arguments
    ) -> Any:
        """Return the result of ``forward`` for the results of its graph."""
        if not _equal(before, given):
            raise RuntimeError(
                f"{self._name} calls {self.called} with other arguments the second time. With "
                "capture='forward' the step runs twice, with the same torch random numbers. Draw "
                "random numbers from torch only, and count calls in on_train_batch_end."
            )
        assert self._method is not None
        step = self._method.steps.steps[self._method.name]
        # The method was captured without the replacements of itself and of the log methods.
        below, above = vars(self._called), vars(self.module)
        forward = below.pop("forward")
        logs = {name: above.pop(name) for name in LOGS if name in above}
        ((args, kwargs),) = split_evenly(given, 1)
        try:
            with self._plain():
                return step.rehearse(graph.replaying(values), *args, **kwargs)
        finally:
            below["forward"] = forward
            above.update(logs)

    def _used_outside(self) -> list[str]:
        """Return the names of the parameters that have a gradient but no owner."""
        names = self.strategy.ownership.names
        owned, own = set[str]().union(*names), names[dist.get_rank(self._group)]
        used = [name for name, one in self.module.named_parameters() if one.grad is not None]
        others = [name for name in used if name in owned - own]
        if others:
            raise RuntimeError(
                f"{self._name} uses {others[:3]} outside of {self.called}. With capture='forward' "
                "the rank of the last stage runs the step, and it does not own them. Move the use "
                f"into {self.called}."
            )
        return [name for name in used if name not in owned]

    def _share(
        self, graph: PipelinedGraph, joint: JointStep, counted: dict[str, MetricState]
    ) -> Any:
        """Share the result of the batch and the metrics with all ranks, and log it there."""
        runner = graph.runner
        outside = self._used_outside() if runner.is_last else []
        changes = self._metrics.changes(counted) if runner.is_last else {}
        own = (joint.result, joint.logged, outside, joint.used, changes)
        result, logged, outside, used, changes = broadcast(own, runner.last_rank, self._group)
        if not runner.is_last:
            self._metrics.apply(changes)
        if outside:
            self.strategy.ownership.own(outside, runner.pipe.num_stages - 1)
        self._leave_without(graph, used)
        result, logged = tree_map_only(
            Tensor, lambda tensor: tensor.to(self.strategy.root_device), (result, logged)
        )
        for method, args, kwargs in logged:
            args, kwargs = tree_map(
                self._metrics.logged,
                (args, kwargs),
                is_leaf=lambda leaf: isinstance(leaf, LoggedMetric),
            )
            getattr(self.module, method)(*args, **kwargs)
        return result

    def _leave_without(self, graph: PipelinedGraph, used: tuple[int, ...]) -> None:
        """Remove gradients of parameters that only reach outputs unused by the loss."""
        outputs = graph.step.program.outputs
        if all(not requires_grad(value) or index in used for index, value in enumerate(outputs)):
            return
        graph_module = graph.step.program.graph_module
        reached = set[fx.Node]().union(*(find_gradients(graph_module, outputs[i]) for i in used))
        names = {str(node.target) for node in reached if node.op == "get_attr"}
        for name, parameter in graph.runner.named_parameters().items():
            if name not in names:
                parameter.grad = None


def _equal(first: Arguments, second: Arguments) -> bool:
    ours, theirs = leaves_of(first), leaves_of(second)
    return len(ours) == len(theirs) and all(
        isinstance(b, Tensor) and torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
        for a, b in zip(ours, theirs, strict=True)
    )
