"""One step of a module, captured when it is first called and then run as rewritten graphs."""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from lightning_unitscale.capture.compiled_graph import (
    CompiledGraph,
    GraphBackend,
    GraphCall,
    GraphReached,
    Interpreter,
    NotOneGraphError,
    stop_at_graph,
)
from lightning_unitscale.capture.fallback import Fallback, StaysPlain
from lightning_unitscale.capture.recaptures import Recaptures, SecondCapture
from lightning_unitscale.capture.side_effects import Postponed, UntracedCalls, plain_forward
from lightning_unitscale.capture.step_messages import (
    NO_REASON,
    CaptureError,
    CaptureProgress,
    StepMessages,
)
from lightning_unitscale.compiling import is_compiling, is_exporting
from lightning_unitscale.dynamo import capture
from lightning_unitscale.dynamo.breaks import (
    Reason,
    graph_breaks_since,
    is_of_dynamo,
    is_watched,
    not_followed,
    num_graph_breaks,
    reason_of,
    wants_dynamos_texts,
)
from lightning_unitscale.dynamo.executors import Executor
from lightning_unitscale.dynamo.patches import kept_whole, opened_layers
from lightning_unitscale.functional.scale import is_transforming
from lightning_unitscale.graph.nodes import Names
from lightning_unitscale.patching import nothing, shadowed

if TYPE_CHECKING:
    from lightning_unitscale.capture.steps import ModuleSteps

_DEPLOY = "Use the plain module that transforms.deploy(module, *example_args) makes"


