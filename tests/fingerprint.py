"""Everything that a run must restore: a module, optimizers, a Trainer, and torch itself."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
from torch import nn
from torch._dynamo import convert_frame, eval_frame, symbolic_convert
from torch._dynamo.variables import SkipFunctionVariable
from torch._dynamo.variables import torch as torch_variables
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import NumpyVariable, RandomClassVariable, RandomVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._inductor import decomposition
from torch.distributed.tensor import _random
from torch.optim import optimizer as optimizers
from torch.overrides import _len_torch_function_stack

from benchmarks.executed_matmuls import has_torchs_own_kernels
from lightning_unitscale.callbacks.lightning_steps import StepsCallback
from lightning_unitscale.rules.transform import PLAN_ATTRIBUTE

# Modules of Dynamo, torch's modes and autograd that are patched.
_PATCHED = (
    VariableBuilder,
    NumpyVariable,
    RandomVariable,
    RandomClassVariable,
    OptimizerVariable,
    SkipFunctionVariable,
    convert_frame.ConvertFrame,
    convert_frame,
    eval_frame,
    symbolic_convert,
    torch_variables,
    torch._dynamo.utils,
    torch.overrides,
    torch.autograd.graph,
    torch.autocast,
    torch.cuda,
    torch.UntypedStorage,
    torch.optim.Optimizer,
    _random,
)
_INDUCTOR = (
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
)
# Lightning's own, which a plain run leaves as well.
_LIGHTNINGS = frozenset(
    {"_trainer", "_fabric", "_hparams", "_hparams_initial", "_log_hyperparams", "_current_fx_name"}
    | {"_metric_attributes", "_param_requires_grad_state", "_device", "training", "_results"}
)
_OF_TRAINERS = ("_lightning_module", "_model", "log", "log_dict")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def of_torch() -> dict[str, Any]:
    """Return torch's state of the whole process and of this thread."""
    assert has_torchs_own_kernels()
    found: dict[str, Any] = {
        f"{getattr(owner, '__name__', owner)}.{name}": _identity(value)
        for owner in _PATCHED
        for name, value in vars(owner).items()
        if callable(value)
    }
    inductor = torch._inductor.config
    return found | {
        "function modes": _len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "autocast": [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "saving refused": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "profiler": torch._C._autograd._profiler_enabled(),
        "functorch": torch._C._functorch.get_dynamic_layer_stack_depth(),
        "default type": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "optimizer pre-hooks": list(optimizers._global_optimizer_pre_hooks),
        "optimizer post-hooks": list(optimizers._global_optimizer_post_hooks),
        "Dynamo's settings": torch._dynamo.config.get_config_copy(),
        "Inductor's passes": {name: getattr(inductor, name) for name in _INDUCTOR},
        "decompositions": len(decomposition.decompositions),
        "stance": str(eval_frame._stance),
        "imports": list(map(id, sys.meta_path)),
        "warnings": list(warnings.filters),
        "module hooks": [
            list(hooks)
            for name, hooks in vars(nn.modules.module).items()
            if name.startswith("_global_") and hasattr(hooks, "keys")
        ],
        "threads": [one.name for one in threading.enumerate() if not one.daemon],
    }


def of_module(module: nn.Module, but: Iterable[str] = ()) -> dict[str, Any]:
    """Attributes and hooks of a module, its submodules, parameters and buffers.

    Args:
        module: The module.
        but: Names of attributes of the module itself that may change.
    """
    found: dict[str, Any] = {}
    for path, one in module.named_modules():
        left_out = _LIGHTNINGS | ({*but} if one is module else set())
        for name, value in vars(one).items():
            if name not in left_out:
                found[f"{path}.{name}"] = _identity(value)
                if name.endswith("_hooks") or name in ("_parameters", "_modules", "_buffers"):
                    found[f"{path}.{name}[]"] = [*value, *map(id, value.values())]
        found[f"{path} is a"] = type(one)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found[name] = id(tensor), type(tensor), sorted(vars(tensor)), tensor.requires_grad
        found[f"{name} hooks"] = [len(getattr(tensor, hooks) or ()) for hooks in _HOOKS]
    return found


def of_object(owner: Any, but: Iterable[str] = ()) -> dict[str, Any]:
    """Methods that were put on an object, and its hooks.

    Args:
        owner: An optimizer, a logger, a plugin, a callback of the user's.
        but: Names of attributes that may change.
    """
    return {
        name: [*value] if name.endswith("_hooks") and hasattr(value, "keys") else _identity(value)
        for name, value in vars(owner).items()
        if name not in but and (callable(value) or name.endswith("_hooks") or "unitscale" in name)
    }


def of_trainer(trainer: Any) -> dict[str, Any]:
    """A Trainer with its callbacks, plugins, loops, connectors and loggers."""
    strategy = trainer.strategy
    parts = [trainer, strategy, strategy.precision_plugin, strategy.accelerator]
    parts += [strategy.checkpoint_io, trainer.fit_loop, trainer.fit_loop.epoch_loop]
    parts += [trainer._data_connector, trainer._signal_connector, trainer.profiler]
    # Ours may keep what they have measured.
    others = [one for one in trainer.callbacks if not isinstance(one, StepsCallback)]
    parts += [*trainer.loggers, *others]
    found: dict[str, Any] = {"callbacks": list(map(id, trainer.callbacks))}
    for index, part in enumerate(parts):
        found |= {
            f"{index} {type(part).__name__}.{name}": value
            for name, value in of_object(part, but=_OF_TRAINERS).items()
        }
    return found


# By rules a module keeps its plan, and marks what is saved of it.
_OF_RULES = frozenset({PLAN_ATTRIBUTE, "on_save_checkpoint"})


def of_run(module: nn.Module, trainer: Any = None) -> dict[str, Any]:
    """Everything that a run of a Trainer must leave as it was.

    Args:
        module: Its module. Attributes that a class lists as ``of_tests`` may change.
        trainer: The Trainer, where it is to be compared as well.
    """
    but = {*_OF_RULES, *getattr(module, "of_tests", ())}
    parts = {
        "torch": of_torch(),
        "module": of_module(module, but),
        "trainer": {} if trainer is None else of_trainer(trainer),
    }
    return {f"{part}: {name}": one for part, found in parts.items() for name, one in found.items()}


def assert_restored(module: Any, before: dict[str, Any], trainer: Any = None) -> None:
    """Assert that a run has left everything as :func:`of_run` found it, and copies are plain."""
    changed = difference(before, of_run(module, trainer))
    assert not changed, changed
    assert module.training_step.__func__ is type(module).training_step
    pickle.dumps(module.state_dict())
    copy.deepcopy(module)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the entries that differ between before and after, or are only in one of them."""
    missing = object()
    pairs = {name: (before.get(name, missing), after.get(name, missing)) for name in before | after}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _identity(value: Any) -> Any:
    """Return an identity of an object. A bound method is a new object at each access."""
    if isinstance(value, MethodType):
        return id(value.__self__), id(value.__func__)
    if isinstance(value, (bool, int, float, str, type(None), FunctionType)):
        return value
    return type(value).__name__, id(value)
