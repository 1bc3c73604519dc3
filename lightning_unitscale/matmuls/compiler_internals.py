"""Private names of torch's compilers, Dynamo and Inductor; checked on torch 2.13 and 2.11.

``joint_custom_post_pass`` runs on the joint graph of both passes, behind Inductor's patterns for
attention, and before the graph is parted: a partitioner keeps to ``recompute`` and ``ac_graph_id``
in the ``meta`` of a node, and does not compute an operator again that it does not know.
``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass`` run on the forward and on the
backward graph, before and after Inductor decides whether a matmul and a sum run as one; its
decisions should be those of a graph without units. A pass without a ``uuid`` keeps both of
Inductor's caches out, so that nobody else is handed a rewritten graph and no rewritten one is
missed. AOTAutograd numbers what it compiles with ``AOT_COUNTER``. Frames of
``CompiledFxGraph.__call__`` tell which compiled graph calls a kernel, those of
``_compile_fx_inner`` that Inductor is only trying kernels out, and the caller of
``OpOverload.__call__`` is the code that was made for a graph. That code has ``mm`` and its like by
a global name, ``extern_kernels``.

``innermost_backend`` tells who compiles, of the context that a compiled function keeps, and
``callback_handler`` calls before anything is compiled.

``joint_custom_pre_pass`` runs on the joint graph of both, and on the only one of a step without
gradients, before Inductor changes anything but what its tables of decompositions take to pieces
while the step is traced. An operator that a pass has put there is given tensors with the strides
that eager mode would give it only if its node says so, in ``eager_input_vals``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import fx
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import innermost_backend
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
    """What code of Inductor's calls operators by, which calls torch's own kernels for matmuls."""

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
        # The dispatcher tells a profiler, and modes.
        if "out" not in kwargs or is_profiling() or num_modes():
            return function(*args, **kwargs)
        return kernels.get(args[0].device.type, function)(*args, **kwargs)

    return run


def pass_by_overrides(code_globals: dict[str, Any]) -> None:
    """Let a graph's code call torch's kernels where ``KernelOverrides`` has others."""
    functions = code_globals.get("extern_kernels")
    if functions is not None and not isinstance(functions, _PastDispatcher):
        code_globals["extern_kernels"] = _PastDispatcher(functions)


_LIBRARY = torch.library.Library("lightning_unitscale", "FRAGMENT")


def define_operator(schema: str, run: Kernel, fake: Kernel, *tags: torch.Tag) -> None:
    """Define an operator for compiled graphs, on all devices and in no CUDA graph."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe, *tags))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightning_unitscale::{name}", fake, lib=_LIBRARY)


# By setting, what the user has set; in torch 2.13 a setting is one of a context of Python. Not in a
# pass, which torch copies with its settings.
_BEFORE: ContextVar[Mapping[str, Any]] = ContextVar(
    "lightning_unitscale.settings", default=MappingProxyType({})
)


