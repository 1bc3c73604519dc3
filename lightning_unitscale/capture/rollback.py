"""Undo what a step has done to its module and to random numbers, and copy its inputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import operator
import queue
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

# What a module registers; hooks are not among it: a step may install some.
_REGISTERED = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
)


@contextlib.contextmanager
def restoring(module: nn.Module, *, parameters: bool = True) -> Iterator[None]:
    """Undo, on leaving, what a step does to its module and to random numbers.

    Covered: random states of torch on the module's devices, of Python and of NumPy; buffers, and
    the Python attributes of every submodule with the containers, arrays, tensors and random
    generators in them. A lazy module waits for its first call again. What a step keeps elsewhere
    (objects of the user's own classes, globals, iterators) stays changed.

    Args:
        module: The module.
        parameters: Whether to put back the numbers of parameters, which takes a copy of them, and
            gradients, which the step begins without. A step that runs no graph changes none.
    """
    tensors = (*module.parameters(), *module.buffers())
    accelerators = [
        device for device in {tensor.device for tensor in tensors} if device.type == "cuda"
    ]
    changing = list(module.parameters()) if parameters else []
    gradients = [(parameter, parameter.grad) for parameter in changing]
    numbers = [(param, _Parameter(param)) for param in changing if _has_numbers(param)]
    attributes = [(vars(owner), _own_attributes(owner)) for owner in module.modules()]
    kinds = [(owner, type(owner)) for owner in module.modules()]
    lazy = [_Lazy(tensor) for tensor in tensors if is_lazy(tensor)]
    contents = [restore for _, value in held_values(module) for restore in restorers_of(value)]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=accelerators):
        try:
            # A backward pass in the step would add to a gradient in place.
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for current, saved in attributes:
                for name in [name for name in current if name not in _REGISTERED]:
                    del current[name]
                current.update(saved)
            for restore in contents:
                restore()
            for owner, kind in kinds:
                # What its first call gives shapes changes its class.
                if type(owner) is not kind:
                    owner.__class__ = kind
            for waiting in lazy:
                waiting.restore()
            for parameter, kept in numbers:
                kept.restore(parameter)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def held_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Buffers and Python attributes of all submodules, with what is in containers, each once.

    Yields:
        Pairs of where a value is, for a message, and the value.
    """
    seen = {id(value) for value in (*module.modules(), *module.parameters())}
    waiting: list[tuple[str, Any]] = []
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        waiting.append((f"{prefix}_buffers", owner._buffers))
        waiting += [(prefix + name, value) for name, value in _own_attributes(owner).items()]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if isinstance(value, (list, tuple, deque)):
            waiting += [(f"{path}.{index}", item) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            waiting += [(f"{path}.{key}", item) for key, item in value.items()]


def find_once_only(module: nn.Module) -> str | None:
    """Something that a step can read once only, such as a generator; ``None`` if there is nothing.

    Returns:
        Where it is and what, for a message.
    """
    for path, value in held_values(module):
        is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        if is_iterator or isinstance(value, (queue.Queue, queue.SimpleQueue)):
            return f"{path} ({type(value).__name__})"
    return None


_ATOMS = (str, bytes, int, float, complex, type, type(None))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTERED}


def _has_numbers(parameter: nn.Parameter) -> bool:
    """Whether there is something to put back: not in one that its first call gives a shape."""
    return not is_lazy(parameter) and parameter.device.type != "meta"


class _Parameter:
    """The numbers of one parameter, on the host: on an accelerator a second copy may not fit."""

    def __init__(self, parameter: nn.Parameter) -> None:
        # A step may give it other storage; whoever shares the old one still has that.
        self._data = parameter.data
        self._numbers = parameter.detach().to("cpu", copy=True)

    def restore(self, parameter: nn.Parameter) -> None:
        """Put them back, if there are others now."""
        if parameter.data_ptr() != self._data.data_ptr():
            parameter.data = self._data
        numbers = self._numbers.to(parameter.device)
        if not torch.equal(parameter.detach(), numbers):
            parameter.data.copy_(numbers)


class _Lazy:
    """A parameter or buffer that the first call of its module gives a shape and numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._kind = type(tensor)
        self._data = tensor.data

    def restore(self) -> None:
        """Let it wait for the first call again, which then draws the same numbers."""
        if type(self._tensor) is not self._kind:
            self._tensor.data = self._data
            self._tensor.__class__ = self._kind


def restorers_of(value: Any) -> Iterator[Callable[[], object]]:
    """What puts the contents of an object back, which others may hold as well.

    Nothing, for an object of a kind that is not covered.
    """
    if isinstance(value, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.RandomState):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        generator = value.bit_generator
        yield functools.partial(setattr, generator, "state", generator.state)
    elif isinstance(value, Tensor):
        if is_lazy(value):
            return
        if value.layout is torch.strided and value.device.type != "meta" and not value.is_nested:
            yield functools.partial(_restore_tensor, value, value.detach().clone())
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            yield functools.partial(np.copyto, value, value.copy())
    elif isinstance(value, (list, deque)):
        yield functools.partial(_restore_sequence, value, list(value))
    elif isinstance(value, set):
        yield functools.partial(_restore_set, value, set(value))
    elif isinstance(value, dict):
        yield functools.partial(_restore_dict, value, dict(value))


def _restore_tensor(tensor: Tensor, saved: Tensor) -> None:
    if not torch.equal(tensor.detach(), saved):
        with torch.inference_mode(tensor.is_inference()):
            tensor.data.copy_(saved)


# Containers that have not changed are not touched: other threads may be reading them.


def _restore_sequence(sequence: Any, saved: list[Any]) -> None:
    if not _are_same(sequence, saved):
        sequence.clear()
        sequence.extend(saved)


def _restore_set(elements: set[Any], saved: set[Any]) -> None:
    if elements != saved:
        elements.clear()
        elements.update(saved)


def _restore_dict(table: dict[Any, Any], saved: dict[Any, Any]) -> None:
    if not (_are_same(table, saved) and _are_same(table.values(), saved.values())):
        table.clear()
        table.update(saved)


def _are_same(current: Collection[Any], saved: Collection[Any]) -> bool:
    return len(current) == len(saved) and all(map(operator.is_, current, saved))


def detached_copy(value: Any) -> Any:
    """A deep copy whose tensors are leaves of autograd's.

    ``copy.deepcopy`` takes only tensors that the user has made, and of a subclass only one that has
    learned to be copied; what another part of a program has computed is no such tensor.
    """
    with _Leaves():
        return copy.deepcopy(value)


class _Leaves(TorchFunctionMode):
    """Within this context the deep copy of any tensor is a leaf."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if tensor.is_leaf:
            with contextlib.suppress(RuntimeError):  # of a subclass
                return func(tensor, memo)
        new = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = new
        vars(new).update(copy.deepcopy(vars(tensor), memo))
        return new
