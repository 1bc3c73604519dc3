"""Capture a function by Dynamo, and describe its graphs.

Other modules use only :class:`CapturedGraph` and callables.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Literal

import torch
import torch._dynamo.config
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import convert_frame
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import graph_break_reasons
from torch._guards import CompileContext

from lightning_unitscale.capture.answers import telling
from lightning_unitscale.capture.breaks import frames_of, without_dynamos_texts
from lightning_unitscale.capture.copy_graphs import copy_graph_module
from lightning_unitscale.capture.patches import (
    passing_over,
    plain_libraries,
    plain_numbers,
    real_deletions,
    uncompiled_threads,
)
from lightning_unitscale.patching import shadowed_here

# "gradient" is a gradient that a step reads from a parameter.
InputKind = Literal["parameter", "buffer", "gradient", "input", "symbol"]

_STATIC = "_dynamo_static_input_type"  # Dynamo's mark of parameters and buffers

# A step may be specialized on more Python state than Dynamo's default of 8 allows: the epoch, the
# shapes of a last batch, several modules of one class that share one code object. Past the limit
# Dynamo runs the frame without any backend, so the transform would silently be lost.
RECOMPILE_LIMIT = 256


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph: its role in the module, and its path."""

    kind: InputKind
    fqn: str | None
    source: str = ""  # such as ``L['self']._parameters['weight']``


@dataclass(frozen=True)
class CapturedGraph:
    """One graph from Dynamo. Never mutate it, since Dynamo builds its guards from it later."""

    graph_module: fx.GraphModule
    example_inputs: tuple[Any, ...]
    frame_id: int  # number of the Python frame, kept by a recompilation
    inputs: tuple[GraphInput, ...]

    def roots(self) -> dict[str, str]:
        """Map each module variable of the captured code to its path in the whole module."""
        # After a graph break a submodule's `forward` is captured by itself, with the submodule as
        # its `self`. Its parameters identify it.
        roots: dict[str, str] = {}
        for graph_input in self.inputs:
            keys = _KEY.findall(graph_input.source)
            # ``__dict__['_modules']``, by which a class with ``__getattr__`` is read, is no name.
            local = ".".join(key for key in keys[1:] if key not in _CONTAINERS)
            if (
                graph_input.fqn
                and local
                and (graph_input.fqn == local or graph_input.fqn.endswith("." + local))
            ):
                root = graph_input.source[: graph_input.source.index("]") + 1]
                roots.setdefault(root, graph_input.fqn[: -len(local)].rstrip("."))
        return roots

    def for_module_of(self, inputs: Sequence[Any], module: nn.Module) -> CapturedGraph:
        """Return this graph for a call with the parameters among ``inputs``."""
        fqns = _fqns(module)
        described = [
            replace(
                graph_input,
                fqn=fqns.get(id(value), (graph_input.kind, None))[1] if graph_input.fqn else None,
            )
            for graph_input, value in zip(self.inputs, inputs, strict=True)
        ]
        return replace(self, inputs=tuple(described))


_KEY = re.compile(r"\['([^']+)'\]")
_CONTAINERS = frozenset({"_modules", "_parameters", "_buffers"})


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, or method, with its own code object."""
    # Dynamo stores compiled code, and whether it has given up, with the code object. Another module
    # of the class that the user compiles would share both, and its recompile limit.
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, types.FunctionType):
        return function
    own = types.FunctionType(
        plain.__code__.replace(),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    own.__module__, own.__qualname__ = plain.__module__, plain.__qualname__
    vars(own).update(vars(plain))
    owner = getattr(function, "__self__", None)
    return own if owner is None else types.MethodType(own, owner)


@contextlib.contextmanager
def no_graph_breaks() -> Iterator[None]:
    """Turn graph breaks into errors, before any code has run."""
    # ``fullgraph=True`` would also capture ``.item()``, which changes the graph.
    with torch._dynamo.error_on_graph_break(True):
        yield


# True if Dynamo reuses a graph although other parameters of the module require gradients.
MISSES_THAWING = torch.torch_version.TorchVersion(torch.__version__) < "2.12"


def forget_code(functions: Iterable[CodeType]) -> None:
    """Make Dynamo capture some functions again, whichever step captured them."""
    for code in functions:
        reset_code(code)


def forget_captures(function: Callable[..., Any]) -> None:
    """Make Dynamo capture a function again that it may have given up on, and its resumed parts."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    resumed = f"{TORCH_DYNAMO_RESUME_IN_PREFIX}_{code.co_name}_"
    reset_code(code)
    for weak_code in [*convert_frame.input_codes.seen, *convert_frame.output_codes.seen]:
        code_object = weak_code()
        if code_object is not None and code_object.co_name.startswith(resumed):
            reset_code(code_object)


@contextlib.contextmanager
def unmarked(module: nn.Module) -> Iterator[None]:
    """Remove, after this context, the marks that Dynamo has put on the module's tensors."""

    def marked() -> set[Tensor]:
        tensors = (*module.parameters(), *module.buffers())
        return {tensor for tensor in tensors if _STATIC in vars(tensor)}

    before = marked()
    try:
        yield
    finally:
        for tensor in marked() - before:
            del vars(tensor)[_STATIC]


def is_compiled(module: nn.Module) -> bool:
    """Check whether the user has put ``torch.compile`` on the module already."""
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or vars(module).get("_compiler_ctx") is not None
    )


