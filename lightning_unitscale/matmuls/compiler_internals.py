"""Wrap the private names of Dynamo and Inductor.

- ``joint_custom_pre_pass`` runs on the joint graph, or on the only graph of a step without
  gradients. It precedes all of Inductor's changes except decompositions.
- ``joint_custom_post_pass`` runs on the joint graph after Inductor's attention patterns and before
  partitioning. The partitioner respects ``recompute`` and ``ac_graph_id`` in a node's ``meta``. It
  never recomputes an operator that it does not know.
- ``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass`` run on the forward and on the
  backward graph, before and after Inductor decides whether to fuse a matmul and a sum. Its
  decisions should be those for an unscaled graph.
- The keys of AOTAutograd's cache and of Inductor's contain the ``uuid`` of each pass. A pass whose
  ``uuid`` is ``None`` disables both. The functions that make a key have the graph as ``gm``. For
  the first cache that is Dynamo's graph, and ``self`` has an ``aot_config``. For the second it is
  the graph of one pass. A graph from a cache skips all passes.
- AOTAutograd numbers its graphs with ``AOT_COUNTER``, and keeps the number as ``aot_id``.
- A frame of ``CompiledFxGraph.__call__`` identifies the graph that calls a kernel. A frame of
  ``_compile_fx_inner`` means that Inductor benchmarks kernels.
- The caller of ``OpOverload.__call__`` is a graph's generated code. It calls ``mm`` and similar
  operators through a global name, ``extern_kernels``.
- The frame ``compile_wrapper`` of a compiled function has its ``_TorchDynamoContext`` as ``self``.
  Calling the context compiles another function in the same way.
- ``innermost_backend`` returns the backend of a compiled function's context, and
  ``callback_handler`` calls its callbacks before a compilation.
- An operator that a pass inserts gets tensors with eager strides only if its node has
  ``eager_input_vals``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, FrameType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import OptimizedModule, _TorchDynamoContext, innermost_backend
from torch._dynamo.source import GlobalStateSource
from torch._functorch.aot_autograd import AOT_COUNTER
from torch._guards import CompileContext, Guard, TracingContext
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from lightning_unitscale.matmuls.torch_internals import (
    OVERRIDDEN,
    Kernel,
    is_profiling,
    num_modes,
    overload_of,
)


class _PastDispatcher:
    """A stand-in for ``extern_kernels`` that calls torch's own kernels for matmuls."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        for operator, kernels in list(OVERRIDDEN.items()):
            name, _, variant = operator.partition(".")
            if variant == "out" and hasattr(functions, name):
                setattr(self, name, _past_dispatcher(getattr(functions, name), kernels))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._functions, name)


def _past_dispatcher(function: Kernel, kernels: dict[str, Kernel]) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        # A profiler and modes need a call through the dispatcher.
        if "out" not in kwargs or is_profiling() or num_modes():
            return function(*args, **kwargs)
        return kernels.get(args[0].device.type, function)(*args, **kwargs)

    return run


def pass_by_overrides(code_globals: dict[str, Any]) -> None:
    """Make a graph's code call torch's kernels instead of those of ``KernelOverrides``."""
    functions = code_globals.get("extern_kernels")
    if functions is not None and not isinstance(functions, _PastDispatcher):
        code_globals["extern_kernels"] = _PastDispatcher(functions)


# The user's value of each setting. In torch 2.13 a setting belongs to a Python context. A pass
# cannot hold the values, because torch copies it with its settings.
_BEFORE: ContextVar[Mapping[str, Any]] = ContextVar(
    "lightning_unitscale.settings", default=MappingProxyType({})
)


_MAX_CALLERS = 16  # more than the nested calls from making a key to asking a pass for its uuid


class InductorPass(CustomGraphPass):
    """An Inductor pass that runs after the user's own passes."""

    def __init__(
        self,
        setting: str,
        rewrite: Callable[[fx.Graph], None],
        identity_of: Callable[[fx.Graph], str | None] = lambda _: None,
    ) -> None:
        self._setting = setting
        self._rewrite = rewrite
        self._identity_of = identity_of  # other inputs of a rewrite than the graph's code
        self._before: Any = None
        # A pass that the user set meanwhile, or a ``config.patch``, may keep it after removal.
        self._is_installed = False

    def install(self) -> None:
        """Add the pass to Inductor's configuration, at least for this Python context."""
        self._is_installed = True
        before = getattr(config, self._setting)
        # On exit, a ``config.patch`` that began before the removal restores the pass.
        if before is not self:
            self._before = before
            _BEFORE.set({**_BEFORE.get(), self._setting: before})
            setattr(config, self._setting, self)

    def remove(self) -> None:
        """Restore the user's pass, unless the user has set another one meanwhile."""
        self._is_installed = False
        if getattr(config, self._setting) is self:
            setattr(config, self._setting, _BEFORE.get().get(self._setting, self._before))

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes, then this one while it is installed."""
        for user_pass in self._users():
            user_pass(graph)
        if self._is_installed:
            self._rewrite(graph)
        else:  # it was removed on another thread
            self.remove()

    def uuid(self) -> tuple[Any, ...] | None:
        """Return the part of a cache key for this pass; ``None`` to cache nothing."""
        graph = graph_of_key()
        own = None if graph is None else self._identity_of(graph)
        others = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._users()]
        if own is None or None in others:
            return None
        return own, self._is_installed, tuple(_WHOLE), *others

    def _users(self) -> Sequence[Any]:
        before = _BEFORE.get().get(self._setting, self._before)
        passes = before if isinstance(before, (list, tuple)) else [before]
        return [user_pass for user_pass in passes if user_pass is not None]


def graph_of_key() -> fx.Graph | None:
    """Return the graph whose key is being made, or ``None``."""
    for frame in _callers():
        found = frame.f_locals.get("gm")
        if isinstance(found, fx.GraphModule):
            return found.graph
    return None


def number_of_key() -> int | None:
    """Return the number of AOTAutograd's graph whose key is being made, or ``None``."""
    configs = (getattr(frame.f_locals.get("self"), "aot_config", None) for frame in _callers())
    return next((config.aot_id for config in configs if config is not None), None)


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the nearest callers, which include the functions that make a key."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_CALLERS):
        if frame is not None:
            yield frame
            frame = frame.f_back


