"""Postpone or run untraced the side effects of a step: logging, appends, updates.

Dynamo cannot trace Lightning's ``self.log``: tracing it is an internal error, and skipping it
breaks the graph. A recorder that appends to a list is traced without either. Copies of the tensors
become outputs of the graph, since a step may later write into what it has logged. Dynamo guards on
the length of a list that a step appends to (``self.outputs.append(loss)``), so the step would be
recaptured at every call. So such lists are recorded too.

Dynamo would trace an optimizer's step like any other code. Traced optimizers use another algorithm
(``torch.optim`` then keeps its step count in a tensor), so the last bits of the weights would
differ. So backward passes and updates of the weights run untraced.

The code that a step reaches is read to find its appends, and whether it takes gradients of
gradients.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unitscale.capture.breaks import is_installed_file
from lightning_unitscale.patching import shadowed

# An object, the name of its method and, for a rehearsal, an optional replacement.
Calls = Iterable[tuple[Any, str] | tuple[Any, str, Callable[..., None]]]
# These packages do not use the lists of a user's module.
_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "lightning_fabric"})
_FRAMEWORKS |= {"builtins", "abc", "typing", "collections", __name__.partition(".")[0]}
_GROWS = frozenset({"append", "extend"})
_PASSED_OVER = frozenset({"CACHE", "NOP", "EXTENDED_ARG"})
_OPTION = "create_graph"


class Postponed:
    """Calls of logging methods and appends to lists, made after the step has run."""

    def __init__(self, module: nn.Module, step: Callable[..., Any], names: Sequence[str]) -> None:
        self._module = module
        self._step = step
        self.calls: list[_Call] = []
        # Kept, since Dynamo guards on them.
        self._methods = {
            name: _MethodRecorder(name, self.calls).record
            for name in names
            if callable(getattr(module, name, None))
        }
        self._lists: dict[str, _MethodRecorder] = {}
        self._names_of_lists: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Return the attributes of the module that record while a step runs."""
        return frozenset((*self._methods, *self._lists))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls and appends in this context. Methods and lists are restored after it."""
        self.discard()
        names = frozenset(lists_of(self._module))
        if names != self._names_of_lists:
            self._names_of_lists = names
            self._lists = {
                name: self._lists.get(name) or _MethodRecorder(name, self.calls)
                for name in sorted(only_appended_to(self._module, self._step, names))
            }
        with shadowed(self._module, **self._methods, **self._lists):
            yield

    def replay(self) -> None:
        """Make the recorded calls and appends in their order."""
        calls = list(self.calls)
        self.discard()
        for name, args, kwargs in calls:
            target = getattr(self._module, name)
            (target.append if isinstance(target, list) else target)(*args, **kwargs)

    def discard(self) -> None:
        """Forget the records: the step was a rehearsal, or failed."""
        self.calls.clear()


# Name of a method, or of a list that its argument is appended to.
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class _MethodRecorder:
    """Replacement for a method, or for a list that is empty before every step."""

    # Dynamo traces an ordinary append, and guards on nothing that changes.

    def __init__(self, name: str, calls: list[_Call]) -> None:
        self.name = name
        self.calls = calls

    def record(self, *args: Any, **kwargs: Any) -> None:
        copied = tuple(_as_it_is(value) for value in args)
        self.calls.append((self.name, copied, {k: _as_it_is(value) for k, value in kwargs.items()}))

    def append(self, value: Any) -> None:
        self.calls.append((self.name, (value,), {}))

    def extend(self, values: Iterable[Any]) -> None:
        for value in values:
            self.calls.append((self.name, (value,), {}))


def _as_it_is(value: Any) -> Any:
    """Copy a value so that the rest of the step cannot change it, except a metric's state."""
    # This is a plain function over plain dictionaries, so Dynamo traces it without a break.
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _as_it_is(item) for key, item in value.items()}
    return value


