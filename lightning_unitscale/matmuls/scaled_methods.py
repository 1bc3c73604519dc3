"""Replace the methods of a module by stand-ins that run within a session."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import fx, nn
from typing_extensions import override

from lightning_unitscale.capture.module_steps import EVALUATION_STEPS, LIGHTNING_STEPS, steps_of
from lightning_unitscale.capture.operators import RULES
from lightning_unitscale.capture.passes import StepGraph
from lightning_unitscale.compiling import is_exporting
from lightning_unitscale.matmuls.aot_pass import finish_graph, note_matmuls
from lightning_unitscale.matmuls.compiled_formats import FormatsInGraph
from lightning_unitscale.matmuls.compiler_internals import (
    codes,
    compiled_parts,
    forget_others,
    is_by_inductor,
    keeping_whole,
)
from lightning_unitscale.matmuls.gauge import GAUGE, HELD, held_units
from lightning_unitscale.matmuls.joint_graphs import MATMUL
from lightning_unitscale.matmuls.joint_units import UnitsInGraph
from lightning_unitscale.matmuls.kernels import close_session, install_passes, open_session
from lightning_unitscale.matmuls.owners import INSTALLED
from lightning_unitscale.matmuls.rounding import Numerics
from lightning_unitscale.matmuls.session import LOCAL, SESSION, MatmulSession, run_inside
from lightning_unitscale.matmuls.torch_internals import (
    Kernel,
    current_node,
    is_recording,
    is_tracing,
    plain_functions,
)
from lightning_unitscale.matmuls.units import Units
from lightning_unitscale.patching import Shadow, StandIn

_met: weakref.WeakSet[MatmulSession] = weakref.WeakSet()  # sessions that have begun a step


class SessionRewriter:
    """The rewriting of captured graphs, which run op by op, as Inductor's passes would do it."""

    def __init__(self, session: MatmulSession) -> None:
        self._session = session

    def describe(self, graph: StepGraph) -> None:
        """Record the units in which matmuls read the tensors of a captured graph."""
        units = self._session.units
        graph.notes[GAUGE] = lambda: units.gauge
        # It is called after rules rewrite the graph and before it is partitioned.
        graph.notes[HELD] = functools.cache(lambda: held_units(graph))

    def rewrite_joint(self, graph: fx.Graph) -> None:
        """Scale the matmuls of the joint graph, or of the only graph."""
        if self._session.numerics:
            FormatsInGraph(graph, self._session, is_fused=False).run()
        UnitsInGraph(graph, self._session, is_fused=False).run()

    def rewrite_part(self, graph: fx.Graph) -> None:
        """Measure the matmuls of one pass, and call torch's own kernels for them."""
        note_matmuls(graph)
        finish_graph(graph)
        for node in graph.nodes:
            # Saved results keep their meta in the backward graph, where they are inputs.
            if node.op == "call_function" and MATMUL in node.meta:
                node.target = _unwatched(node.target)


def _unwatched(operator: Any) -> Kernel:
    """Return an operator whose kernel is not scaled again, since its graph has scaled it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_inside(operator, *args, **kwargs)

    return run


def running_compiled(session: MatmulSession) -> AbstractContextManager[Any]:
    """Return a context for a step in which the user's compiled parts are scaled and rounded."""
    # For formats, Inductor must not decompose small matmuls, so everything is recompiled. Parts
    # that another backend compiled run uncompiled.
    is_first, module = session not in _met, session.sites.module
    _met.add(session)
    if module is None or not (session.numerics or is_first):
        return contextlib.nullcontext()
    parts = compiled_parts(module)
    # Functions that a module calls may be compiled as well.
    has_compiled = bool(parts) or codes() is not None
    # Scaling works with any backend that calls torch's kernels.
    is_possible = not session.numerics or all(map(is_by_inductor, parts))
    if is_first and is_possible:
        if has_compiled:
            forget_others(always=bool(session.numerics))
        if session.numerics:
            INSTALLED.callback(keeping_whole([rule.operator for rule in RULES]))
    if is_possible:
        return contextlib.nullcontext()
    if is_first:
        warnings.warn(
            f"{type(module).__name__} has parts that were compiled by another backend than "
            "Inductor, whose matmuls cannot be rounded, so they run uncompiled. Expected "
            "torch.compile(backend='inductor'), its default, or none.",
            stacklevel=4,
        )
    return torch.compiler.set_stance("force_eager")


