"""Name the tensors of a step by the module that computes them and torch's name of the operation.

Python's frames show the module, so the modules need no hooks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from lightning_unitscale.capture.graph_nodes import WHOLE_VIEWS
from lightning_unitscale.capture.name_patterns import own_path
from lightning_unitscale.memory.record_operators import function_name

_MODULE_CALL = nn.Module.__call__.__code__
_CHECKPOINT = CheckpointFunction.forward.__code__
_CHECKPOINT_AGAIN = CheckpointFunction.backward.__code__
_BACKWARD = frozenset({torch.autograd.backward.__code__, torch.autograd.grad.__code__})


@dataclass(frozen=True)
class Caller:
    """The place in a step where a torch function is called."""

    path: str  # path of the innermost module; empty for the root
    # The reentrant checkpoints around the call, innermost first, by identity.
    checkpoints: tuple[int, ...] = ()
    again: int | None = None  # the reentrant checkpoint that recomputes the call, for its gradients


_NOTED = (_MODULE_CALL, _CHECKPOINT, _CHECKPOINT_AGAIN, *_BACKWARD)


class Callers:
    """A search for the caller of a torch function, below the code that calls the step."""

    def __init__(self, module: nn.Module, top: CodeType, ignored: Collection[CodeType]) -> None:
        self._paths = {id(child): own_path(path) for path, child in module.named_modules()}
        self._callers: dict[str, Caller] = {}
        self.top = top
        self._ignored = frozenset(ignored)
        # Keyed by identity, because hashing code takes ten times as long.
        self._noted = frozenset(map(id, (top, *_NOTED, *self._ignored)))

    def find(self, frame: FrameType | None) -> Caller | None:
        """Return the caller whose code runs in ``frame``, or ``None`` outside the step."""
        path: str | None = None
        checkpoints: list[int] = []
        first, noted = frame, self._noted
        while frame is not None:
            code = frame.f_code
            if id(code) not in noted:
                pass
            elif code is _MODULE_CALL:
                if path is None:
                    path = self._paths.get(id(frame.f_locals["self"]))
            elif code is self.top:
                path = path or ""
                if checkpoints:
                    return Caller(path, tuple(checkpoints))
                caller = self._callers.get(path)
                if caller is None:
                    caller = self._callers[path] = Caller(path)
                return caller
            elif code is _CHECKPOINT:
                checkpoints.append(id(frame.f_locals["ctx"]))
            elif code is _CHECKPOINT_AGAIN:
                return Caller(path or "", tuple(checkpoints), id(frame.f_locals["ctx"]))
            elif code in _BACKWARD:
                # These run autograd functions in Python, and checkpoints that keep their first
                # results.
                return None
            elif not _is_below_closure(first, frame):  # the frame is ignored
                return None
            frame = frame.f_back
        return None


def _is_below_closure(frame: FrameType | None, outer: FrameType) -> bool:
    """Check whether ``frame`` runs for a function that ``outer`` was given to call."""
    scope = outer.f_locals
    arguments = (scope.get("closure"), *scope.get("args", ()), *scope.get("kwargs", {}).values())
    closures = {code for code in map(_code_of, arguments) if code is not None}
    while closures and frame is not None and frame is not outer:
        if frame.f_code in closures:
            return True
        frame = frame.f_back
    return False


def _code_of(value: Any) -> CodeType | None:
    """Return the code of a function, method, partial call, or object that is called."""
    while isinstance(value, functools.partial):
        value = value.func
    if not isinstance(value, (FunctionType, MethodType)) and callable(value):
        value = type(value).__call__
    code: CodeType | None = getattr(value, "__code__", None)
    return code


# Python's operators reach torch as methods. A captured graph, and so the names of its tensors,
# contains the operators.
_OPERATORS: dict[Any, str] = {
    Tensor.div: "truediv",
    Tensor.remainder: "mod",
    Tensor.add_: "iadd",
    Tensor.sub_: "isub",
    Tensor.mul_: "imul",
    Tensor.div_: "itruediv",
}
# A cast has the scale of its tensor, up to the rounding.
_CASTS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "data",
     "requires_grad", "deepcopy", "H", "mH", "pin_memory", "as_subclass", "copy"}
)  # fmt: skip
# Their result is a view or a cast of the argument, and shares its row.
ALIASES = WHOLE_VIEWS | _CASTS
# These are called often, and none returns a tensor of the step.
_ANSWERS = frozenset(
    {"size", "dim", "item", "len", "bool", "numel", "stride", "is_floating_point", "is_complex",
     "tolist", "format", "repr", "is_contiguous", "storage_offset", "data_ptr", "untyped_storage",
     "register_hook", "index", "hash", "set", "delete", "element_size", "nelement", "get_device",
     "retain_grad", "register_post_accumulate_grad_hook", "set_grad_enabled", "is_inference"}
)  # fmt: skip
_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


def full_name(path: str, word: str) -> str:
    """Return the name of a function's result in a module, without its ordinal."""
    return f"{path}.{word}" if path else word