class CapturedStep:
    """Stands in for one method of a module: the same call, run as rewritten graphs."""

    def __init__(self, owner: ModuleSteps, name: str) -> None:
        self.owner = owner
        self.name = name
        self.__wrapped__ = owner.original(name)
        self._captured = capture.with_own_code(self.__wrapped__)
        self.__name__ = name
        self.__doc__ = self.__wrapped__.__doc__
        # Runs the graphs in their place, if there is one.
        self.interpreter: Interpreter | None = None
        self.is_rehearsing = False  # nothing that the step does is to remain
        # Called with the step and the arguments of a call, or with those of a rehearsal.
        self.before_call: Callable[..., None] | None = None
        self.before_rehearsal: Callable[..., None] | None = None
        self.messages = StepMessages(self)
        self.progress = CaptureProgress(self.title, lambda line: owner.say(line))
        self.fallback = Fallback(self)
        self.second_capture = SecondCapture(self)
        self.recaptures = Recaptures(self)
        self.reset()

    @property
    def __code__(self) -> types.CodeType:
        """The user's own code: ``torch.export`` asks a ``forward`` where it was written."""
        code: types.CodeType = self.__wrapped__.__code__
        return code

    def reset(self) -> None:
        """Forget what was captured."""
        self.names = Names()
        self.graphs: list[CompiledGraph] = []
        self.graph_breaks: list[Reason] = []
        self.num_graph_calls = 0  # in the last call of the step
        self.recaptures.reset()
        self.messages.has_warned = False
        self._running: Executor = "eager"
        self._callables: dict[Executor, Callable[..., Any]] = {}
        self._backends: dict[Executor, GraphBackend] = {}
        self.postponed = Postponed(self.owner.module, self.__wrapped__, self.owner.defer)
        self._untraced = UntracedCalls(
            lambda: self.owner.untraced(self.owner.module),
            lambda function: self._traced(self._running, function),
        )
        self._flags: list[bool] = []
        # Class of an input for which the last call ran as it is.
        self.refused: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, and then do what was held back meanwhile."""
        if not self.owner.is_attached:
            # Detached, but somebody had wrapped it and still calls it.
            return self.__wrapped__(*args, **kwargs)
        if is_exporting():
            return self._run_within("eager", args, kwargs)
        if self.before_call is not None:
            self.before_call(self, args, kwargs)
        # An interpreter needs the graph as captured; only the eager executor keeps it that way.
        executor = self.owner.executor if self.interpreter is None else "eager"
        # Within somebody else's captured step there is no call of ours.
        passes = () if is_compiling() else tuple(self.owner.passes)
        with self.owner.standing_in():
            for graph_pass in passes:
                graph_pass.before_step(self.owner.module)
            result = self._run(executor, args, kwargs)
        for graph_pass in passes:
            graph_pass.after_step(self.owner.module, result)
        self.postponed.replay()
        self.second_capture.look(args, kwargs)
        return result

    def rehearse(self, interpreter: Interpreter, *args: Any, **kwargs: Any) -> Any:
        """Run the step with ``interpreter`` running its graphs, eagerly; log and keep nothing."""
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
        """The graph that a call would run, with its inputs; nothing of the step has run then."""
        if is_compiling() or is_transforming():
            raise NotOneGraphError("it is called within another transform")
        if self.graph_breaks:
            raise NotOneGraphError(*self.graph_breaks)
        num_breaks = num_graph_breaks()
        try:
            return self.stop_at_graph(self._captured, args, kwargs)
        except NotOneGraphError:
            # A break that the user asks for is no error.
            self._note_breaks_since(num_breaks)
            raise
        except Exception as error:
            inner = self._after_error(error)
            if is_of_dynamo(inner):
                raise NotOneGraphError(reason_of(inner)) from None
            raise inner from None

    def stop_at_graph(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> GraphCall:
        """The graph that a call of ``function``, which stands for the step, would run."""
        num_breaks = num_graph_breaks()
        try:
            with (
                self._rehearsing(stop_at_graph, args, kwargs),
                self._capturing("eager", passes_over=False),
                capture.no_graph_breaks(),
            ):
                if not_followed((args, kwargs)) is not None:
                    raise NotOneGraphError("Dynamo does not follow the class of its inputs")
                self._traced("eager", function)(*args, **kwargs)
        except GraphReached as reached:
            if breaks := graph_breaks_since(num_breaks):
                raise NotOneGraphError(*breaks) from None
            return GraphCall(self, reached.graph, reached.inputs)
        raise NotOneGraphError(NO_REASON)

    def replay(self, interpreter: Interpreter, *args: Any, **kwargs: Any) -> Any:
        """Run the step with ``interpreter`` running its graphs, eagerly; then log for real."""
        with shadowed(self, interpreter=interpreter):
            result = self._run("eager", args, kwargs)
        self.postponed.replay()
        return result

    def invalidate(self) -> None:
        """Have the passes rewrite what was captured again, before the next run of a graph."""
        if any(graph.executor != "eager" for graph in self.graphs):
            self.reset()  # they are compiled only while Dynamo collects its guards
        for graph in self.graphs:
            graph.invalidate()

    def forget(self) -> None:
        """Have the next call captured anew, by Dynamo as well."""
        capture.forget(self._captured)
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep:
        """The step of the same name of the copied owner."""
        owner = copy.deepcopy(self.owner, memo)
        return owner.steps[self.name]

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
        self.second_capture.begin()
        self.recaptures.before_call()
        num_graphs, num_breaks = len(self.graphs), num_graph_breaks()
        # Scaled by rules, what is not captured would be another model.
        passes_over = not self.owner.changes_function
        try:
            with (
                self._capturing(executor, passes_over=passes_over),
                self.fallback.trying(executor, self._captured, *args, *kwargs.values()),
            ):
                self.refused = not_followed((args, kwargs))
                if self.refused is not None:
                    self._refuse_under_rules(
                        f"it is called with a {self.refused}",
                        "Dynamo does not follow that class",
                        "Pass plain tensors, such as image.as_subclass(torch.Tensor)",
                    )
                    result = self.__wrapped__(*args, **kwargs)
                else:
                    result = self._compiled(executor)(*args, **kwargs)
        except StaysPlain as reason:
            if self.is_rehearsing:
                self._after_error(reason)
                raise self.messages.refused(str(reason)) from None
            return self.run_plain(str(reason), args, kwargs)
        except Exception as error:
            inner = self._after_error(error)
            if is_of_dynamo(inner):
                cause = inner if wants_dynamos_texts() else None
                raise self.messages.not_captured(inner) from cause
            if inner is error:
                raise
            raise inner from None
        if not self.num_graph_calls and is_watched():
            # Dynamo passes over a step under such a mode, and ever after, if it is not told.
            capture.forget(self._captured)
        breaks = self._note_breaks_since(num_breaks)
        if result is not None or not self.postponed.is_empty:
            # Otherwise the step has skipped this batch.
            self.messages.warn_if_nothing_ran(self.refused)
        self.messages.warn_of_saving(breaks)
        self.fallback.note_call(result, *args, **kwargs)
        if self.interpreter is None:
            self.recaptures.after_call(has_captured=len(self.graphs) > num_graphs)
            planning = getattr(self.owner.partition_fn, "planning_seconds", 0.0)
            self.progress.report(len(self.graphs), planning)
        return result

    def run_plain(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the user's own method in place of what was undone, and from now on."""
        self._after_error(RuntimeError(reason))
        self.num_graph_calls = 0
        try:
            with self.postponed.recording():
                result = self.__wrapped__(*args, **kwargs)
        except Exception:  # the user's
            self.postponed.discard()
            raise
        self.fallback.stay_plain(reason)
        return result

    def _note_breaks_since(self, count: int) -> list[Reason]:
        breaks = graph_breaks_since(count)
        self.graph_breaks += breaks
        self.owner.graph_breaks += breaks
        return breaks

    @contextlib.contextmanager
    def _capturing(self, executor: Executor, *, passes_over: bool) -> Iterator[None]:
        """Within this context a call of the step is captured, or finds what was captured."""
        if capture.MISSES_THAWING:
            self._forget_if_thawed()
        self.num_graph_calls = 0
        self._running = executor
        getattr(self.owner.partition_fn, "begin_step", nothing)()
        with (
            capture.capture_settings(passes_over=passes_over),
            kept_whole([function for each in self.owner.passes for function in each.kept_whole]),
            opened_layers(self.owner.changes_function),
            plain_forward(self.owner.module),
            self.postponed.recording(),
            self._untraced.replaced(is_rehearsing=self.is_rehearsing),
        ):
            yield

    def _after_error(self, error: BaseException) -> BaseException:
        """Forget what was captured, and say which error it was that Dynamo may have wrapped."""
        self.postponed.discard()
        # Dynamo never looks again at a frame in which an error was raised; the next call may.
        self.forget()
        return capture.original_error(error)

    def _forget_if_thawed(self) -> None:
        """Recapture when other parameters want gradients: each needs units of its own."""
        flags = [param.requires_grad for param in self.owner.module.parameters()]
        if self._flags and flags != self._flags:
            self.forget()
        self._flags = flags

    def _run_within(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run within somebody else's capture, which may look into the user's code if it is that."""
        if not self.owner.changes_function:
            return self.__wrapped__(*args, **kwargs)
        if is_exporting():
            self._refuse_under_rules("it is exported", "An export has the plain model", _DEPLOY)
        return torch.compiler.disable(self._run)(executor, args, kwargs)

    def _run_transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run below ``torch.func.grad``, ``vmap``, ... as it is, as Dynamo would for ever after."""
        self._refuse_under_rules(
            "it runs within a torch.func transform", "No graph is captured there", _DEPLOY
        )
        self.messages.warn_once(
            f"{self.title}: called within a torch.func transform, which no graph is captured "
            "in, so this call runs as it is, neither rewritten nor observed. Expected calls "
            "outside of one; transform the plain module, of which this call has the numbers."
        )
        return self.__wrapped__(*args, **kwargs)

    def _compiled(self, executor: Executor) -> Callable[..., Any]:
        if executor not in self._callables:
            self._callables[executor] = self._traced(executor, self._captured)
        return self._callables[executor]

    def _traced(self, executor: Executor, function: Callable[..., Any]) -> Callable[..., Any]:
        # One backend for all: Dynamo recaptures when it meets another.
        backend = self._backends.setdefault(executor, GraphBackend(weakref.ref(self), executor))
        return capture.compile_function(function, backend)

    @property
    def title(self) -> str:
        """The module's class and the method."""
        return f"{type(self.owner.module).__name__}.{self.name}"

    def _refuse_under_rules(self, reason: str, need: str, advice: str) -> None:
        """Raise an error if what would run in place of the graphs is another model."""
        if self.owner.changes_function and not self.fallback.awaits_rules:
            raise CaptureError.by_rules(self.title, reason, need, advice)