class SessionMethod(StandIn):
    """A stand-in for a method of a module that runs its matmuls in the session."""

    def __init__(self, owner: AttachedSession, name: str, method: Any) -> None:
        super().__init__(method)
        self.owner = owner
        self._name = name
        # Lightning reads parameters one wrapper down, at the end of a user's decorator.
        self.__wrapped__ = getattr(method, "__wrapped__", method)

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording():
            return self.call_recorded(*args, **kwargs)
        called = self.called_by(sys._getframe(1).f_back)
        if not isinstance(called, SessionMethod):
            return called(*args, **kwargs)
        return called.run_as(called._method, *args, **kwargs)

    def call_recorded(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method while a compiler, an export or a trace records it."""
        is_scaled = self.owner.is_running or not self.owner.session.numerics
        if is_scaled or is_exporting() or is_tracing():
            return self._method(*args, **kwargs)
        # A compiled version would not be rounded.
        return torch.compiler.disable(self.run_as)(self._method, *args, **kwargs)

    def run_as(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the method, or its replacement such as pipeline stages, within the session."""
        owner, session = self.owner, self.owner.session
        # A caller may have kept this method after the session's end.
        if SESSION.get() is session or not session.is_open:
            return method(*args, **kwargs)
        # A recomputed checkpoint belongs to the same training step.
        is_new = current_node() is None
        with plain_functions():  # this is not part of the step
            owner.before_call()
            install_passes()
            session.begin_step(is_training=is_new and owner.is_training(self._name))
        with session.running(), running_compiled(session):
            result = method(*args, **kwargs)
        if owner.outlasts_calls and is_new and torch.is_grad_enabled():
            LOCAL.after_call, session.is_after_call = session.ref, True
        with plain_functions():
            owner.after_call(result)
        return result


def run_in_session(
    module: nn.Module, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a replacement for a module's method in the method's session, if it has one."""
    method = vars(module).get(name)
    if not isinstance(method, SessionMethod):
        return run(*args, **kwargs)
    return method.run_as(run, *args, **kwargs)


def begin_microbatch(module: nn.Module, name: str, index: int) -> None:
    """Restart the numbering of matmuls for the next stage, if a session owns them."""
    method = vars(module).get(name)
    if isinstance(method, SessionMethod):
        session = method.owner.session
        session.sites.begin()
        session.units.begin_part(index)


class AttachedSession:
    """A session attached to methods of its module, until :meth:`detach`."""

    method_type: type[SessionMethod] = SessionMethod

    def __init__(
        self,
        module: nn.Module,
        names: Iterable[str],
        units: Units | None = None,
        numerics: Sequence[Numerics] = (),
        *,
        outlasts_calls: bool = False,
    ) -> None:
        self.outlasts_calls = outlasts_calls
        # True if calls train, when the loop reports it. ``None`` means the module's mode.
        self.trains: bool | None = None
        self.session = MatmulSession(
            module, SessionMethod.run_as.__code__, units or Units(), numerics
        )
        self._module = module
        self._steps = steps_of(module)
        self.methods: dict[str, SessionMethod] = {}  # the stand-ins by name
        self._shadows: dict[str, Shadow] = {}
        with ExitStack() as undo:
            undo.callback(self.detach)
            open_session(self.session)
            if self._steps is not None:
                self._steps.rewrite_by(SessionRewriter(self.session))
                self.session.captured = weakref.ref(self._steps)
            for name in names:
                method = self.method_type(self, name, getattr(module, name))
                self.methods[name] = method
                self._shadows[name] = Shadow(module, name, method)
            undo.pop_all()

    def is_training(self, name: str) -> bool:
        """Check whether a call of a method belongs to training."""
        if name in LIGHTNING_STEPS:
            return name not in EVALUATION_STEPS
        return self._module.training if self.trains is None else self.trains

    @property
    def is_running(self) -> bool:
        """Check whether a step runs or is captured, and the steps that it calls with it."""
        is_captured = self._steps is not None and self._steps.is_running
        return is_captured or bool(self.session.threads)

    def before_call(self) -> None:
        """Prepare for a step that is about to begin."""

    def after_call(self, result: Any) -> None:
        """Handle the result of a step."""

    def detach(self) -> None:
        """Restore the methods and torch's kernels. May be called more than once."""
        close_session(self.session)
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.rewrite_by(None)  # once, because another session may use them later
        for shadow in self._shadows.values():
            shadow.remove()
