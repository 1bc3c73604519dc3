"""Mark checkpoints with the method that trained their weights, and check it on loading.

Weights that rules have trained are useless without the factors of their graph. Lightning only warns
when a callback of the checkpoint is missing, and loads a module without any callbacks. So the
``state_dict`` of such a checkpoint has an additional entry: an empty tensor whose name is the
instruction. With ``strict=True``, torch refuses a name that the module does not know.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_unitscale.callbacks.options import LOSSLESS
from lightning_unitscale.callbacks.packages import (
    is_lightning,
    misconfigured,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_unitscale.patching import Replacement, shadowed
from lightning_unitscale.rules.transform import PLAN_ATTRIBUTE

if TYPE_CHECKING:
    import lightning.pytorch as pl


_MARK = "trained with UnitScaleCallback('{}'): pass ckpt_path to a Trainer that has this callback"
_MARKED = re.compile(re.escape(_MARK).replace(r"\{\}", "(.*)"))


def mark(checkpoint: dict[str, Any], method: str) -> None:
    """Mark the weights of a checkpoint as trained by rules."""
    _taken_mark(checkpoint)
    checkpoint["state_dict"][_MARK.format(method)] = torch.empty(0)


def keep_marking(module: Any, method: str) -> None:
    """Make a module mark checkpoints that are saved after the run of its rules."""
    # The module's own hook does that, because weights alone call no hooks of callbacks.
    if PLAN_ATTRIBUTE in vars(module):
        # Not a bound method: an unpickled one would look up the attribute that replaces it here.
        plain = partial(type(module).on_save_checkpoint, module)
        save = vars(module).get("on_save_checkpoint", plain)
        if isinstance(save, partial) and save.func is _save_marked:
            save = save.args[0]
        vars(module)["on_save_checkpoint"] = partial(_save_marked, save, method)


def _save_marked(
    save: Callable[[dict[str, Any]], None], method: str, checkpoint: dict[str, Any]
) -> None:
    save(checkpoint)
    mark(checkpoint, method)


def checking_checkpoints(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    callback: pl.Callback,
    method: str,
    mark_saved: Callable[[dict[str, Any]], None],
) -> AbstractContextManager[None]:
    """Refuse checkpoints of another method within this context, before anything is loaded."""
    # These are the module's hooks. Hooks of callbacks run after the weights are loaded, and not at
    # all for checkpoints with weights only. They may also save other weights, such as averages.
    load, save = module.on_load_checkpoint, module.on_save_checkpoint

    def check_and_load(checkpoint: dict[str, Any]) -> None:
        _check(trainer, checkpoint, checkpoint.get("callbacks", {}).get(callback.state_key), method)
        load(checkpoint)

    def save_and_mark(checkpoint: dict[str, Any]) -> None:
        save(checkpoint)
        mark_saved(checkpoint)

    return shadowed(
        module,
        on_load_checkpoint=Replacement(load, check_and_load),
        on_save_checkpoint=Replacement(save, save_and_mark),
    )


def _check(
    trainer: pl.Trainer, checkpoint: dict[str, Any], state: Mapping[str, Any] | None, method: str
) -> None:
    """Compare the method of a checkpoint with the callback's, and remove the mark."""
    if state is not None:
        _restart_loss_scale(trainer, checkpoint, state)
    known = None if state is None else state.get("rules", {}).get("method", LOSSLESS)
    trained = _taken_mark(checkpoint) or known or _mark_of_file(trainer)
    if trained not in (None, LOSSLESS) and trained != method:
        raise misconfigured(
            f"method={method!r}: the checkpoint was trained with method={trained!r}, and its "
            f"weights only work with the factors of that method. Expected method={trained!r}. "
            "Pass that, or deploy the trained model first (lightning_unitscale.transforms.deploy)."
        )
    is_fit = trainer.state.fn == "fit" and checkpoint.get("global_step", 0) > 0
    if is_fit and method != LOSSLESS and trained in (None, LOSSLESS):
        how = "without UnitScaleCallback" if trained is None else f"with method={trained!r}"
        rank_zero_warn(
            f"method={method!r}: the checkpoint was trained {how}. Setting its weights to unit "
            "scale changes the model, so the optimizer's state no longer fits. Expected a "
            "checkpoint of the same method. To continue with the trained model, pass "
            f"method={LOSSLESS!r}."
        )


def _restart_loss_scale(
    trainer: pl.Trainer, checkpoint: dict[str, Any], state: Mapping[str, Any]
) -> None:
    """Drop the gradient scaler's state of a checkpoint that needed no loss scale."""
    # Earlier versions had `depth="all"`, which kept every gradient near 1 and started the scale at
    # 1. Resumed with that, gradients would be flushed to zero until the scale has grown.
    name = type(trainer.precision_plugin).__qualname__
    if state.get("depth") == "all" and checkpoint.pop(name, None) is not None:
        rank_zero_info(
            "UnitScaleCallback: the checkpoint was written with depth='all', which is no longer "
            "supported. Its weights and optimizer state are loaded. The loss scale restarts."
        )


def _taken_mark(checkpoint: dict[str, Any]) -> str | None:
    weights = checkpoint.get("state_dict", {})
    for name in list(weights):
        if (marked := _MARKED.fullmatch(name)) is not None:
            del weights[name]
            return marked[1]
    return None


def _mark_of_file(trainer: pl.Trainer) -> str | None:
    """Return the mark in a checkpoint file that a strategy has loaded itself, by known names."""
    if not is_lightning(trainer.strategy, "ModelParallelStrategy") or trainer.ckpt_path is None:
        return None
    path = Path(trainer.ckpt_path)
    names: Iterable[str] = ()
    if path.is_dir():
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        names = (name.removeprefix("state_dict.") for name in saved)
    elif path.is_file():
        with contextlib.suppress(pickle.UnpicklingError):  # of unsafe objects
            names = torch.load(path, "cpu", weights_only=True, mmap=True).get("state_dict", ())
    return next((found[1] for name in names if (found := _MARKED.fullmatch(name))), None)
