"""Patch Dynamo, so that a captured step computes what the uncaptured step does.

* NumPy (:func:`plain_numbers`). Dynamo traces NumPy as torch operations, and turns a NumPy number
  into a 0-d FP64 tensor. Outside of Dynamo it is a number, so ``loss * np.exp(-x)`` stays FP32 and
  would be FP64 when traced. Last bits of ``tanh`` and random numbers would differ too. So calls of
  NumPy run untraced and break the graph. Their results enter the graphs as Python's numbers. Dynamo
  would take an array for a constant then, compute ``array *= 2`` while it traces, and give up: the
  array would be doubled twice.
* Updates. Dynamo decomposes ``addcmul_`` and ``addcdiv_`` with ``value``, and until torch 2.11
  ``add_`` with ``alpha``, which rounds in another place than their kernels do. It does so, whatever
  its settings are, with :data:`_TAKEN_APART`.
* Generators. Dynamo draws from a user's ``random.Random`` when it traces, and guards on nothing.
  Every later step would get the same number. So these calls run untraced, too.
* Deques. Dynamo forgets the ``maxlen`` of a deque that a step finds, until the step has ended.
* Failures (:func:`passing_over`). Dynamo runs code that it cannot capture untraced, with a graph
  break. On some code it raises an error of its own instead, or of its fake tensors, before any of
  the function has run. The function can run untraced then, too, and the functions that it calls are
  captured as after a graph break. A user's error (shapes that do not fit) is then raised as without
  Dynamo.
* Optimizers. When traced code reads ``param_groups`` (the learning rate,
  to log or to set it), Dynamo sets ``capturable=True`` in each group. On a GPU the update then uses
  another algorithm, with other last bits. On a CPU it refuses to run. No optimizer's step is traced
  here, so this preparation is not needed.
* Whole layers (:func:`opened_layers`). ``nn.TransformerEncoderLayer`` uses one fused kernel if no
  gradient is needed. Nothing inside it can be rewritten: its matmuls would keep their precision
  while the same layer is trained in FP8. Weights at RMS 1 under rules would miss their factors.
* Absent packages (:func:`absent_packages`). Dynamo runs ``importlib.metadata.version`` while it
  traces, and takes its PackageNotFoundError for its own failure, even if the code catches it.
  torchmetrics checks for ``torch_xla`` this way when it counts classes.
* Deletions (:func:`real_deletions`). A step may set and delete an attribute that a layer does not
  have outside of it: ``del layer.weight; layer.weight = mask * weight``, and the way back. Dynamo
  would delete it again after the step, and ``nn.Module`` then deletes the parameter of that name.
* Inference mode (:func:`drop_inference_mode`). AOTAutograd cannot trace a view of an ordinary
  tensor made in inference mode: the view has no version counter, which functionalization reads. Its
  graphs return no inference tensors anyway.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import linecache
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from traceback import FrameSummary
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch._dynamo.config
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import (
    InternalTorchDynamoError,
    TorchRuntimeError,
    raise_observed_exception,
    unimplemented,
)
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.trace_rules import _allowed_callable_ids, lookup_callable
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import graph_break_reasons
from torch._dynamo.variables import (
    ConstantVariable,
    DeletedVariable,
    SkipFunctionVariable,
    TorchInGraphFunctionVariable,
)
from torch._dynamo.variables.base import AttributeMutationExisting
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import (
    LoggingLoggerVariable,
    NumpyVariable,
    RandomClassVariable,
    RandomVariable,
)
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from lightning_unitscale.capture.answers import insist_on_one_graph, plain_answers
from lightning_unitscale.capture.breaks import frames_of, is_installed_file, short_reason
from lightning_unitscale.patching import nothing, shadowed_here

# Since torch 2.13. In torch 2.11 no flag is set for the whole process.
_HAS_SESSIONS = hasattr(torch.compiler, "_compile_session_context")


@contextlib.contextmanager
def uncompiled_threads() -> Iterator[None]:
    """Do not let torch.compiler.is_compiling() hold for other threads during a capture."""
    # Adam and other optimizers would compute with tensors in place of Python's numbers, which
    # changes the last bits of a training in another thread. Traced code has its own answer.
    if not _HAS_SESSIONS:
        yield
        return
    with shadowed_here(torch.compiler, _compile_session_context=contextlib.nullcontext):
        yield


@contextlib.contextmanager
def plain_numbers() -> Iterator[None]:
    """Run NumPy and generators untraced, and keep updates, optimizers and deques as they are."""
    with (
        shadowed_here(VariableBuilder, wrap_numpy_ndarray=_as_number),
        shadowed_here(NumpyVariable, is_python_constant=_is_constant),
        shadowed_here(RandomVariable, is_supported_random_obj=lambda _: False),
        shadowed_here(RandomClassVariable, call_function=_refuse_generator),
        shadowed_here(OptimizerVariable, _set_capturable=nothing),
        shadowed_here(BaseListVariable, cls_for_instance=_kind_of_list),
        shadowed_here(TorchInGraphFunctionVariable, _get_handlers=_handlers_of_whole_functions),
    ):
        yield


_TAKEN_APART = (torch.addcdiv, torch._foreach_lerp_)
_handlers = TorchInGraphFunctionVariable._get_handlers


@functools.cache
def _handlers_of_whole_functions() -> dict[Any, Any]:
    """Return Dynamo's handlers of torch functions, without those that decompose a function."""
    return {name: run for name, run in _handlers().items() if name not in _TAKEN_APART}


