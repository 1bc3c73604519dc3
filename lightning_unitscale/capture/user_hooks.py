"""Find hooks and recorded passes that a captured step would run differently or not at all.

A captured graph is one node of autograd's graph. Hooks of modules inside it never see a gradient.
Hooks of parameters run in another order, because all gradients arrive at once. The node cannot be
differentiated a second time.

Private names used here were checked on torch 2.13 and 2.11: ``_engine_run_backward``, by which
``torch.autograd`` runs all backward passes, ``RemovableHandle.next_id``, and the dictionaries of
hooks of modules, of parameters and of all modules.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import graph as autograd_graph
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.patching import shadowed

_OF_MODULES = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
_OF_PARAMETERS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
_OWN_PACKAGE = __name__.partition(".")[0]


def num_registered() -> int:
    """Return a number that grows whenever a hook is registered on anything."""
    return RemovableHandle.next_id


def find_backward_hook(module: nn.Module) -> str | None:
    """Name a hook that takes part in a module's backward passes, or return ``None``."""
    for name, kind in _OF_MODULES.items():
        if (hook := _first(getattr(module_hooks, f"_global{name}"))) is not None:
            return f"all modules have a {kind}, {_named(hook)}"
    for path, owner in module.named_modules():
        for name, kind in _OF_MODULES.items():
            if (hook := _first(getattr(owner, name, None))) is not None:
                return f"{path or type(owner).__name__} has a {kind}, {_named(hook)}"
    for path, parameter in module.named_parameters():
        for name, kind in _OF_PARAMETERS.items():
            if (hook := _first(getattr(parameter, name, None))) is not None:
                return f"{path} has a {kind}, {_named(hook)}"
    return None


def _first(hooks: Mapping[int, Any] | None) -> Any:
    """Return the first hook that is not this package's own."""
    return next((hook for hook in (hooks or {}).values() if not _is_own(hook)), None)


def _is_own(hook: Any) -> bool:
    name = getattr(hook, "__module__", None) or type(hook).__module__
    return str(name).partition(".")[0] == _OWN_PACKAGE


def _named(hook: Any) -> str:
    """Return the hook's name and where it was written."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    code = getattr(inspect.unwrap(hook), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


@contextlib.contextmanager
def noticing_recorded_passes(notice: Callable[[], None]) -> Iterator[None]:
    """Call ``notice`` before each backward pass with ``create_graph=True``."""
    run = autograd_graph._engine_run_backward
    # Both run in the middle of a step, whose functions Dynamo captures as it meets them.
    notice = torch.compiler.disable(notice)

    @functools.partial(torch.compiler.disable, recursive=False)
    @functools.wraps(run)
    def notice_and_run(
        outputs: Any, grad_outputs: Any, keeps_graph: Any, creates_graph: Any, *args: Any, **kw: Any
    ) -> Any:
        if creates_graph:
            notice()
        return run(outputs, grad_outputs, keeps_graph, creates_graph, *args, **kw)

    with shadowed(torch.autograd, _engine_run_backward=notice_and_run):
        yield
