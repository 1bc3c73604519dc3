"""Capture one step of a module in its first call, and then run it as rewritten graphs."""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture import step_messages as messages
from lightning_unitscale.capture.breaks import (
    graph_breaks_since,
    is_of_dynamo,
    is_watched,
    not_followed,
    num_graph_breaks,
    reason_of,
    wants_dynamos_texts,
)
from lightning_unitscale.capture.executors import Executor
from lightning_unitscale.capture.fallback import Fallback, StaysPlain
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.graph_variants import (
    GraphBackend,
    GraphCall,
    GraphReached,
    Interpreter,
    NotOneGraphError,
    StepState,
    stop_at_graph,
)
from lightning_unitscale.capture.held_inputs import KeepingHeld, holds_inputs
from lightning_unitscale.capture.module_state import ModuleState, SecondCapture
from lightning_unitscale.capture.patches import kept_whole, opened_layers
from lightning_unitscale.capture.side_effects import UntracedCalls, plain_forward
from lightning_unitscale.compiling import is_compiling, is_exporting
from lightning_unitscale.functional.scale import is_transforming
from lightning_unitscale.patching import nothing, shadowed

_DEPLOY = "Use the result of transforms.deploy(module, *example_args)"


class _TracedFunction:
    """Function of a step as Dynamo traces it. Its graphs go to the step."""

    def __init__(self, step: StepState) -> None:
        self._step = step
        self.reset()

    def reset(self) -> None:
        """Forget the functions that Dynamo captured."""
        self._running: Executor = "eager"
        self._callables: dict[Executor, Callable[..., Any]] = {}
        self._backends: dict[Executor, GraphBackend] = {}
        owner = self._step.owner
        self._untraced = UntracedCalls(
            lambda: owner.untraced(owner.module),
            lambda function: self.traced(self._running, function),
        )

    def compiled(self, executor: Executor) -> Callable[..., Any]:
        """Return the function, which is captured in its first call."""
        if executor not in self._callables:
            self._callables[executor] = self.traced(executor, self._step.captured)
        return self._callables[executor]

    def traced(self, executor: Executor, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return another function that is captured as a part of the step."""
        # One backend for all, since Dynamo recaptures when the backend changes.
        backend = GraphBackend(weakref.ref(self._step), executor)
        return torch.compile(function, backend=self._backends.setdefault(executor, backend))

    @contextlib.contextmanager
    def capturing(self, executor: Executor, *, passes_over: bool) -> Iterator[None]:
        """Capture a call of the step, or find the earlier capture, in this context."""
        step, owner = self._step, self._step.owner
        if capture.MISSES_THAWING:
            step.forget_if_thawed()
        step.num_graph_calls = 0
        self._running = executor
        getattr(owner.partition_fn, "begin_step", nothing)()
        with (
            shadowed(owner, is_running=True),
            capture.capture_settings(passes_over=passes_over),
            kept_whole([function for each in owner.passes for function in each.kept_whole]),
            opened_layers(owner.changes_function),
            plain_forward(owner.module),
            step.postponed.recording(),
            self._untraced.replaced(is_rehearsing=step.is_rehearsing),
        ):
            yield


class CapturedStep(StepState):
    """Replacement for one method of a module: the same call, run as rewritten graphs."""

    def __init__(self, owner: ModuleState, name: str, function: Callable[..., Any]) -> None:
        super().__init__(owner, name, function)
        self.__name__ = name
        self.__doc__ = function.__doc__
        # Called with the step and the arguments of a call or of a rehearsal.
        self.before_call: Callable[..., None] | None = None
        self.before_rehearsal: Callable[..., None] | None = None
        # Contexts that last from each call to its backward pass, if a callback ends them there.
        self.until_backward: contextlib.ExitStack | None = None
        self.progress = messages.CaptureProgress(self.title, lambda line: owner.say(line))
        self.fallback = Fallback(self, self.progress.capturing)
        self.second_capture = SecondCapture(owner)
        self._function = _TracedFunction(self)
        self.reset()

    @property
    def __code__(self) -> types.CodeType:
        """Return the user's code, since ``torch.export`` reads where a ``forward`` was written."""
        return self.__wrapped__.__code__

    @override
    def reset(self) -> None:
        super().reset()
        self._function.reset()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and then make the postponed calls."""
        if not self.owner.is_attached or self.owner.is_running:
            # Another wrapper still calls it after it was detached, or another step calls it.
            return self.__wrapped__(*args, **kwargs)
        if self.until_backward is not None:
            self.until_backward.close()  # the last call may have had no backward pass
        if is_exporting():
            return self._run_within("eager", args, kwargs)
        if self.before_call is not None:
            self.before_call(self, args, kwargs)
        # An interpreter needs the graph as captured, which only the eager executor keeps.
        executor = self.owner.executor if self.interpreter is None else "eager"
        # Within another captured step, our own call does not exist.
        passes = () if is_compiling() else tuple(self.owner.passes)
        with self.owner.standing_in():
            for graph_pass in passes:
                graph_pass.before_step(self.owner.module)
            result = self._run(executor, args, kwargs)
        for graph_pass in passes:
            graph_pass.after_step(self.owner.module, result)
        self.postponed.replay()
        self.second_capture.look(self.graph_breaks, partial(self._trace_anew, args, kwargs))
        if self.until_backward is not None and torch.is_grad_enabled() and holds_inputs():
            # Hooks before the backward pass may write into tensors that are recomputed.
            self.until_backward.enter_context(KeepingHeld())
        return result

    def rehearse(self, interpreter: Interpreter, *args: Any, **kwargs: Any) -> Any:
        """Run the step eagerly with its graphs in ``interpreter``, and log and keep nothing."""
        with self._rehearsing(interpreter, args, kwargs):
            return self._run("eager", args, kwargs)

    @contextlib.contextmanager
    def _rehearsing(
        self, interpreter: Interpreter, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        with shadowed(self, interpreter=interpreter, is_rehearsing=True):
            try:
                if self.before_rehearsal is not None:
                    self.before_rehearsal(*args, **kwargs)
                yield
            finally:
                self.postponed.discard()

    def graph_call(self, *args: Any, **kwargs: Any) -> GraphCall:
        """Return the graph that a call would run, with its inputs. The step itself does not run."""
        if is_compiling() or is_transforming():
            raise NotOneGraphError("it is called within another transform")
        if self.graph_breaks:
            raise NotOneGraphError(*self.graph_breaks)
        num_breaks = num_graph_breaks()
        try:
            return self.stop_at_graph(self.captured, args, kwargs)
        except NotOneGraphError:
            # A break that the user asks for is not an error.
            self.note_breaks_since(num_breaks)
            raise
        except Exception as error:
            inner = self.forget_after(error)
            if is_of_dynamo(inner):
                raise NotOneGraphError(reason_of(inner)) from None
            raise inner from None

    def stop_at_graph(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GraphCall:
        """Return the graph that a call of ``function`` would run in place of the step."""
        num_breaks = num_graph_breaks()
        try:
            with (
                self._rehearsing(stop_at_graph, args, kwargs),
                self._function.capturing("eager", passes_over=False),
                capture.no_graph_breaks(),
            ):
                if not_followed((args, kwargs)) is not None:
                    raise NotOneGraphError("Dynamo does not follow the class of its inputs")
                self._function.traced("eager", function)(*args, **kwargs)
        except GraphReached as reached:
            if breaks := graph_breaks_since(num_breaks):
                raise NotOneGraphError(*breaks) from None
            return GraphCall(self, *reached.args)
        raise NotOneGraphError(messages.NO_REASON)

    def _trace_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace a call as if nothing was captured, and forget it. Raise if it is not one graph."""
        num_graph_calls = self.num_graph_calls
        try:
            with shadowed(self, names=Names(), graphs=[]):
                self.stop_at_graph(capture.with_own_code(self.__wrapped__), args, kwargs)
        finally:
            self.num_graph_calls = num_graph_calls

    def replay(self, interpreter: Interpreter, *args: Any, **kwargs: Any) -> Any:
        """Run the step eagerly with its graphs in ``interpreter``, and then log."""
        with shadowed(self, interpreter=interpreter):
            result = self._run("eager", args, kwargs)
        self.postponed.replay()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep:
        """Return the step of the same name of the copied owner."""
        copy.deepcopy(self.owner, memo)
        # During that copy the owner has no steps yet. It replaces this one later.
        return memo.get(id(self), self)

    def __reduce__(self) -> Any:
        raise self.owner.not_to_be_pickled(self.name)

    def _run(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_compiling():
            return self._run_within(executor, args, kwargs)
        if is_transforming():
            return self._run_transformed(args, kwargs)
        if self.fallback.is_due(executor):
            self.num_graph_calls = 0
            return self.__wrapped__(*args, **kwargs)
        if self.second_capture.begin(self.graph_breaks):
            self.forget()
        self.forget_before_limit()
        num_graphs, num_breaks = len(self.graphs), num_graph_breaks()
        # Under rules, the uncaptured step would be another model.
        passes_over = not self.owner.changes_function
        try:
            with (
                self._function.capturing(executor, passes_over=passes_over),
                self.fallback.trying(executor, self.captured, *args, *kwargs.values()),
            ):
                self.refused = not_followed((args, kwargs))
                if self.refused is not None:
                    self.fallback.refuse_under_rules(
                        f"it is called with a {self.refused}",
                        "Dynamo does not follow that class",
                        "Pass ordinary tensors, such as image.as_subclass(torch.Tensor)",
                    )
                    result = self.__wrapped__(*args, **kwargs)
                else:
                    result = self._function.compiled(executor)(*args, **kwargs)
        except StaysPlain as reason:
            if self.is_rehearsing:
                self.forget_after(reason)
                raise messages.capture_ended(self, str(reason)) from None
            return self.fallback.run_plain(str(reason), args, kwargs)
        except Exception as error:
            inner = self.forget_after(error)
            if is_of_dynamo(inner):
                cause = inner if wants_dynamos_texts() else None
                raise messages.not_captured(self, inner) from cause
            if inner is error:
                raise
            raise inner from None
        if not self.num_graph_calls and is_watched():
            # Under such a mode Dynamo skips a step, permanently unless Dynamo is reset.
            capture.forget_captures(self.captured)
        breaks = self.note_breaks_since(num_breaks)
        if result is not None or self.postponed.calls:
            # Otherwise the step would have skipped this batch.
            messages.warn_if_nothing_ran(self)
        messages.warn_of_saving(self, breaks)
        self.fallback.note_call(result, *args, **kwargs)
        if self.interpreter is None:
            too_many = self.recaptures.after_call(has_captured=len(self.graphs) > num_graphs)
            if too_many is not None and self.owner.changes_function:
                messages.warn_of_captures(self, too_many)
            elif too_many is not None and torch.is_grad_enabled():
                self.fallback.stay_plain(too_many)
            planning = getattr(self.owner.partition_fn, "planning_seconds", 0.0)
            self.progress.report(len(self.graphs), planning)
        return result

    def _run_within(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run within another capture, which may trace the user's own code."""
        if not self.owner.changes_function:
            return self.__wrapped__(*args, **kwargs)
        if is_exporting():
            self.fallback.refuse_under_rules(
                "it is exported", "An export contains the unscaled model", _DEPLOY
            )
        return torch.compiler.disable(self._run)(executor, args, kwargs)

    def _run_transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run uncaptured inside ``torch.func``'s transforms, as Dynamo would from then on."""
        self.fallback.refuse_under_rules(
            "it runs within a torch.func transform", "No graph is captured there", _DEPLOY
        )
        messages.warn_once(
            self,
            f"{self.title}: called within a torch.func transform, where no graph is captured. "
            "So this call runs uncaptured, neither rewritten nor observed. Call it outside of "
            "torch.func, or transform the unscaled module, which computes the same numbers.",
        )
        return self.__wrapped__(*args, **kwargs)
