"""Private names of torch, but for those of autograd nodes; checked on torch 2.13 and 2.11.

``torch._C._current_autograd_node`` and ``torch._C._autograd._get_sequence_nr`` tie a backward
product to the forward product that it belongs to: the forward kernel runs right after its autograd
node was made, whose number is the last one that its thread has given out (``nodes.py``).
``Library._destroy`` takes overridden kernels away again, and what ``OpOverload._dispatch_cache``
remembers of them while a compiler traces has to go as well. Frames of ``Module._call_impl`` tell
which module is running, and one of ``_engine_run_backward`` directly below a kernel tells that the
autograd engine itself called it, unless one of ``CheckpointFunction.backward`` or of
``recompute_fn``, within ``_checkpoint_without_reentrant_generator``, comes before: then a
checkpoint runs its body again. What torch keeps of a checkpoint, ``_CheckpointFrame``, is in the
hooks on saved tensors while its body runs, and on the stack when it runs again.

``joint_custom_post_pass`` runs on the joint graph of both passes, behind Inductor's patterns for
attention, and before the graph is parted: a partitioner keeps to ``recompute`` and ``ac_graph_id``
in the ``meta`` of a node, and does not compute an operator again that it does not know.
``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass`` run on the forward and on the
backward graph, before and after Inductor decides whether a product and a sum run as one; its
decisions should be those of a graph without units. A pass without a ``uuid`` keeps both of
Inductor's caches out, so that nobody else is handed a rewritten graph and no rewritten one is
missed. AOTAutograd numbers what it compiles with ``AOT_COUNTER``. Frames of
``CompiledFxGraph.__call__`` tell which compiled graph calls a kernel, those of
``_compile_fx_inner`` that Inductor is only trying kernels out, and the caller of
``OpOverload.__call__`` is the code that was made for a graph. That code has ``mm`` and its like by
a global name, ``extern_kernels``; ``_len_torch_dispatch_stack`` and ``_profiler_enabled`` tell
whether anybody wants to hear of their calls from the dispatcher.

``set_code_exec_strategy`` keeps Dynamo away from code and from what it calls,
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
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import CodeType, FrameType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import innermost_backend
from torch._functorch.aot_autograd import AOT_COUNTER
from torch._guards import CompileContext, detect_fake_mode
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.autograd import graph as autograd_graph
from torch.utils import checkpoint as checkpoints

Kernel = Callable[..., Any]

MODULE_CALL: CodeType = nn.Module._call_impl.__code__
# All that is there of a module after its ``compile()``.
_WRAPPED_CALL: CodeType = nn.Module._wrapped_call_impl.__code__
# By identity, as the other set: the hash of code takes ten times as long.
MODULE_CALLS = frozenset(map(id, (MODULE_CALL, _WRAPPED_CALL)))
ENGINE: CodeType = autograd_graph._engine_run_backward.__code__
FUNCTION_CALL: CodeType = inspect.unwrap(vars(torch.autograd.Function)["apply"]).__code__

OPERATOR_CALL: CodeType = torch._ops.OpOverload.__call__.__code__

CHECKPOINT: CodeType = inspect.unwrap(checkpoints.checkpoint).__code__
_REENTRANT: CodeType = checkpoints.CheckpointFunction.backward.__code__
_RECOMPUTATIONS = [
    code
    for code in checkpoints._checkpoint_without_reentrant_generator.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "recompute_fn"
]
RECOMPUTATIONS = frozenset(map(id, (*_RECOMPUTATIONS, _REENTRANT)))
# Name of the function that has a checkpoint's body computed again.
UNPACK = "unpack_hook"

current_node: Callable[[], Any] = torch._C._current_autograd_node
# Number of the backward pass that runs on this thread, -1 if none does.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
fake_mode_of: Callable[[Any], Any] = detect_fake_mode
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def saves_elsewhere() -> bool:
    """Whether hooks take what autograd saves: its own memory may be another tensor's soon."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def checkpoint_under_way() -> object | None:
    """What torch keeps of the checkpoint, not a reentrant one, whose body runs on this thread."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    for cell in () if hooks is None else getattr(hooks[1], "__closure__", None) or ():
        if isinstance(cell.cell_contents, checkpoints._CheckpointFrame):
            return cell.cell_contents
    return None


def checkpoint_of(frame: FrameType) -> object | None:
    """What torch keeps of the checkpoint that a frame computes again; ``None`` for others."""
    if frame.f_code.co_name != UNPACK:
        return None
    found = frame.f_locals.get("frame")
    return found if isinstance(found, checkpoints._CheckpointFrame) else None


def last_sequence_number() -> int:
    """Number of the autograd node that was made last on this thread."""
    number: int = torch._C._autograd._get_sequence_nr() - 1
    return number


def sequence_number(node: Any) -> int:
    """Number of an autograd node on the thread that has made it, which counts by itself."""
    number: int = node._sequence_nr()
    return number


def checkpointed_body(frame: FrameType) -> Any:
    """The function whose checkpoint a frame makes, of ``CHECKPOINT``, or runs again."""
    values = frame.f_locals
    if frame.f_code is CHECKPOINT:
        return values["function"]
    return values["ctx"].run_function if frame.f_code is _REENTRANT else values["fn"]


def has_subclass(args: Sequence[Any]) -> bool:
    """Whether an argument is a tensor of a subclass, with functions of its own."""
    return any(
        isinstance(arg, torch.Tensor) and type(arg) not in (torch.Tensor, nn.Parameter)
        for arg in args
    )


def plain_functions() -> AbstractContextManager[None]:
    """Within this context neither subclasses of tensors nor modes hear of functions of torch."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def _overload(operator: str) -> Any:
    """An operator of aten by its name; ``None`` where this version of torch has none."""
    packet_name, _, name = operator.partition(".")
    packet = getattr(torch.ops.aten, packet_name, None)
    return None if packet is None else getattr(packet, name or "default", None)


