"""Undo the effects of a step on its module and on random numbers, and copy its inputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import queue
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.overrides import TorchFunctionMode

from lightning_unitscale.capture.aot_backend import is_python_subclass

# Registrations of a module, without hooks, since a step may install some.
_REGISTERED = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
)


@contextlib.contextmanager
def restoring(module: nn.Module, *, parameters: bool = True) -> Iterator[None]:
    """Undo, on leaving, the effects of a step on its module and on random numbers."""
    # Covered: random states of torch on the module's devices, of Python and of NumPy; buffers; the
    # Python attributes of every submodule and parameter, with the containers, arrays, tensors and
    # random generators in them. A lazy module waits for its first call again. State elsewhere
    # (objects of the user's own classes, globals, iterators) stays changed.
    with contextlib.ExitStack() as undo:
        for restore in _restorers(module, parameters=parameters):
            undo.callback(restore)
        if parameters:
            # A backward pass in the step would add to a gradient in place.
            for parameter in module.parameters():
                parameter.grad = None
        yield


def set_up_by(call: Callable[[], object], module: nn.Module, *, keeps_root: bool = True) -> bool:
    """Make the first call of a module without gradients, and return whether it set anything up."""
    # Random numbers and buffers are as before, and without ``keeps_root`` the module's own
    # attributes and the memory of its parameters as well. A library's setup stays, which no graph
    # may be able to contain: transformers installs hooks in a module's first call, under a lock.
    before = _setup_of(module)
    with contextlib.ExitStack() as undo:
        for restore in chain(_random_restorers(module), *map(restorers_of, module.buffers())):
            undo.callback(restore)
        for restore in () if keeps_root else _root_restorers(module):
            undo.callback(restore)
        with torch.no_grad():
            call()
    return _setup_of(module) != before


def _root_restorers(module: nn.Module) -> Iterator[Callable[[], object]]:
    own = _own_attributes(module)
    yield functools.partial(_restore_module, module, type(module), own, ())
    for path, value in held_values(module):
        if path.partition(".")[0] in own:
            yield from restorers_of(value)
    for parameter in module.parameters():
        if not is_lazy(parameter):
            yield functools.partial(_restore_memory, parameter, parameter.data)


def _setup_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes and hooks of a module that a first call may change."""
    return [{name: _brief(value) for name, value in vars(one).items()} for one in module.modules()]


def _brief(value: Any) -> Any:
    if isinstance(value, dict):  # such as a module's hooks
        return len(value)
    return value if isinstance(value, (bool, int, str)) else type(value)


def undoers(module: nn.Module, keep: Collection[str] = ()) -> Iterator[Callable[[], object]]:
    """Yield functions that undo a step, except for parameters. Call them in reverse."""
    yield from _restorers(module, parameters=False, keep=keep)
    for parameter in module.parameters():
        yield functools.partial(_restore_hooks, parameter, set(parameter._backward_hooks or ()))
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            yield from restorers_of(gradient)
        yield functools.partial(setattr, parameter, "grad", gradient)


def _restore_hooks(parameter: nn.Parameter, before: set[Any]) -> None:
    hooks = parameter._backward_hooks or {}
    for key in hooks.keys() - before:
        del hooks[key]


def _restorers(
    module: nn.Module, *, parameters: bool, keep: Collection[str] = ()
) -> Iterator[Callable[[], object]]:
    yield from _random_restorers(module)
    for owner in module.modules():
        kept = keep if owner is module else ()
        saved = {name: value for name, value in _own_attributes(owner).items() if name not in kept}
        yield functools.partial(_restore_module, owner, type(owner), saved, kept)
        for registered in (owner._parameters, owner._modules):
            if isinstance(registered, dict):  # a scripted module does not move tensors
                yield functools.partial(_restore_registered, registered, dict(registered))
    for _, value in held_values(module):
        yield from restorers_of(value)
    for tensor in (*module.parameters(), *module.buffers()):
        if is_lazy(tensor):
            yield functools.partial(_restore_lazy, tensor, type(tensor), tensor.data)
    if not parameters:
        return
    for parameter in module.parameters():
        yield functools.partial(setattr, parameter, "grad", parameter.grad)
        # Except tensors that its first call gives a shape.
        if not is_lazy(parameter) and parameter.device.type != "meta":
            # On the host, since a second copy may not fit on an accelerator.
            numbers = parameter.detach().to("cpu", copy=True)
            yield functools.partial(_restore_parameter, parameter, parameter.data, numbers)


