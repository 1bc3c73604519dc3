"""A module's steps, captured, rewritten by passes and run by an executor.

``steps_of(module)`` is the one place where callbacks and transforms meet: each adds its passes, and
whoever comes first puts the captured steps on the module, whoever leaves last takes them off.
"""

from __future__ import annotations

import copy
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_unitscale.graph import capture
from lightning_unitscale.graph.capture import Executor
from lightning_unitscale.graph.compiled_graph import CompiledGraph, GraphBackend
from lightning_unitscale.graph.deferred import DeferredCalls
from lightning_unitscale.graph.kept_whole import kept_whole
from lightning_unitscale.graph.nodes import Names
from lightning_unitscale.graph.passes import GraphPass, PassRecord, Stage
from lightning_unitscale.graph.steps_report import breaks_list, passes_table
from lightning_unitscale.graph.untraced import Calls, UntracedCalls, plain_forward

LIGHTNING_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_ATTRIBUTE = "_captured_steps"
_NO_REASON = "no tensor operation in it, or a loop breaks the graph and Dynamo passes over it all"

Interpreter = Callable[["CompiledGraph", tuple[Any, ...]], Any]
# Called with the step and the arguments of the call that is about to be made.
BeforeCall = Callable[["CapturedStep", tuple[Any, ...], dict[str, Any]], None]


def steps_of(module: nn.Module) -> ModuleSteps | None:
    """The captured steps of a module, or ``None`` when nothing was attached to it."""
    return module.__dict__.get(_ATTRIBUTE)


