"""Undo what a rehearsal of a step has done."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@contextlib.contextmanager
def restoring(module: nn.Module) -> Iterator[None]:
    """Undo, on leaving, what a rehearsal of a step does to the module and to random numbers.

    Covered: random states of torch on every device, of Python and of NumPy; parameters (a step may
    normalise a weight or average a teacher), buffers and gradients; and the Python attributes of
    every submodule, with the containers, arrays, tensors and random generators in them (a list
    that a step appends to, a counter, metric states). Objects of other classes are left alone.
    """
    devices = {one.device for one in (*module.parameters(), *module.buffers())}
    accelerators = [one for one in devices if one.type == "cuda"]
    gradients = [(one, one.grad) for one in module.parameters()]
    attributes = [(one.__dict__, _attributes(one)) for one in module.modules()]
    parameters = [(one, _Parameter(one)) for one in module.parameters() if _has_numbers(one)]
    contents = _Contents()
    for one in module.modules():
        contents.add(one._buffers)
        contents.add(_attributes(one))
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
                for name in [one for one in current if one not in _MODULE_INTERNALS]:
                    del current[name]
                current.update(saved)
            contents.restore()
            for parameter, kept in parameters:
                kept.restore(parameter)
            for parameter, gradient in gradients:
                parameter.grad = gradient


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


# Restored by other means. Hooks are not among them: a step may install some in its first call.
_MODULE_INTERNALS = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: one for name, one in module.__dict__.items() if name not in _MODULE_INTERNALS}


class _Contents:
    """What is in containers, tensors and generators, put back: others may hold the same objects."""

    def __init__(self) -> None:
        # The objects are kept as well: an identity is worth something only while its object lives.
        self._saved: dict[int, tuple[Any, Any]] = {}
        self._generators: dict[int, tuple[Any, Callable[[], object]]] = {}

    def add(self, value: object) -> None:
        """Remember a container and everything in it, or a tensor."""
        if id(value) in self._saved or id(value) in self._generators:
            return
        restore_generator = _restorer(value)
        if restore_generator is not None:
            self._generators[id(value)] = (value, restore_generator)
        if isinstance(value, Tensor):
            self._saved[id(value)] = (value, value.detach().clone())
        elif isinstance(value, np.ndarray):
            self._saved[id(value)] = (value, value.copy())
        elif isinstance(value, (list, dict, set, deque)):
            self._saved[id(value)] = (value, copy.copy(value))
        if isinstance(value, (list, tuple, deque)):
            for one in value:
                self.add(one)
        elif isinstance(value, dict):
            for one in value.values():
                self.add(one)

    def restore(self) -> None:
        """Give every container, tensor and generator its old contents."""
        for _, restore in self._generators.values():
            restore()
        for current, saved in self._saved.values():
            if isinstance(current, Tensor):
                if not torch.equal(current.detach(), saved):
                    with torch.inference_mode(current.is_inference()):
                        current.data.copy_(saved)
            elif isinstance(current, np.ndarray):
                if current.flags.writeable:
                    np.copyto(current, saved)
            else:
                current.clear()
                (current.extend if isinstance(current, (list, deque)) else current.update)(saved)


def _restorer(value: object) -> Callable[[], object] | None:
    """What takes a random generator back to where it stands now; ``None`` for anything else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        generator = value.bit_generator
        return functools.partial(setattr, generator, "state", generator.state)
    return None