# Cached descriptions of torch's own functions, which are never freed.
_DESCRIBED: dict[Any, tuple[str, bool]] = {}


def describe_function(function: Any) -> tuple[str, bool]:
    """Return torch's name of a function, and whether it only reads or sets a tensor's property."""
    try:
        return _DESCRIBED[function]
    except KeyError:
        operator = _OPERATORS.get(function)
    except TypeError:  # not hashable, so not one of torch's
        operator = None
    word, name = operator or function_name(function), getattr(function, "__name__", "")
    # ``x.float()`` returns a tensor, and ``float(x)`` does not.
    is_answer = word in _ANSWERS or name in {"__float__", "__int__"}
    found = word, word not in _TENSOR_ATTRIBUTES if name == "__get__" else is_answer
    if _lasts(function):
        _DESCRIBED[function] = found
    return found


def _lasts(function: Any) -> bool:
    """Check whether a function belongs to a module or a class, and not to a single object."""
    if isinstance(function, FunctionType):
        return "<" not in function.__qualname__ and function.__module__.startswith("torch.")
    if isinstance(function, (MethodDescriptorType, WrapperDescriptorType)):
        return True
    owner = getattr(function, "__self__", None)
    if isinstance(function, MethodWrapperType):
        return isinstance(owner, GetSetDescriptorType)
    return isinstance(function, BuiltinFunctionType) and isinstance(owner, (type, ModuleType))


# Limits of the search for tensors in a batch: depth, and elements of a list.
_MAX_DEPTH = 4
_MAX_ELEMENTS = 64


class StartNames:
    """Names and modules of the tensors that a call of a step starts from."""

    def __init__(
        self,
        module: nn.Module,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        parameters: Iterable[tuple[str, Tensor]],
    ) -> None:
        # A weak reference: a call that does not end must not keep the module alive.
        self._module = weakref.ref(module)
        self._names: dict[int, tuple[str, str]] = {}
        arguments: Mapping[str, Any] = {}
        with contextlib.suppress(TypeError, ValueError):  # the call itself will raise the error
            arguments = inspect.signature(step).bind(*args, **kwargs).arguments
        for name, value in arguments.items():
            for path, tensor in tensors_of(value, name):
                self._names.setdefault(id(tensor), (f"input.{path}", ""))
        self._add(module.named_buffers())
        self._add(parameters)

    def find(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return name and module of a tensor, or ``None`` if the call does not start from it."""
        if id(tensor) not in self._names and tensor.is_leaf and tensor.requires_grad:
            # While a module runs, FSDP2 replaces its shards by whole parameters.
            module = self._module()
            self._add(() if module is None else module.named_parameters())
        return self._names.get(id(tensor))

    def _add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for path, tensor in tensors:
            fqn = own_path(path)
            self._names[id(tensor)] = (fqn, fqn.rpartition(".")[0])


def tensors_of(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Return the tensors in a nested value, named by their place in it."""
    if isinstance(value, Tensor):
        yield name, value
        return
    items: list[tuple[Any, Any]] = []
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            items = list(value.items())
        elif isinstance(value, (list, tuple)):
            names = getattr(value, "_fields", range(len(value)))
            items = list(zip(names, value, strict=False))[:_MAX_ELEMENTS]
        elif dataclasses.is_dataclass(value):
            items = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for key, item in items:
        yield from tensors_of(item, f"{name}_{key}", depth + 1)
