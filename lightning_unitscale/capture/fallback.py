"""Run a step as the user wrote it if it cannot run captured. A failed call is undone first.

A captured graph is one node of autograd's graph. Hooks of modules inside it never see a gradient.
Hooks of parameters run in another order, because all gradients arrive at once. The node cannot be
differentiated a second time. So a step runs uncaptured if a backward hook is registered, or when a
backward pass is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph as autograd_graph
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.capture.absent_ranks import is_sharded, is_wrapper, wrapped_parts
from lightning_unitscale.capture.breaks import (
    calling_line,
    graph_breaks_since,
    is_users_own,
    is_watched,
    joined_reasons,
    num_graph_breaks,
    reason_raised,
)
from lightning_unitscale.capture.dynamo_capture import around_captures, original_error
from lightning_unitscale.capture.executors import CheckpointNotKept, Executor
from lightning_unitscale.capture.graph_nodes import returned_loss
from lightning_unitscale.capture.graph_variants import StepState
from lightning_unitscale.capture.patches import free_frames_of
from lightning_unitscale.capture.rollback import undoers
from lightning_unitscale.capture.side_effects import find_node_hook, find_recorded_pass
from lightning_unitscale.capture.step_messages import CaptureError, warn_of_staying_plain
from lightning_unitscale.functional.scale import leaving_transforms
from lightning_unitscale.patching import nothing, shadowed

RECORDED = "it takes gradients of gradients (create_graph=True)"


class Refusal(Exception):
    """Error of this package about a request of the user's that no step can run without."""


class StaysPlain(BaseException):
    """Signal that undoes a running step, with the reason. No ``except Exception`` catches it."""


