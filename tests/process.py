"""Set up every process that runs tests, so that tests take no longer than necessary.

Torch is imported after this file: garbage is collected rarely from the first import on.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import os
import sys
from contextlib import AbstractContextManager
from typing import Any

# Set where backward passes are to run on threads of autograd's engine.
ENGINE_THREAD = "TESTS_ENGINE_THREAD"

# Thresholds of the three generations.
gc.set_threshold(100_000, 20, 100)


def spare_time() -> None:
    """Collect garbage rarely, switch off timing in Dynamo, and set all seeds.

    A capture makes many objects that stay, and each collection would go through all of them: there
    is one after each frame that Dynamo compiles. The guards of every frame would be timed for a
    line of Dynamo's log, with the caches of the processor flushed before. For the seed of a device
    that has not started torch formats the stack of the caller, once for each kind of device.
    And each Trainer of Lightning's would read the entry points of all packages that are installed.
    """
    forget_garbage()
    importlib.import_module("torch._dynamo.config").run_gc_after_compile = False
    guards = importlib.import_module("torch._dynamo.guards")
    guards.profile_guard_manager = lambda *_: 0.0
    torch = importlib.import_module("torch")
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
    for package in ("lightning.fabric", "lightning_fabric"):
        registry = sys.modules.get(f"{package}.utilities.registry")
        if registry is not None:
            registry.entry_points = functools.cache(registry.entry_points)


def engine_thread_if_asked() -> AbstractContextManager[None]:
    """A context for all tests of a process; see ``--engine-thread``."""
    if ENGINE_THREAD not in os.environ:
        return contextlib.nullcontext()
    context: AbstractContextManager[None] = importlib.import_module(
        "tests.engine_thread"
    ).backward_on_engine_thread()
    return context


def spare_interpreter() -> None:
    """Lets Triton's interpreter change its language for a kernel, not for each function in it.

    It would look through all of the language each time, and find what it has put there itself.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None:
        return  # Triton 3.6
    change, language = interpreter._patch_lang, interpreter.tl

    def change_once(function: Any) -> Any:
        read = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        modules = [module for module in (language, language.core) if module in read]
        is_changed = not any(language.core.is_builtin(module.load) for module in modules)
        return scope() if is_changed else change(function)

    interpreter._patch_lang = change_once


def forget_garbage() -> None:
    """Collect garbage, and exclude the remaining objects from later collections."""
    gc.collect()
    gc.freeze()
