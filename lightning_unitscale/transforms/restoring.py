"""Undo what a rehearsal of a step has done."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_unitscale.graph.mentioned import mentioned
from lightning_unitscale.transforms.reachable import (
    REGISTERED,
    own_attributes,
    reachable,
    restore_state,
    state_of,
)


@contextlib.contextmanager
def restoring(module: nn.Module, *, numbers: bool = True) -> Iterator[None]:
    """Undo, on leaving, what a rehearsal of a step does to the module and to random numbers.

    Args:
        module: The module.
        numbers: Whether to put back the numbers of parameters, gradients, tensors and arrays, which
            takes a copy of them, and random states of accelerators. A rehearsal that leaves out the
            graphs changes none of these.

    Covered: random states of torch on every device, of Python and of NumPy; parameters (a step may
    normalise a weight or average a teacher), buffers and gradients; and the Python attributes of
    every submodule, with the containers, arrays, tensors, random generators and objects of the
    user's own classes in them (a list that a step appends to, a replay buffer, metric states). So
    are globals and free variables that the modules' own code mentions.
    A lazy module waits for its first call again.
    Nothing undoes what an iterator has given or a file has taken.
    """
    changing = list(module.parameters()) if numbers else []
    placed = (*changing, *module.buffers()) if numbers else ()
    accelerators = [one for one in {one.device for one in placed} if one.type == "cuda"]
    gradients = [(one, one.grad) for one in changing]
    attributes = [(one.__dict__, own_attributes(one)) for one in module.modules()]
    parameters = [(one, _Parameter(one)) for one in changing if _has_numbers(one)]
    kinds = [(one, type(one)) for one in module.modules()]
    lazy = [_Lazy(one) for one in (*module.parameters(), *module.buffers()) if is_lazy(one)]
    bindings = [one for one in mentioned(module) if one.name]
    values = [*(one._buffers for one in module.modules()), *(one for _, one in reachable(module))]
    if not numbers:
        values = [one for one in values if not isinstance(one, (Tensor, np.ndarray))]
    contents = [restore for one in values for restore in _restorers(one)]
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
                for name in [one for one in current if one not in REGISTERED]:
                    del current[name]
                current.update(saved)
            for restore in contents:
                restore()
            for one, kind in kinds:
                # What its first call gives shapes changes its class.
                if type(one) is not kind:
                    one.__class__ = kind
            for waiting in lazy:
                waiting.restore()
            for binding in bindings:
                binding.restore()
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


def _restorers(value: Any) -> Iterator[Callable[[], object]]:
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
    state = state_of(value)
    if state is not None:
        yield functools.partial(restore_state, value, state)


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


def _are_same(found: Collection[Any], saved: Collection[Any]) -> bool:
    return len(found) == len(saved) and all(map(operator.is_, found, saved))
