"""What a module's step can get hold of: by the module's attributes, and by name."""

from __future__ import annotations

import io
import queue
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_unitscale.graph.mentioned import mentioned

# Known by other means: what a module registers. Hooks are not among them: a step may install some.
REGISTERED = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"}
)
# A Trainer, a data loader, an optimizer: they are not the step's own, and hold the whole program.
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric", "numpy"})
_FRAMEWORKS |= {__name__.partition(".")[0]}
# Bases that say nothing about what an object is.
_NEUTRAL = frozenset({"builtins", "abc", "typing", "typing_extensions", "collections"})
_ATOMS = (str, bytes, int, float, complex, type, type(None))

_MISSING = object()

# Where something was met: the name or key within what is around it.
_Trail = tuple[Any, ...]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The Python attributes of one module, without what it registers."""
    return {name: one for name, one in vars(module).items() if name not in REGISTERED}


def state_of(value: object) -> dict[str, Any] | None:
    """The attributes of an object of the user's own class, by name; ``None`` of any other.

    Own is what no framework and no standard library has a hand in, and a module that is hidden
    from the one around it (in a list, so that its parameters are not trained).
    """
    if not _is_own(value):
        return None
    slots = (one for kind in type(value).__mro__ for one in _slots(kind))
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def restore_state(value: object, state: Mapping[str, Any]) -> None:
    """Give an object the attributes that :func:`state_of` has found, and no others."""
    slots = [one for kind in type(value).__mro__ for one in _slots(kind)]
    for name in slots:
        # Past a __setattr__ of the class's own, which may refuse: the class may be frozen.
        if name in state:
            object.__setattr__(value, name, state[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
    attributes = getattr(value, "__dict__", {})
    for name in [one for one in attributes if one not in state]:
        del attributes[name]
    for name, one in state.items():
        if name not in slots and attributes.get(name, _MISSING) is not one:
            attributes[name] = one


def reachable(module: nn.Module) -> Iterator[tuple[_Trail, Any]]:
    """Everything behind the attributes and buffers of all submodules, each object once.

    So is what their code mentions by a global name or as a free variable. Containers, tensors,
    arrays and objects of the user's own classes are looked into; classes, functions, and objects of
    torch and Lightning are not. The submodules themselves and their parameters are left out.

    Yields:
        Pairs of where a value is, as attribute names and keys, and the value.
    """
    modules = list(module.modules())
    seen = {id(one) for one in (*modules, *module.parameters())}
    found: list[tuple[_Trail, Any]] = []
    for path, one in module.named_modules():
        found += [((path, name), value) for name, value in one._buffers.items()]
        found += [((path, name), value) for name, value in own_attributes(one).items()]
    found += [(("", one.name), one.value) for one in mentioned(module)]
    while found:
        trail, value = found.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        yield trail, value
        found += [
            ((trail, key), inner) for key, inner in _inside(value) if not isinstance(inner, _ATOMS)
        ]


def find_once_only(module: nn.Module) -> str | None:
    """Something that a step can read once only, such as a generator; ``None`` if there is nothing.

    Returns:
        Where it is and what, for a message.
    """
    for trail, value in reachable(module):
        if isinstance(value, (queue.Queue, queue.SimpleQueue)) or (
            isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not _is_own(value)
        ):
            return f"{'.'.join(_names(trail))} ({type(value).__name__})"
    return None


def _inside(value: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif isinstance(value, dict):
        yield from value.items()
    state = state_of(value)
    if state is not None:
        yield from state.items()


def _is_own(value: object) -> bool:
    if isinstance(value, (nn.Module, SimpleNamespace)):
        return True
    if isinstance(value, (Tensor, np.ndarray)) or not hasattr(type(value), "__mro__"):
        return False
    roots = {kind.__module__.partition(".")[0] for kind in type(value).__mro__} - _NEUTRAL
    return bool(roots) and not roots & _FRAMEWORKS and not roots & sys.stdlib_module_names


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(one for one in names if one not in {"__dict__", "__weakref__"})


def _names(trail: _Trail) -> list[str]:
    names: list[str] = []
    while isinstance(trail, tuple):
        trail, name = trail
        names.append(str(name))
    return [one for one in (trail, *reversed(names)) if one]