_kind_of_any_list = BaseListVariable.cls_for_instance


def _kind_of_list(value: Any) -> Callable[..., Any]:
    kind = _kind_of_any_list(value)
    if not isinstance(value, deque):
        return kind
    return functools.partial(kind, maxlen=ConstantVariable.create(value.maxlen))


def _is_constant(variable: NumpyVariable) -> bool:
    return not isinstance(variable.value, np.ndarray)


def _refuse_generator(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    unimplemented(
        gb_type="random.Random() in a step",
        context=str(args),
        explanation="Its random numbers would be drawn once and kept.",
        hints=["Create it before the step, or draw from torch."],
    )


def _as_number(builder: Any, value: np.ndarray[Any, Any]) -> Any:
    # Others round or wrap around where Python's numbers do not, so their arithmetic stays NumPy's.
    if value.dtype == np.float64:
        return builder.wrap_symfloat(value.item())
    if value.dtype == np.int64:
        return builder.wrap_symint(value.item())
    unimplemented(
        gb_type="NumPy number",
        context=f"{value.dtype} {value}",
        explanation=f"Arithmetic of {value.dtype} is not that of Python's numbers.",
        hints=["Convert it by float() or int() before it meets a tensor."],
    )


# Failures on fake tensors before a function is no longer tried, since each try takes time.
_MAX_FAILURES = 4
_failures: Counter[Any] = Counter()


def free_frames_of(error: BaseException | None) -> None:
    """Free the frames of a failed capture, and keep the thread's dispatch keys."""
    # When torch frees wrapped tensors of forward-mode differentiation, it may exclude autograd's
    # keys for all later operations. Otherwise this happens at the next garbage collection.
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__
    with torch._C._PreserveDispatchKeyGuard():
        gc.collect()


def passing_over(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that captures as ``convert`` does; a failure is a break and a warning."""
    warned: set[tuple[str, int]] = set()

    def convert_or_pass_over(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except TorchRuntimeError as error:
            # This is usually a user's error, which is raised again when the function runs
            # uncaptured. If the user catches it, the function is captured the next time.
            _failures[frame.f_code] += 1
            is_last = _failures[frame.f_code] >= _MAX_FAILURES
            _report(frame.f_code, error, warned, warn=is_last)
            free_frames_of(error)
            return ConvertFrameReturn(apply_to_code=is_last)
        except InternalTorchDynamoError as error:
            _report(frame.f_code, error, warned, warn=True)
            return ConvertFrameReturn()

    return convert_or_pass_over


# Hints for a compiler, which compute nothing. Caches of transformers use them in a step.
_HINTS = (
    torch._dynamo.mark_dynamic,
    torch._dynamo.maybe_mark_dynamic,
    torch._dynamo.mark_static,
    torch._dynamo.mark_static_address,
    torch._dynamo.decorators.mark_unbacked,
)
# Hooks of transformers and peft on a frozen embedding, which give the checkpointed blocks behind it
# gradients. Blocks inside the same graph have them anyway. Dynamo breaks at ``requires_grad_``.
_LETS_CHECKPOINTS_TRAIN = frozenset({"make_inputs_require_grad", "make_inputs_require_grads"})
LETS_TRAIN = "lets_train"  # set on the tensor of such a hook: reentrant checkpoints behind it train
# The code of whole steps. Equal code objects are the same for the set.
_STEPS: weakref.WeakSet[CodeType] = weakref.WeakSet()
# Methods of loggers that return a value. All others only write.
_LOGGER_QUESTIONS = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers"})


def note_step(function: Callable[..., Any]) -> None:
    """Note the function of a step, of which a capture may be one graph."""
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        _STEPS.add(code)


def _is_whole(output: Any) -> bool:
    """Check whether Dynamo captures a whole step now, rather than a function between breaks."""
    return output.export or output.root_tx.f_code in _STEPS


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let compiler hints and log messages of installed packages break no graph."""
    # Hints do nothing. The hooks for checkpointed blocks do nothing in a function that is captured
    # as one graph. A library's message without tensors is logged while Dynamo traces. The user's
    # own messages still break the graph, since they must appear at each step.
    call = symbolic_convert.InstructionTranslatorBase.call_function
    log = LoggingLoggerVariable.call_method

    @functools.wraps(call)
    def call_or_pass(self: Any, fn: Any, args: Any, kwargs: Any) -> None:
        # This is how Dynamo itself finds the function behind a variable.
        function = getattr(fn, "fn", getattr(fn, "value", None))
        if any(function is hint for hint in _HINTS):
            self.push(ConstantVariable.create(None))
            return
        is_hint = getattr(fn, "name", "") == "requires_grad_"
        is_hint = is_hint and self.f_code.co_name in _LETS_CHECKPOINTS_TRAIN
        if is_hint and _is_whole(self.output) and insist_on_one_graph():
            fn.obj.as_proxy().node.meta[LETS_TRAIN] = True
            self.push(fn.obj)
            return
        call(self, fn, args, kwargs)

    @functools.wraps(log)
    def log_once(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not is_installed_file(tx.f_code.co_filename):
            return log(self, tx, name, args, kwargs)
        answer = None
        if all(value.is_python_constant() for value in (*args, *kwargs.values())):
            given = {key: value.as_python_constant() for key, value in kwargs.items()}
            answer = getattr(self.value, name)(*(v.as_python_constant() for v in args), **given)
        return ConstantVariable.create(answer if name in _LOGGER_QUESTIONS else None)

    with (
        shadowed_here(symbolic_convert.InstructionTranslatorBase, call_function=call_or_pass),
        shadowed_here(LoggingLoggerVariable, call_method=log_once),
    ):
        yield


def _report(code: Any, error: Exception, warned: set[tuple[str, int]], *, warn: bool) -> None:
    frames = frames_of(error) or [FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]
    graph_break_reasons.append(GraphCompileReason(str(error), frames))
    file, line = frames[-1].filename, frames[-1].lineno or 0
    # Each function around a line fails on it.
    if not warn or (file, line) in warned:
        return
    warned.add((file, line))
    failing = linecache.getline(file, line).strip()
    warnings.warn(
        f"{file}:{line}: Dynamo fails on `{failing}` ({short_reason(str(error))}). So "
        f"{code.co_name} runs uncaptured, neither rewritten nor observed, except its calls. "
        "Expected code that Dynamo captures. Move that line out of the step, into a hook such as "
        "on_train_batch_start.",
        stacklevel=2,
    )


@contextlib.contextmanager
def kept_whole(functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Make Dynamo put calls of these functions into the graph untraced."""
    added = []
    try:
        for function in functions:
            if lookup_callable(function) is not TorchInGraphFunctionVariable:
                _allowed_callable_ids.add(id(function))
                added.append(function)
        yield
    finally:
        for function in added:
            _allowed_callable_ids.remove(id(function))


# torch's setting applies to all threads. This stores its old value, and an item for each user.
_OPENING = threading.Lock()
_opened: list[bool] = []


@contextlib.contextmanager
def opened_layers(are_opened: bool) -> Iterator[None]:
    """Capture fused layers operation by operation."""
    if not are_opened:
        yield
        return
    with _OPENING:
        if not _opened:
            _opened.append(torch.backends.mha.get_fastpath_enabled())
        _opened.append(True)
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _OPENING:
            _opened.pop()
            if len(_opened) == 1:
                torch.backends.mha.set_fastpath_enabled(_opened.pop())


@contextlib.contextmanager
def absent_packages() -> Iterator[None]:
    """Raise PackageNotFoundError in the traced code, which may catch it."""
    call = SkipFunctionVariable.call_function

    @functools.wraps(call)
    def call_or_raise(self: Any, tx: Any, *args: Any) -> Any:
        try:
            return call(self, tx, *args)
        except importlib.metadata.PackageNotFoundError as error:
            raise_observed_exception(type(error), tx, args=list(error.args))

    with shadowed_here(SkipFunctionVariable, call_function=call_or_raise):
        yield


@contextlib.contextmanager
def real_deletions() -> Iterator[None]:
    """Delete attributes after a step only if they existed before it."""
    write = SideEffects.codegen_update_mutated

    @functools.wraps(write)
    def write_real_ones(self: Any, *args: Any, **kwargs: Any) -> None:
        for variable, changes in self.store_attr_mutations.items():
            if not isinstance(variable.mutation_type, AttributeMutationExisting):
                continue
            attributes = getattr(getattr(variable, "value", None), "__dict__", None)
            for name, new in list(changes.items()):
                is_deleted = isinstance(new, DeletedVariable)
                if is_deleted and attributes is not None and name not in attributes:
                    del changes[name]
        write(self, *args, **kwargs)

    with shadowed_here(SideEffects, codegen_update_mutated=write_real_ones):
        yield


@contextlib.contextmanager
def plain_libraries() -> Iterator[None]:
    """Trace the code of libraries as it runs uncaptured, in as few graphs as possible."""
    with plain_answers(), quiet_libraries(), absent_packages():
        yield


def drop_inference_mode(graph_module: fx.GraphModule) -> None:
    """Turn gradients off where the user turns inference mode on, in nested graphs as well."""
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=_enter_inference_mode):
            node.target = _turn_gradients
        for node in module.graph.find_nodes(op="call_function", target=_exit_inference_mode):
            node.target = torch.set_grad_enabled
        module.recompile()


def _turn_gradients(inference: bool = True) -> bool:
    """Turn gradients off in inference mode or on outside, and return the mode before."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(not inference)
    return before