class UntracedCalls:
    """Replacements for methods of objects, while a step runs, that Dynamo does not trace."""

    def __init__(
        self, find: Callable[[], Calls], trace: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._find = find
        self.trace = trace
        # In a rehearsal the methods are skipped, except for their closures, because it must not
        # update weights.
        self.is_rehearsing = False
        # Kept, since Dynamo guards on the identity of called functions.
        self._calls: dict[tuple[int, str], _Untraced] = {}

    @contextlib.contextmanager
    def replaced(self, *, is_rehearsing: bool = False) -> Iterator[None]:
        """Run the methods untraced in this context. The real ones are restored after it."""
        self.is_rehearsing = is_rehearsing
        with contextlib.ExitStack() as stack:
            for target, name, *rehearsed in self._find():
                call = self._calls.setdefault((id(target), name), _Untraced(target, self))
                if vars(target).get(name) is call.run:
                    continue  # a step within a step
                call.method, call.rehearsed = getattr(target, name), next(iter(rehearsed), None)
                # Copy the attributes on the method, such as a scheduler's counter.
                call.run.__dict__.update(getattr(call.method, "__dict__", {}))
                stack.enter_context(shadowed(target, **{name: call.run}))
            yield


@contextlib.contextmanager
def plain_forward(module: nn.Module) -> Iterator[None]:
    """Remove ``forward`` from the instance in this context, if it is the class's own anyway."""
    # Lightning sets it there under DDP. Dynamo would find it, and all that it calls, at another
    # place than in the rehearsal outside of DDP. Then the tensors would have other names.
    attributes = module.__dict__
    forward = attributes.get("forward")
    is_own = getattr(forward, "__self__", None) is module and (
        getattr(forward, "__func__", None) is getattr(type(module), "forward", None)
    )
    if is_own:
        del attributes["forward"]
    try:
        yield
    finally:
        if is_own:
            attributes.setdefault("forward", forward)


class _Untraced:
    """One method of one object, stored so that its identity does not change."""

    def __init__(self, owner: Any, calls: UntracedCalls) -> None:
        self.owner = owner
        self.method: Callable[..., Any] = lambda: None
        self.rehearsed: Callable[..., None] | None = None
        self._calls = calls
        self.run = torch.compiler.disable(self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._calls.is_rehearsing:
            if self.rehearsed is not None:
                self.rehearsed(*args, **kwargs)
            closures = [
                function for function in (*args, *kwargs.values()) if hasattr(function, "__code__")
            ]
            results = [self._traced(function)() for function in closures]
            return results[-1] if results else None
        args = tuple(self._traced(value) for value in args)
        return self.method(*args, **{name: self._traced(value) for name, value in kwargs.items()})

    def _traced(self, value: Any) -> Any:
        if not hasattr(value, "__code__"):
            return value
        return functools.wraps(value)(self._calls.trace(value))


def only_appended_to(
    module: nn.Module, step: Callable[..., Any], names: Collection[str]
) -> set[str]:
    """Return the named attributes that a step only appends to."""
    # The code of a step is found by the names that it mentions, from the step and every `forward`
    # on. It includes methods of the module, of its submodules and of their objects, functions, and
    # Python modules. Installed packages do not use a user's lists, except those that define the
    # module's classes. If a step runs optimizers, the result is empty, since their hooks may read
    # anything.
    if not names or optimizes_itself(module):
        return set()
    mentions = {
        mention
        for function in reachable(module, step)
        for code in codes_of(function.__code__)
        if any(name in names for name in (*code.co_names, *code.co_consts) if type(name) is str)
        for mention in _mentions(code)
    }
    return {name for name in names if (name, True) in mentions and (name, False) not in mentions}


def optimizes_itself(module: nn.Module) -> bool:
    """Check whether a LightningModule calls backward passes and optimizers in its own step."""
    # Found on the class, since a user's ``__getattr__`` may raise any error.
    is_lightning = hasattr(type(module), "automatic_optimization")
    return is_lightning and not module.automatic_optimization


def lists_of(module: nn.Module) -> Iterator[str]:
    """Yield the names of attributes that are lists and that no other attribute shares."""
    lists = [(name, value) for name, value in vars(module).items() if type(value) is list]
    counts = Counter(id(value) for _, value in lists)
    yield from (name for name, value in lists if counts[id(value)] == 1)


def reachable(module: nn.Module, step: Callable[..., Any]) -> Iterator[FunctionType]:
    """Yield the user's functions that a method mentions by name, directly or indirectly."""
    own = frozenset(root_of(kind) for kind in type(module).__mro__)
    methods = _methods(module, own)
    start = function_in(step)
    waiting = [*methods.get("forward", ()), *([] if start is None else [start])]
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        yield function
        names = set(names_in(function))
        waiting += [method for name in names for method in methods.get(name, ())]
        for value in values_in(function):
            held: Iterable[Any] = (value,)
            if isinstance(value, ModuleType):
                held = (vars(value).get(name) for name in names)
            elif isinstance(value, type) and value not in type(module).__mro__:
                # ``super()`` mentions its own class. Not every class takes isinstance(): typing.Any
                # does not.
                held = functions_of(value)
            functions = [function_in(value) for value in held]
            waiting += [other for other in functions if other and _may_look(other, own)]


def _may_look(value: Any, own: Collection[str]) -> bool:
    """Check whether a class or a function is the user's."""
    root = root_of(value)
    file = getattr(sys.modules.get(root), "__file__", None)
    # Code typed into a notebook has no file.
    is_installed = file is not None and is_installed_file(file)
    return root not in _FRAMEWORKS and (root in own or not is_installed)


def _methods(module: nn.Module, own: Collection[str]) -> dict[str, list[FunctionType]]:
    """Return the methods that a name can call on the module, its submodules or their objects."""
    tables = [vars(owner) for owner in module.modules()]
    owners = [*module.modules(), *(value for table in tables for value in table.values())]
    kinds = {kind for owner in owners for kind in type(owner).__mro__}
    tables += [dict(vars(kind)) for kind in kinds if _may_look(kind, own)]
    methods: dict[str, list[FunctionType]] = {}
    for name, value in (item for table in tables for item in table.items()):
        function = function_in(value)
        if function is not None and _may_look(function, own):
            methods.setdefault(name, []).append(function)
    return methods


def _mentions(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield the attributes that code names, and whether only to append to them."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in _PASSED_OVER]
    # The last instruction is a return, so no pair is lost.
    for instruction, after in pairwise(instructions):
        if instruction.opname.endswith(("_ATTR", "LOAD_METHOD")):
            is_appended = instruction.opname == "LOAD_ATTR" and (
                after.opname in ("LOAD_ATTR", "LOAD_METHOD") and after.argval in _GROWS
            )
            yield str(instruction.argval), is_appended
    # Names passed to ``getattr`` and similar functions.
    yield from ((constant, False) for constant in code.co_consts if isinstance(constant, str))


def functions_of(kind: type) -> Iterator[FunctionType]:
    """Yield the functions that one class defines: methods and properties."""
    for value in vars(kind).values():
        function = function_in(value)
        if function is not None:
            yield function


def names_in(function: FunctionType) -> Iterator[str]:
    """Yield the globals and attributes that a function and its inner functions mention."""
    for code in codes_of(function.__code__):
        yield from code.co_names


def function_in(value: Any) -> FunctionType | None:
    """Return the function behind a method or a property's getter, or ``None``."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else None
    return value if isinstance(value, FunctionType) else None


def values_in(function: FunctionType) -> Iterator[Any]:
    """Yield the values of the globals and free variables that a function mentions."""
    namespace = function.__globals__
    for name in names_in(function):
        if name in namespace:
            yield namespace[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not bound yet


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code and that of the functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def root_of(value: Any) -> str:
    """Return the package that a class or a function was written in."""
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def find_node_hook(module: nn.Module, method: Callable[..., Any]) -> str | None:
    """Find code that a method reaches and that hooks a node of autograd, and return its place."""
    for function in reachable(module, method):
        for code in codes_of(function.__code__):
            names = set(code.co_names)
            if "register_prehook" in names or {"grad_fn", "register_hook"} <= names:
                return f"{code.co_filename}:{code.co_firstlineno}"
    return None


def find_recorded_pass(module: nn.Module, method: Callable[..., Any]) -> str | None:
    """Find ``create_graph`` in the user's code that a method reaches, and return its place."""
    for function in reachable(module, method):
        for code in codes_of(function.__code__):
            # Names of keyword arguments of a call are a tuple among the constants.
            tuples = [constant for constant in code.co_consts if isinstance(constant, tuple)]
            if any(_OPTION in constants for constants in (code.co_consts, *tuples)):
                return f"{code.co_filename}:{code.co_firstlineno}"
    return None