def guard_by(check: Callable[[], bool], text: str) -> bool:
    """Add a guard to the code that Dynamo compiles; ``False`` if it compiles none."""
    context = TracingContext.try_get()
    if context is None or CompileContext.try_get() is None:
        return False

    def create(builder: Any, _: Guard) -> None:
        add = functools.partial(builder.guard_manager.root.add_lambda_guard, lambda _: check())
        try:
            add([text], None)
        except TypeError:  # an older torch does not take the place of the user's code
            add([text])

    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))
    return True


class _Compiled:
    """The graphs since the last reset of Dynamo that were compiled for sessions, by number."""

    first = 0
    for_sessions: ClassVar[set[int]] = set()


def note_compiled(number: int | None = None) -> None:
    """Record that a graph, by default the latest, was compiled for a session or cached for one."""
    latest = int(repr(AOT_COUNTER).strip("count()")) - 1
    _Compiled.for_sessions.add(latest if number is None else number)


def forget_others(*, always: bool) -> None:
    """Reset Dynamo if some graph was not compiled for a session, or ``always``."""
    # Dynamo caches graphs by a function's code, for every module of the class and every later fit.
    # A graph from an ordinary run lacks our operators, and a later session would run it unscaled.
    # A graph of another session serves this one as well.
    number = next(AOT_COUNTER)
    if always or not _Compiled.for_sessions.issuperset(range(_Compiled.first, number)):
        torch.compiler.reset()
    _Compiled.first = number + 1
    _Compiled.for_sessions.clear()


def is_of_backward(node: fx.Node) -> bool:
    """Check whether a node of a joint graph computes gradients, of the step or within it."""
    is_gradient = node.meta.get("partitioner_tag") == "is_backward"
    return is_gradient or bool(node.meta.get("autograd_backward"))


def note_strides(node: fx.Node, args: Any) -> None:
    """Give an operator's inputs the strides of these fake tensors."""
    node.meta["eager_input_vals"] = (args, {})


# The operators that Inductor does not decompose now, which a key of its caches must contain.
_WHOLE: list[tuple[str, ...]] = []


def keeping_whole(operators: Sequence[str]) -> Callable[[], None]:
    """Stop Inductor from decomposing some operators of aten, until the result is called."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    whole = tuple(operators)

    def take(_: Any = None) -> None:
        if taken:
            return
        # Imported late, because the import takes a second.
        from torch._inductor import decomposition

        overloads = list(map(overload_of, operators))
        # Inductor creates the second table from the first, once.
        tables = (decomposition.fast_random_decomps(), decomposition.decompositions)
        taken.extend(
            (table, {op: table.pop(op) for op in overloads if op in table}) for table in tables
        )
        _WHOLE.append(whole)

    def put_back() -> None:
        # A reset of Dynamo may have removed the callback.
        if take in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(take)
        for table, functions in taken:
            table.update(functions)
        if taken:
            _WHOLE.remove(whole)

    callback_handler.register_start_callback(take)
    return put_back


def codes() -> tuple[CodeType, CodeType] | None:
    """Return the code that calls compiled graphs and that compiles, ``None`` before any use."""
    if "torch._inductor.compile_fx" not in sys.modules:
        return None
    return _codes()


@functools.cache
def _codes() -> tuple[CodeType, CodeType]:
    from torch._inductor import compile_fx, output_code

    calls: CodeType = output_code.CompiledFxGraph.__call__.__code__
    return calls, inspect.unwrap(compile_fx._compile_fx_inner).__code__


def compiled_parts(module: torch.nn.Module) -> list[Any]:
    """Return the compiled parts of a module: itself, its children and its own methods."""
    parts: list[Any] = []
    for child in module.modules():
        if isinstance(child, OptimizedModule):
            parts.append(child)
        elif child._compiled_call_impl is not None:
            parts.append(child._compiled_call_impl)
    # The results of ``torch.compiler.disable`` look alike but have no configuration.
    methods = filter(inspect.isfunction, vars(module).values())
    return parts + [method for method in methods if hasattr(method, "get_compiler_config")]


def is_by_inductor(compiled: Any) -> bool:
    """Check whether Inductor compiles an object."""
    # For ``fullgraph=True`` torch does not return the configuration, so read its backend.
    return is_inductor(inspect.getclosurevars(compiled.get_compiler_config).nonlocals["self"])


def is_inductor(context: Any) -> bool:
    """Check whether a compiled function's context compiles with Inductor."""
    return getattr(innermost_backend(context.callback), "compiler_name", "") == "inductor"


def compiling_context() -> Any:
    """Return the context of the innermost compiled function that is running, or ``None``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_compiled = frame.f_code.co_name == "compile_wrapper"
        if is_compiled and frame.f_globals.get("__name__") == _TorchDynamoContext.__module__:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