class Fallback:
    """Decides whether the calls of a captured step run the user's own method."""

    # A step that rules scale never does, since that would be another model. It may until the rules
    # have changed the module.

    def __init__(
        self, step: StepState, capturing: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._step = step
        self._capturing = capturing  # around the capture of each function
        self.reason: str | None = None  # reason why all calls run the user's own method, if they do
        self.awaits_rules = False  # rules will scale the step but have changed nothing yet
        self._is_skipped = False  # by Dynamo, which has found nothing to capture
        self._num_hooks = -1  # number of hooks that were registered at the last check
        # True if the last call gave lazy modules their shapes, uncaptured, and before the first
        # call.
        self.awaits_shapes = True
        # The last call, until its backward pass has shown that it can be captured.
        self._pending: Trial | None = None

    @property
    def runs_plain(self) -> bool:
        """Check whether calls run the user's own method, as the last one did."""
        return self.reason is not None or self._is_skipped

    def is_due(self, executor: Executor) -> bool:
        """Check whether a call runs the user's own method, and find hooks of backward passes."""
        if self._step.interpreter is not None:
            return False
        if self._step.owner.stays_plain and self._is_possible:
            self.stay_plain(self._step.owner.stays_plain)
        if self.awaits_shapes:
            # Dynamo would draw the first weights of lazy modules before the step's own random
            # numbers, and then restore the generator.
            owner = self._step.owner
            is_left = not owner.changes_function and any(map(is_lazy, owner.module.parameters()))
            self.awaits_shapes = is_left
            if is_left:
                return True
        self._check_node_hooks()
        looks = self._is_possible and executor != "eager" and torch.is_grad_enabled()
        # ``next_id`` grows whenever a hook is registered on anything.
        if self.reason is None and looks and self._num_hooks != RemovableHandle.next_id:
            self._num_hooks = RemovableHandle.next_id
            if (hook := find_backward_hook(self._step.owner.module)) is not None:
                self.stay_plain(f"{hook}, which a graph runs in another order or not at all")
        return self.reason is not None

    def await_rules(self, awaits: bool) -> None:
        """Note whether rules have yet to scale the step. Once they have, no call runs unscaled."""
        if self.awaits_rules and not awaits:
            self.reason = None
        self.awaits_rules = awaits

    def stay_plain(self, reason: str) -> None:
        """Run the user's own method from now on, and warn of that once."""
        if self.reason is not None:
            return
        self.reason = reason
        if self.awaits_rules:
            return  # a sanity check is unscaled anyway, and later evaluations are recaptured
        warn_of_staying_plain(self._step, reason)
        if torch.is_grad_enabled():
            getattr(self._step.owner.partition_fn, "give_up", nothing)(reason)

    @contextlib.contextmanager
    def trying(
        self, executor: Executor, function: Callable[..., Any], *arguments: Any
    ) -> Iterator[None]:
        """Run a call in this context. If it fails while it is captured, it is undone."""
        module, keep = self._step.owner.module, self._step.postponed.names
        trial = Trial(module, *arguments, keep=keep)
        recaptures, num_breaks = self._step.recaptures, num_graph_breaks()
        recaptures.num_graphs = 0
        if self._is_possible and self._step.graph_breaks and self._may_record:
            # The pass may be in a part of the step whose beginning is not captured again.
            _drop_outgrown_gradients(module)
            trial.begin()

        @contextlib.contextmanager
        def captured(code: CodeType) -> Iterator[None]:
            # Nothing has run before the step's own function is captured.
            own = getattr(function, "__code__", code)
            if code is own and not self._step.num_graph_calls:
                _drop_outgrown_gradients(module)
                if self._is_possible:
                    trial.begin()
            reason = recaptures.note_function(code)
            if reason is not None and (recaptures.is_limited or trial.undo()):
                breaks = joined_reasons(graph_breaks_since(num_breaks))
                raise StaysPlain(f"{reason} ({breaks})" if breaks else reason)
            with self._capturing():
                yield

        def refuse() -> None:
            if executor == "eager" or not self._step.num_graph_calls:
                return
            reason = f"{RECORDED} at {calling_line()}"
            advice = "Leave the budget or compile=True out, or use method='lossless'"
            self.refuse_under_rules(reason, "A compiled graph has no second derivatives", advice)
            if trial.undo():
                raise StaysPlain(reason)

        self._step.error_of_pass = None
        self._pending = None
        try:
            may_skip = not self._step.owner.changes_function
            with (
                leaving_transforms(),
                around_captures(captured, may_skip=may_skip),
                noticing_recorded_passes(refuse),
            ):
                yield
        except Exception as error:
            raise self._undone(trial, error) from None
        if trial.undoers and executor != "eager" and torch.is_grad_enabled():
            self._pending = trial

    def _undone(self, trial: Trial, error: Exception) -> BaseException:
        """Undo a call that has failed, and return the exception to raise."""
        inner = original_error(error)
        is_ours = isinstance(inner, Refusal) or inner is self._step.error_of_pass
        # A second run might not raise it again.
        is_ours = is_ours or is_users_own(inner)
        # Without a plan there would be even less memory.
        if is_ours or isinstance(inner, torch.OutOfMemoryError) or not trial.undo():
            return error
        if isinstance(inner, CheckpointNotKept):
            return StaysPlain(str(inner))
        failure = StaysPlain(f"captured, it fails ({reason_raised(inner)})")
        free_frames_of(error)
        return failure

    def note_call(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """Remember a call until its backward pass has succeeded, and whether it was captured."""
        if self._pending is not None:
            self._pending.call = (returned_loss(result), args, kwargs)
        # Dynamo skips a step that breaks in a loop, for good. The second call may yet be one graph.
        step, was_skipped = self._step, self._is_skipped
        self._is_skipped = bool(step.graph_breaks) and not (step.graphs or is_watched())
        is_for_good = was_skipped and self._is_skipped and step.interpreter is None
        if is_for_good and not step.owner.changes_function and torch.is_grad_enabled():
            self.stay_plain(joined_reasons(step.graph_breaks))

    def through_backward(self, run: Callable[[Any], None], loss: Any) -> None:
        """Run the last call's backward pass. If it fails, undo the call and run it uncaptured."""
        trial, self._pending = self._pending, None
        if trial is None:
            run(loss)
            return
        returned, args, kwargs = trial.call
        factor = None
        if returned is not loss and isinstance(returned, Tensor) and returned.requires_grad:
            (factor,) = torch.autograd.grad(loss, returned, retain_graph=True, allow_unused=True)
        parameters = list(self._step.owner.module.parameters())
        before = [None if param.grad is None else param.grad.clone() for param in parameters]
        try:
            run(loss)
        except Exception as error:
            failure = self._undone(trial, error)
            if not isinstance(failure, StaysPlain):
                raise
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        else:
            return
        result = self.run_plain(str(failure), args, kwargs)
        self._step.postponed.discard()  # the call has logged already
        plain = returned_loss(result)
        run(plain if factor is None else plain * factor)

    def run_plain(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the user's own method in place of the undone call, and from now on."""
        step = self._step
        step.forget()
        try:
            with step.postponed.recording():
                result = step.__wrapped__(*args, **kwargs)
        except Exception:  # the user's
            step.postponed.discard()
            raise
        self.stay_plain(reason)
        return result

    def refuse_under_rules(self, reason: str, need: str, advice: str) -> None:
        """Raise an error if the step in place of the graphs would be another model."""
        if self._step.owner.changes_function and not self.awaits_rules:
            raise CaptureError.by_rules(self._step.title, reason, need, advice)

    def _check_node_hooks(self) -> None:
        """Do not capture a step that hooks nodes of autograd, since a graph has other nodes."""
        if self.reason is not None or self._node_hook is None or not torch.is_grad_enabled():
            return
        reason = f"it registers a hook on a node of autograd's graph at {self._node_hook}"
        self.refuse_under_rules(reason, "A captured graph has other nodes", "Hook a tensor instead")
        self.stay_plain(f"{reason}, and a captured graph has other nodes")

    @functools.cached_property
    def _node_hook(self) -> str | None:
        return find_node_hook(self._step.owner.module, self._step.__wrapped__)

    @functools.cached_property
    def _may_record(self) -> bool:
        """Check whether the step's code mentions gradients of gradients."""
        return find_recorded_pass(self._step.owner.module, self._step.__wrapped__) is not None

    @property
    def _is_possible(self) -> bool:
        is_scaled = self._step.owner.changes_function and not self.awaits_rules
        return self._step.interpreter is None and not is_scaled


class Trial:
    """Record of a step's call that can undo it."""

    # Covered: random states, gradients, and everything in a module but its parameters. A copy of
    # the parameters might not fit, so a call that has changed one cannot be undone.

    def __init__(self, module: nn.Module, *arguments: Any, keep: Collection[str] = ()) -> None:
        self._module = module
        self._keep = keep
        self._takes = any(isinstance(value, Iterator) for value in arguments)
        # The loss and the arguments, after the run.
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any]] = (None, (), {})
        self.undoers: list[Callable[[], object]] = []
        self._before: list[Any] = []

    def begin(self) -> None:
        """Record the state before any of the call has run."""
        # Items taken from an iterator cannot be put back, nor FSDP's state of its gathering.
        # Made lazily: most calls never begin, and this reads all parameters.
        if not self.undoers and not self._takes and not is_sharded(self._module):
            self._before = [_state_of(param) for param in self._module.parameters()]
            self.undoers = list(undoers(self._module, self._keep))

    def undo(self) -> bool:
        """Undo the call, and return whether that was possible."""
        if not self.undoers:
            return False  # parameters may not be read, since FSDP has freed them
        after = list(map(_state_of, self._module.parameters()))
        if len(after) != len(self._before) or not all(map(_is_same, after, self._before)):
            return False
        for undo in reversed(self.undoers):
            undo()
        return True


def _drop_outgrown_gradients(module: nn.Module) -> None:
    """Drop gradients of parameters that a hook gave data of another size, which Dynamo refuses."""
    for param in module.parameters():
        if not is_lazy(param) and param.grad is not None and param.grad.shape != param.shape:
            param.grad = None


def _state_of(parameter: Tensor) -> Any:
    """Return a value that changes with a parameter's numbers, even if its version does not."""
    if is_lazy(parameter):
        return None
    if is_wrapper(parameter):
        # Its class may not support sums, and its parts may have any type.
        return [_state_of(part) for part in wrapped_parts(parameter)]
    where, numbers = parameter.untyped_storage(), parameter.detach()
    checksum = numbers.sum() if numbers.device.type != "meta" else None
    return [where.data_ptr(), parameter._version, checksum]


def _is_same(after: Any, before: Any) -> bool:
    if isinstance(after, list) and isinstance(before, list) and len(after) == len(before):
        return all(map(_is_same, after, before))
    if not isinstance(after, Tensor) or not isinstance(before, Tensor):
        return bool(after == before)
    return torch.equal(after.nan_to_num(), before.nan_to_num())


_OF_MODULES = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
_OF_PARAMETERS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
_OWN_PACKAGE = __name__.partition(".")[0]


def find_backward_hook(module: nn.Module) -> str | None:
    """Name a hook that takes part in a module's backward passes, or return ``None``."""
    for name, kind in _OF_MODULES.items():
        if (hook := _first(getattr(module_hooks, f"_global{name}"))) is not None:
            return f"all modules have a {kind}, {_named(hook)}"
    for path, owner in module.named_modules():
        for name, kind in _OF_MODULES.items():
            if (hook := _first(getattr(owner, name, None))) is not None:
                return f"{path or type(owner).__name__} has a {kind}, {_named(hook)}"
    for path, parameter in module.named_parameters():
        for name, kind in _OF_PARAMETERS.items():
            if (hook := _first(getattr(parameter, name, None))) is not None:
                return f"{path} has a {kind}, {_named(hook)}"
    return None


def _first(hooks: Mapping[int, Any] | None) -> Any:
    """Return the first hook that is not this package's own."""
    for hook in (hooks or {}).values():
        name = getattr(hook, "__module__", None) or type(hook).__module__
        if str(name).partition(".")[0] != _OWN_PACKAGE:
            return hook
    return None


def _named(hook: Any) -> str:
    """Return the hook's name and where it was written."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


@contextlib.contextmanager
def noticing_recorded_passes(notice: Callable[[], None]) -> Iterator[None]:
    """Call ``notice`` before each backward pass with ``create_graph=True``."""
    run = autograd_graph._engine_run_backward
    # Both run in the middle of a step, whose functions Dynamo captures when they are called.
    notice = torch.compiler.disable(notice)

    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.wraps(run)
    def notice_and_run(
        outputs: Any, grad_outputs: Any, keeps_graph: Any, creates_graph: Any, *args: Any, **kw: Any
    ) -> Any:
        if creates_graph:
            notice()
        return run(outputs, grad_outputs, keeps_graph, creates_graph, *args, **kw)

    with shadowed(torch.autograd, _engine_run_backward=notice_and_run):
        yield