def static_shapes() -> AbstractContextManager[Any]:
    """Recapture batches of another size with constant sizes within this context."""
    return torch._dynamo.config.patch(automatic_dynamic_shapes=False)


@contextlib.contextmanager
def capture_settings(*, passes_over: bool = False) -> Iterator[None]:
    """Set Dynamo's options under which a step is captured and its captures are found."""
    # With `passes_over` a function runs uncaptured if Dynamo itself fails on it, or if it is
    # captured too often. Without it both are errors.
    # `optimize_ddp` would cut the graph at DDP's buckets before the backend sees it. The same
    # tensor would then have another name with and without DDP. `allow_rnn` takes recurrent kernels
    # into the graph as single operations. Without it Dynamo gives up on every frame that mentions
    # an `nn.GRU`.
    convert = telling(convert_frame.ConvertFrame.__call__)
    if passes_over:
        convert = passing_over(convert)

    # Most calls of a step capture nothing, so Dynamo is patched only while it captures.
    def convert_patched(*args: Any, **kwargs: Any) -> Any:
        with (
            without_dynamos_texts(),
            plain_libraries(),
            plain_numbers(),
            real_deletions(),
            uncompiled_threads(),
        ):
            return convert(*args, **kwargs)

    with (
        shadowed_here(convert_frame.ConvertFrame, __call__=convert_patched),
        torch._dynamo.config.patch(
            optimize_ddp=False,
            allow_rnn=True,
            allow_unspec_int_on_nn_module=True,
            # A call without operations, such as that of an empty batch, would end the capture.
            allow_empty_graphs=True,
            # Hooks that are added or removed during training are noticed.
            skip_nnmodule_hook_guards=False,
            trace_numpy=False,
            enable_dynamo_decompositions=False,
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=4 * RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=not passes_over,
        ),
    ):
        yield


def frame_being_captured() -> int | None:
    """Return the number of the Python frame that Dynamo captures now, or ``None``."""
    current = CompileContext.current_compile_id()
    return None if current is None else current.frame_id


def describe(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], module: nn.Module
) -> CapturedGraph:
    """Name the inputs of a graph that Dynamo captured from a step of a module."""
    fqns = _fqns(module)
    inputs = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        kind: InputKind = "input"
        name: str | None = None
        argument = node.meta.get("grapharg")
        source = getattr(getattr(argument, "source", None), "name", "")
        if isinstance(node.meta.get("example_value"), Tensor):
            kind, name = fqns.get(id(argument.example) if argument else 0, ("input", None))
        else:
            kind = "symbol"
        # This is a method until torch 2.11.
        inputs.append(GraphInput(kind, name, source() if callable(source) else source))
    frame = frame_being_captured()
    # A copy, because Dynamo clears its own when it is done.
    kept = copy_graph_module(graph_module)
    return CapturedGraph(kept, tuple(example_inputs), -1 if frame is None else frame, tuple(inputs))


def _fqns(module: nn.Module) -> dict[int, tuple[InputKind, str | None]]:
    fqns: dict[int, tuple[InputKind, str | None]] = {}
    for fqn, buffer in module.named_buffers():
        fqns[id(buffer)] = ("buffer", fqn)
    for fqn, parameter in module.named_parameters():
        fqns[id(parameter)] = ("parameter", fqn)
        if parameter.grad is not None:
            fqns[id(parameter.grad)] = ("gradient", None)
    return fqns


def original_error(error: BaseException) -> BaseException:
    """Return the error that a backend raised, without Dynamo's wrapping."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else error


# The hooks by which autograd saves tensors now, if any.
_saving: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


def _saves_otherwise(before: Any) -> bool:
    """Check whether a step has entered a block that saves tensors in its own way."""
    hooks = _saving(True)
    if hooks is None or (before is not None and hooks[0] is before[0]):
        return False
    # Checkpoints recompute what their hooks drop, so graphs within them have the same results.
    return hooks[0].__module__ != torch.utils.checkpoint.__name__


@contextlib.contextmanager
def around_captures(
    enter: Callable[[CodeType], AbstractContextManager[None]], *, may_skip: bool
) -> Iterator[None]:
    """Capture every function within a context manager of ours."""
    # With ``may_skip``, functions run uncaptured where the user's hooks may change saved tensors,
    # since a graph saves other tensors.
    convert = convert_frame.ConvertFrame.__call__
    attempt = convert_frame.ConvertFrameAssert.__call__
    refusals: list[Unsupported] = []
    saving = _saving(True)

    @functools.wraps(convert)
    def convert_within(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if may_skip and _saves_otherwise(saving):
            return ConvertFrameReturn()
        refusals.clear()
        with enter(frame.f_code):
            result = convert(self, frame, *args, **kwargs)
        if refusals and result.guarded_code is None:
            # Dynamo records nothing about breaks that it cannot resume from.
            error = refusals.pop()
            graph_break_reasons.append(GraphCompileReason(str(error), frames_of(error)))
        return result

    @functools.wraps(attempt)
    def attempt_and_note(*args: Any, **kwargs: Any) -> Any:
        try:
            return attempt(*args, **kwargs)
        except Unsupported as error:
            # A function that was captured too often has no graph break.
            if getattr(error, "frame_exec_strategy", None) is None:
                refusals.append(error)
            raise

    with (
        shadowed_here(convert_frame.ConvertFrame, __call__=convert_within),
        shadowed_here(convert_frame.ConvertFrameAssert, __call__=attempt_and_note),
    ):
        yield