class ModuleSteps:
    """The captured steps of one module with the passes that all of them share.

    Args:
        module: Module whose methods are captured; it is changed by :meth:`attach` only.
        step_names: Methods to capture; those the module does not have are left out.
        defer: Methods of the module whose calls are made after the step (``log``, ``log_dict``).
        untraced: Says which methods of which objects are no part of the model, though the step
            calls them (``optimizer.step``).

    Attributes:
        passes: Passes over every graph, in the order they were given.
        records: What the passes did, graph by graph.
        graph_breaks: Reasons of the graph breaks met while capturing.
    """

    def __init__(
        self,
        module: nn.Module,
        step_names: Sequence[str],
        *,
        defer: Sequence[str] = (),
        untraced: Callable[[nn.Module], Calls] | None = None,
    ) -> None:
        self.module = module
        self.defer = tuple(defer)
        self.untraced = untraced
        self.executor: Executor = "eager"
        self.partition_fn: Any = None
        self.passes: list[GraphPass] = []
        self.records: list[PassRecord] = []
        self.graph_breaks: list[str] = []
        self._observers: set[str] = set()
        self._always_observed = False
        self._shadowed = {
            name: module.__dict__[name] for name in step_names if name in module.__dict__
        }
        self.steps = {name: CapturedStep(self, name) for name in step_names}
        self._owners: list[str] = []

    @property
    def owners(self) -> tuple[str, ...]:
        """Who has attached the steps."""
        return tuple(self._owners)

    @property
    def changes_function(self) -> bool:
        """Whether a pass makes the steps compute something else than the user's own code."""
        return any(one.stage is Stage.REPARAMETRIZE for one in self.passes)

    def attach(self, owner: str) -> None:
        """Put the captured steps on the module; safe to call again for another owner."""
        if owner not in self._owners:
            self._owners.append(owner)
        self.module.__dict__[_ATTRIBUTE] = self
        for name, step in self.steps.items():
            self.module.__dict__[name] = step

    def detach(self, owner: str, *passes: GraphPass) -> None:
        """Take the owner's interest and passes away; the last one restores the module. Idempotent.

        Graphs captured so far stay until then, and with them what ``explain()`` says of them.
        """
        if owner in self._owners:
            self._owners.remove(owner)
        self.passes = [one for one in self.passes if one not in passes]
        self._observers.discard(owner)
        if self._owners or steps_of(self.module) is not self:
            return
        attributes = self.module.__dict__
        del attributes[_ATTRIBUTE]
        for name, step in self.steps.items():
            # Whoever has put something over it since takes it away himself.
            if attributes.get(name) is step:
                del attributes[name]
                if name in self._shadowed:
                    attributes[name] = self._shadowed[name]
        self.reset()

    def add_pass(self, one: GraphPass) -> None:
        """Add a pass; every graph is captured anew before its next run."""
        self.passes.append(one)
        self.reset()

    def use_executor(self, executor: Executor) -> None:
        """Run the graphs by another executor from now on."""
        if executor != self.executor:
            self.executor = executor
            self.reset()

    def partition_by(self, partition_fn: Any) -> None:
        """Split forward and backward graphs by ``partition_fn`` from now on, or as torch does.

        The eager executor, which leaves that to autograd, gives way to ``"aot_eager"``.
        """
        self.partition_fn = partition_fn
        if partition_fn is not None and self.executor == "eager":
            self.executor = "aot_eager"
        elif partition_fn is None and self.executor == "aot_eager":
            self.executor = "eager"
        self.reset()

    def reset(self) -> None:
        """Forget every captured graph."""
        self.records.clear()
        self.graph_breaks.clear()
        for step in self.steps.values():
            step.reset()

    def observe(self, owner: str, wanted: bool, *, always: bool = False) -> None:
        """Say whether ``owner`` wants the next steps to run the variant that carries probes.

        With ``always`` every step will, and the plain variant is never compiled.
        """
        self._always_observed |= always
        if wanted or always:
            self._observers.add(owner)
        else:
            self._observers.discard(owner)

    def variants(self) -> tuple[bool, ...]:
        """Which variants a compiled graph needs: plain, observed, or both."""
        if self._always_observed:
            return (True,)
        return (False, True) if any(one.observes for one in self.passes) else (False,)

    @property
    def observed(self) -> bool:
        """Whether anybody wants the next step to carry probes."""
        return bool(self._observers)

    def find_untraced(self) -> Calls:
        """Methods of objects that the next step shall call outside of Dynamo."""
        return () if self.untraced is None else self.untraced(self.module)

    def original(self, name: str) -> Callable[..., Any]:
        """The user's own method, unwrapped."""
        if name in self._shadowed:
            shadowed: Callable[..., Any] = self._shadowed[name]
            return shadowed
        method: Callable[..., Any] = getattr(type(self.module), name).__get__(self.module)
        return method

    def explain(self) -> str:
        """A table of every pass over every graph, and the graph breaks with their reasons."""
        parts = [passes_table(self.records), breaks_list(self.graph_breaks)]
        parts += [text for one in self.passes if (text := one.report())]
        return "\n\n".join(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleSteps:
        """A copy for the copied module: the same passes, nothing captured yet."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.module = copy.deepcopy(self.module, memo)
        new.defer = self.defer
        new.untraced = self.untraced
        new.executor = self.executor
        new.partition_fn = copy.deepcopy(self.partition_fn, memo)
        new.passes = copy.deepcopy(self.passes, memo)
        new.records, new.graph_breaks = [], []
        new._observers = set(self._observers)
        new._always_observed = self._always_observed
        new._shadowed = copy.deepcopy(self._shadowed, memo)
        new.steps = {name: CapturedStep(new, name) for name in self.steps}
        for name, step in self.steps.items():
            memo[id(step)] = new.steps[name]
        for name, step in self.steps.items():
            # A transform's own object goes with the copy; a callback's method would take the
            # callback, and its Trainer, along.
            if not isinstance(step.before_call, (types.FunctionType, types.MethodType)):
                new.steps[name].interpreter = copy.deepcopy(step.interpreter, memo)
                new.steps[name].before_call = copy.deepcopy(step.before_call, memo)
        new._owners = list(self._owners)
        return new

    def __reduce__(self) -> Any:
        raise _not_to_be_pickled(self.module, next(iter(self.steps)))


class CapturedStep:
    """Stands in for one method of a module: the same call, run as rewritten graphs."""

    def __init__(self, owner: ModuleSteps, name: str) -> None:
        self.owner = owner
        self.name = name
        self.__wrapped__ = owner.original(name)
        self.__name__ = name
        self.__doc__ = self.__wrapped__.__doc__
        self.interpreter: Interpreter | None = None
        self.is_rehearsing = False
        self.before_call: BeforeCall | None = None
        self.reset()

    @property
    def __code__(self) -> types.CodeType:
        """The user's own code: ``torch.export`` asks a ``forward`` where it was written."""
        code: types.CodeType = self.__wrapped__.__code__
        return code

    def reset(self) -> None:
        """Forget what was captured."""
        # Names are a step's own: whether a validation ran before the training must not change them.
        self.names = Names()
        self.graphs: list[CompiledGraph] = []
        self.graph_breaks: list[str] = []
        self.num_graph_calls = 0
        self._warned = False
        self._running: Executor = "eager"
        self._compiled: dict[Executor, Callable[..., Any]] = {}
        self._backends: dict[Executor, GraphBackend] = {}
        self._deferred: DeferredCalls | None = None
        self._untraced: UntracedCalls | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step and then make the calls that it deferred."""
        if steps_of(self.owner.module) is not self.owner:
            # Detached, but somebody had wrapped it and still calls it.
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_exporting():
            return self._run_within("eager", args, kwargs)
        if self.before_call is not None:
            self.before_call(self, args, kwargs)
        # An interpreter needs the graph as captured; only the eager executor keeps it that way.
        executor = self.owner.executor if self.interpreter is None else "eager"
        # Within somebody else's captured step there is no call of ours.
        hooked = () if torch.compiler.is_compiling() else tuple(self.owner.passes)
        for one in hooked:
            one.before_step(self.owner.module)
        result = self._run(executor, args, kwargs)
        for one in hooked:
            one.after_step(self.owner.module, result)
        if self._deferred is not None:
            self._deferred.replay()
        return result

    def rehearse(self, interpreter: Interpreter, *args: Any, **kwargs: Any) -> Any:
        """Run the step with ``interpreter`` running its graphs, eagerly; log nothing."""
        previous, self.interpreter = self.interpreter, interpreter
        self.is_rehearsing = True
        try:
            return self._run("eager", args, kwargs)
        finally:
            self.interpreter = previous
            self.is_rehearsing = False
            if self._deferred is not None:
                self._deferred.discard()

    def replay(self, interpreter: Interpreter, *args: Any, **kwargs: Any) -> Any:
        """Run the step with ``interpreter`` running its graphs, eagerly; then log for real."""
        previous, self.interpreter = self.interpreter, interpreter
        try:
            result = self._run("eager", args, kwargs)
        finally:
            self.interpreter = previous
        if self._deferred is not None:
            self._deferred.replay()
        return result

    def rewrite_anew(self) -> None:
        """Have the passes rewrite what is captured once more, before the next run of a graph.

        Compiled graphs are captured anew: they can be compiled only while Dynamo looks on.
        """
        if any(one.executor != "eager" for one in self.graphs):
            self.reset()
        for one in self.graphs:
            one.forget_variants()

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedStep:
        """The step of the same name of the copied owner."""
        owner = copy.deepcopy(self.owner, memo)
        return owner.steps[self.name]

    def __reduce__(self) -> Any:
        raise _not_to_be_pickled(self.owner.module, self.name)

    def _run(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._run_within(executor, args, kwargs)
        if self._deferred is None:
            self._deferred = DeferredCalls(self.owner.module, self.owner.defer)
            self._untraced = UntracedCalls(
                self.owner.find_untraced,
                lambda function: self._traced(self._running, function),
            )
        assert self._untraced is not None
        self._untraced.is_rehearsing = self.is_rehearsing
        if executor not in self._compiled:
            self._compiled[executor] = self._traced(executor, self.__wrapped__)
        self.num_graph_calls = 0
        self._running = executor
        begin_step = getattr(self.owner.partition_fn, "begin_step", None)
        if begin_step is not None:
            begin_step()
        num_breaks = capture.num_graph_breaks()
        try:
            with (
                capture.capture_settings(),
                kept_whole([one for each in self.owner.passes for one in each.kept_whole]),
                plain_forward(self.owner.module),
                self._deferred.recording(),
                self._untraced.replaced(),
            ):
                result = self._compiled[executor](*args, **kwargs)
        except Exception as error:
            self._deferred.discard()
            # Dynamo never looks again at a frame in which an error was raised; the next call may.
            capture.forget(self.__wrapped__)
            self.reset()
            inner = capture.original_error(error)
            if inner is error:
                raise
            raise inner from None
        found = capture.graph_breaks_since(num_breaks)
        self.graph_breaks += found
        self.owner.graph_breaks += found
        if result is not None or self._deferred.calls:
            # Otherwise the step has skipped this batch.
            self._warn_if_nothing_ran()
        return result

    def _run_within(self, executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run within somebody else's capture, which may look into the user's code if it is that."""
        if not self.owner.changes_function:
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{type(self.owner.module).__name__}.{self.name} is unit-scaled by rules and "
                "cannot be exported as it is; expected a plain module; export what "
                "lightning_unitscale.transforms.deploy(module, *example_args) returns."
            )
        return torch.compiler.disable(self._run)(executor, args, kwargs)

    def _traced(self, executor: Executor, function: Callable[..., Any]) -> Callable[..., Any]:
        # One backend for all: Dynamo captures anew when it meets another.
        backend = self._backends.setdefault(executor, GraphBackend(weakref.ref(self), executor))
        return capture.compile_function(function, backend)

    def _warn_if_nothing_ran(self) -> None:
        if self.num_graph_calls or self._warned:
            return
        self._warned = True
        reasons = "; ".join(dict.fromkeys(self.owner.graph_breaks)) or _NO_REASON
        warnings.warn(
            f"{type(self.owner.module).__name__}.{self.name}: no graph could be captured, so it "
            f"runs as it is, neither rewritten nor observed ({reasons}). Expected at least one "
            "traceable operation; keep printing, .item() and third-party calls out of the step.",
            stacklevel=4,
        )


def _not_to_be_pickled(module: nn.Module, step: str) -> TypeError:
    return TypeError(
        f"{type(module).__name__}.{step} is captured and cannot be pickled; expected a module "
        "without captured steps; save its state_dict() instead, or pickle the module before the "
        "callbacks or transforms are attached."
    )