def _original_kernel(overload: Any, key: str) -> Kernel | None:
    """What torch runs for an operator on a device now, or ``None`` where it has nothing."""
    if overload is None:
        return None
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), key):
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(torch.library.get_kernel(overload, key).call_boxed, keys)


def _leave_uncompiled(function: Kernel) -> None:
    """Let Dynamo compile neither a function nor what it calls.

    A layer of torch's own that is compiled by itself, as by ``linear.compile()``, runs as it is
    written, and Dynamo would compile whatever Python its products come to.
    """
    while isinstance(function, functools.partial):
        function = function.func
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)


# By the name of an operator and device: the kernel that another runs for.
_OVERRIDDEN: dict[str, dict[str, Kernel]] = defaultdict(dict)


def overridden_kernel(operator: str, device: str) -> Kernel:
    """The kernel of an operator that another one runs for; the operator itself where none does."""
    kernel = _OVERRIDDEN[operator].get(device)
    return getattr(torch.ops.aten, operator) if kernel is None else kernel


class KernelOverrides:
    """Kernels of aten operators that are exchanged until :meth:`remove`.

    Args:
        key: Name of the dispatch key that they are exchanged for, such as ``"CPU"``.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._library = torch.library.Library("aten", "IMPL")
        self._overloads: list[Any] = []

    def put(self, operator: str, make_kernel: Callable[[Kernel], Kernel]) -> None:
        """Let a kernel of ours run for an operator, where torch has one.

        Args:
            operator: Its name, with the overload if that is not the default.
            make_kernel: Makes the kernel from torch's own.
        """
        overload = _overload(operator)
        original = _original_kernel(overload, self._key)
        if original is None:
            return
        with warnings.catch_warnings():
            # torch says once per process that a kernel was overridden, which is on purpose.
            warnings.filterwarnings("ignore", message="(?s).*verriding a previously registered")
            kernel = make_kernel(original)
            _leave_uncompiled(kernel)
            self._library.impl(operator, kernel, self._key, allow_override=True)
        overload._dispatch_cache.clear()
        self._overloads.append(overload)
        _OVERRIDDEN[operator][self._key.lower()] = original

    def remove(self) -> None:
        """Put torch's own kernels back, without a trace."""
        self._library._destroy()
        for kernels in _OVERRIDDEN.values():
            kernels.pop(self._key.lower(), None)
        for overload in self._overloads:
            # A compiler that traces it would take it for an operator with a gradient of its own.
            overload._dispatch_cache.clear()


class _PastDispatcher:
    """What code of Inductor's calls operators by, which calls torch's own kernels for products.

    Args:
        functions: What it was before: Inductor's namespace of functions.
    """

    def __init__(self, functions: Any) -> None:
        self._functions = functions
        for operator, kernels in list(_OVERRIDDEN.items()):
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
    """Let code that was made for a graph call torch's kernels where ``KernelOverrides`` has others.

    Args:
        code_globals: The global names of the code.
    """
    functions = code_globals.get("extern_kernels")
    if functions is not None and not isinstance(functions, _PastDispatcher):
        code_globals["extern_kernels"] = _PastDispatcher(functions)


_LIBRARY = torch.library.Library("lightning_unitscale", "FRAGMENT")


def define_operator(schema: str, run: Kernel, fake: Kernel, *tags: torch.Tag) -> None:
    """Define an operator for compiled graphs, on all devices and in no CUDA graph.

    Args:
        schema: Its name, its arguments and what it returns.
        run: What it does.
        fake: What it gives for tensors without data.
        *tags: What a compiler is told of it as well.
    """
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
    """A pass over what Inductor compiles, after the passes that the user has set.

    Args:
        setting: Which of Inductor's settings it belongs to.
        rewrite: Called with each graph.
    """

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


def is_recording() -> bool:
    """Whether what runs is recorded for later: by a compiler, an export or ``torch.jit.trace``."""
    return torch.compiler.is_compiling() or is_tracing()


def is_compiling() -> bool:
    """Whether this thread compiles a frame."""
    return CompileContext.current_compile_id() is not None


def num_compiled() -> int:
    """Number of graphs that AOTAutograd has compiled in this process, and of calls of this."""
    return next(AOT_COUNTER)


def is_of_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph is of its backward pass, or of a gradient within the step."""
    is_gradient = node.meta.get("partitioner_tag") == "is_backward"
    return is_gradient or bool(node.meta.get("autograd_backward"))


def note_strides(node: fx.Node, args: Any) -> None:
    """Have an operator that needs exact strides get its tensors as these fake ones are."""
    node.meta["eager_input_vals"] = (args, {})


def keeping_whole(operators: Sequence[str]) -> Callable[[], None]:
    """Let Inductor take no operators of aten to pieces in what it compiles from now on.

    Args:
        operators: Their names.

    Returns:
        What lets Inductor take them to pieces again.
    """
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def take(_: Any = None) -> None:
        if taken:
            return
        # Imported when something is compiled: it takes a second.
        from torch._inductor import decomposition

        overloads = list(map(_overload, operators))
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