def _random_restorers(module: nn.Module) -> Iterator[Callable[[], object]]:
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    for device in {tensor.device for tensor in (*module.parameters(), *module.buffers())}:
        if device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
            yield functools.partial(torch.cuda.set_rng_state, state, device)
    yield functools.partial(random.setstate, random.getstate())
    yield functools.partial(np.random.set_state, np.random.get_state())


def _restore_module(
    module: nn.Module, kind: type, saved: dict[str, Any], kept: Collection[str]
) -> None:
    attributes = vars(module)
    for name in _own_attributes(module).keys() - set(kept):
        del attributes[name]
    attributes.update(saved)
    # The first call of a lazy module changes its class.
    if type(module) is not kind:
        module.__class__ = kind


def _restore_registered(registered: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore tensors that a parametrization has moved or that FSDP has exchanged."""
    if registered.keys() != saved.keys():
        registered.clear()
        registered.update(saved)


def _restore_lazy(tensor: Tensor, kind: type, data: Tensor) -> None:
    """Make a lazy tensor wait for its first call again, which then draws the same numbers."""
    if type(tensor) is not kind:
        tensor.data = data
        tensor.__class__ = kind


def _restore_memory(parameter: nn.Parameter, data: Tensor) -> None:
    # A step may give it other storage, while others still share the old one.
    if parameter.data_ptr() != data.data_ptr():
        parameter.data = data


def _restore_parameter(parameter: nn.Parameter, data: Tensor, saved: Tensor) -> None:
    _restore_memory(parameter, data)
    numbers = saved.to(parameter.device)
    if not torch.equal(parameter.detach(), numbers):
        parameter.data.copy_(numbers)


def held_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield buffers and attributes of submodules and parameters, also in containers, each once."""
    seen = {id(value) for value in (*module.modules(), *module.parameters())}
    waiting: list[tuple[str, Any]] = []
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        waiting.append((f"{prefix}_buffers", owner._buffers))
        waiting += [(prefix + name, value) for name, value in _own_attributes(owner).items()]
    for path, parameter in module.named_parameters():
        # The elements of a distributed tensor, or of another subclass, are its numbers.
        if type(parameter) is nn.Parameter:
            waiting.append((path, vars(parameter)))
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
    """Return a value that a step can read once only, such as a generator, if there is any."""
    for path, value in held_values(module):
        is_iterator = isinstance(value, Iterator) and not isinstance(value, io.IOBase)
        if is_iterator or isinstance(value, (queue.Queue, queue.SimpleQueue)):
            return f"{path} ({type(value).__name__})"
    return None


_ATOMS = (str, bytes, int, float, complex, type, type(None))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTERED}


def restorers_of(value: Any) -> Iterator[Callable[[], object]]:
    """Yield functions that restore the contents of an object, or none for other kinds."""
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        state: Any = value.get_state()
        yield functools.partial(value.set_state, state)
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
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
    elif isinstance(value, (list, deque, set, dict)):
        kind = dict if isinstance(value, dict) else set if isinstance(value, set) else list
        yield functools.partial(_restore_container, value, kind(value))


def _restore_tensor(tensor: Tensor, saved: Tensor) -> None:
    if not torch.equal(tensor.detach(), saved):
        with torch.inference_mode(tensor.is_inference()):
            tensor.data.copy_(saved)


def _restore_container(container: Any, saved: Any) -> None:
    # Unchanged objects are not touched, since other threads may be reading them.
    if _identities(container) != _identities(saved):
        container.clear()
        (container.extend if isinstance(saved, list) else container.update)(saved)


def _identities(container: Any) -> list[int]:
    return list(map(id, chain(*container.items()) if isinstance(container, dict) else container))


def detached_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy whose tensors are leaves of autograd's graph."""
    # `copy.deepcopy` takes only tensors that the user has made, and subclasses only if they support
    # it. A tensor computed by another part of a program is neither.
    with _Leaves():
        return copy.deepcopy(value, memo)


class _Leaves(TorchFunctionMode):
    """Mode in which the deep copy of any tensor is a leaf."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if isinstance(tensor, UninitializedBuffer):
            # torch itself copies lazy parameters only.
            lazy: Any = type(tensor)
            memo[id(tensor)] = lazy(device=tensor.data.device, dtype=tensor.data.dtype)
            return memo[id(tensor)]
        if tensor.is_leaf:
            with contextlib.suppress(RuntimeError):  # raised by a subclass
                return func(tensor, memo)
        new = tensor.detach().clone()
        if type(new) is not type(tensor) and is_python_subclass(tensor):
            new = new.as_subclass(type(tensor))
        new.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = new
        vars(new).update(copy.deepcopy(vars(tensor), memo))
        return new