class GraphPass(CustomGraphPass):
    """A pass over what Inductor compiles, after the passes that the user has set."""

    def __init__(self, setting: str, rewrite: Callable[[fx.Graph], None]) -> None:
        self._setting = setting
        self._rewrite = rewrite
        self._before: Any = None
        # A pass that the user has set meanwhile, or a ``config.patch``, may hold it for longer.
        self._is_installed = False

    def install(self) -> None:
        """Put it into Inductor's configuration, of this context of Python at least."""
        self._is_installed = True
        before = getattr(config, self._setting)
        # A ``config.patch`` that began before it was removed has put it back on leaving.
        if before is not self:
            self._before = before
            _BEFORE.set({**_BEFORE.get(), self._setting: before})
            setattr(config, self._setting, self)

    def remove(self) -> None:
        """Put the user's own back, unless he has set another one meanwhile."""
        self._is_installed = False
        if getattr(config, self._setting) is self:
            setattr(config, self._setting, _BEFORE.get().get(self._setting, self._before))

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes, then this one while it is installed."""
        before = _BEFORE.get().get(self._setting, self._before)
        for user_pass in before if isinstance(before, (list, tuple)) else [before]:
            if user_pass is not None:
                user_pass(graph)
        if self._is_installed:
            self._rewrite(graph)
        else:  # it was removed on another thread
            self.remove()

    def uuid(self) -> None:
        """None: what is compiled with it is not cached."""


def guard_by(check: Callable[[], bool], text: str) -> bool:
    """Have Dynamo run what it compiles only while this holds; ``False`` if it compiles nothing."""
    context = TracingContext.try_get()
    if context is None or CompileContext.try_get() is None:
        return False

    def create(builder: Any, _: Guard) -> None:
        add = functools.partial(builder.guard_manager.root.add_lambda_guard, lambda _: check())
        try:
            add([text], None)
        except TypeError:  # of an older torch, which is not told where the user's code is
            add([text])

    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))
    return True


class _Known:
    """The number of the next graph, if all that Dynamo keeps was compiled for sessions."""

    number = 0


def note_compiled() -> None:
    """Note that a graph is being compiled for a session."""
    _Known.number += 1


def forget_others(*, always: bool) -> None:
    """Have all compiled again, if some of it was not compiled for a session, or ``always``."""
    # Dynamo keeps what it compiles with the code of a function, for every module of the class and
    # for every later fit. What was compiled in a plain run has no operators of ours, so a later
    # session would run it as it is. What was compiled in another session serves this one as well.
    number = next(AOT_COUNTER)
    if always or number != _Known.number:
        torch.compiler.reset()
    _Known.number = number + 1


def is_of_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph is of its backward pass, or of a gradient within the step."""
    is_gradient = node.meta.get("partitioner_tag") == "is_backward"
    return is_gradient or bool(node.meta.get("autograd_backward"))


def note_strides(node: fx.Node, args: Any) -> None:
    """Have an operator that needs exact strides get its tensors as these fake ones are."""
    node.meta["eager_input_vals"] = (args, {})


def keeping_whole(operators: Sequence[str]) -> Callable[[], None]:
    """Let Inductor take no operators of aten to pieces in what it compiles from now on."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def take(_: Any = None) -> None:
        if taken:
            return
        # Imported when something is compiled: it takes a second.
        from torch._inductor import decomposition

        overloads = list(map(overload_of, operators))
        # The second is made of the first, once.
        tables = (decomposition.fast_random_decomps(), decomposition.decompositions)
        taken.extend(
            (table, {op: table.pop(op) for op in overloads if op in table}) for table in tables
        )

    def put_back() -> None:
        # A reset of Dynamo has removed it.
        if take in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(take)
        for table, functions in taken:
            table.update(functions)

    callback_handler.register_start_callback(take)
    return put_back


def codes() -> tuple[CodeType, CodeType] | None:
    """Code that calls a compiled graph, and code that compiles; ``None`` where none ever has."""
    if "torch._inductor.compile_fx" not in sys.modules:
        return None
    return _codes()


@functools.cache
def _codes() -> tuple[CodeType, CodeType]:
    from torch._inductor import compile_fx, output_code

    calls: CodeType = output_code.CompiledFxGraph.__call__.__code__
    return calls, inspect.unwrap(compile_fx._compile_fx_inner).__code__


def compiled_parts(module: torch.nn.Module) -> list[Any]:
    """What the user has compiled of a module: itself, parts of it, and methods of its own."""
    parts: list[Any] = []
    for child in module.modules():
        if hasattr(child, "_orig_mod"):
            parts.append(child)
        elif child._compiled_call_impl is not None:
            parts.append(child._compiled_call_impl)
    # Not what ``torch.compiler.disable`` has made, which looks like it but for its configuration.
    methods = vars(module).values()
    return parts + [method for method in methods if hasattr(method, "get_compiler_config")]


def is_by_inductor(compiled: Any) -> bool:
    """Whether Inductor compiles it."""
    # Of a whole graph (``fullgraph=True``) torch does not tell the configuration.
    context = inspect.getclosurevars(compiled.get_compiler_config).nonlocals["self"]
    return getattr(innermost_backend(context.callback), "compiler_name", "") == "inductor"
