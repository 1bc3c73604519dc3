"""Run an entry point with or without the callbacks, and return its results."""

from __future__ import annotations

import hashlib
import io
import logging
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real.bits import same_bits
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_unitscale import ScaleMonitor, UnitScaleCallback
from lightning_unitscale.matmuls.coverage import Coverage

from .entry_point import EntryPoint

VARIANTS: dict[str, Callable[[], list[Any]]] = {
    "plain": list,
    "plain twice": list,
    "monitor": lambda: [ScaleMonitor(every_n_steps=5)],
    "units": lambda: [UnitScaleCallback()],
    "both": lambda: [UnitScaleCallback(), ScaleMonitor(every_n_steps=5)],
}


@dataclass
class Run:
    """What one training computed.

    Attributes:
        gradients: A digest of all gradients, for each step of an optimizer.
        numbers: What the package reported, by where it stands.
        state: The final parameters and buffers.
        coverage: What became of the matmuls, where there was unit scaling.
        sampled: The steps at which the monitor took a snapshot.
        modules: Paths of the modules with weights of their own.
        watched: Those that are in its last snapshot.
        warnings: The first lines of all warnings.
    """

    gradients: list[str] = field(default_factory=list)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    coverage: Coverage | None = None
    sampled: list[int] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    warnings: set[str] = field(default_factory=set)


def run(entry_point: EntryPoint, variant: str) -> Run:
    """Train from a fixed seed: equal variants draw equal weights, batches and random numbers."""
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    result = Run()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)

    def keep_gradients(optimizer: Optimizer, *_: Any) -> None:
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    digest.update(param.grad.detach().contiguous().numpy().tobytes())
        result.gradients.append(digest.hexdigest())

    with (
        warnings.catch_warnings(record=True) as caught,
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),  # where some of them write
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("always")
        handle = register_optimizer_step_pre_hook(keep_gradients)
        callbacks = VARIANTS[variant]()
        trained = entry_point.train(callbacks, Path(folder))
        handle.remove()
    result.numbers = dict(_flat(trained.numbers))
    result.state = {
        name: value.detach().clone()
        for name, value in trained.module.state_dict().items()
        if isinstance(value, Tensor)
    }
    modules = trained.module.named_modules()
    result.modules = {name for name, part in modules if [*part.parameters(recurse=False)]}
    for callback in trained.callbacks or callbacks:
        if isinstance(callback, UnitScaleCallback):
            result.coverage = callback.coverage
        if isinstance(callback, ScaleMonitor):
            result.sampled = [snapshot.step for snapshot in callback.snapshots]
            result.watched = result.modules & set(callback.snapshots[-1].modules)
    said = {f"{w.category.__name__}: {w.message}".splitlines()[0] for w in caught}
    result.warnings = {line.replace(folder, "FOLDER") for line in said}
    return result


def difference(plain: Run, ours: Run) -> str:
    """What of the two runs has other bits; empty if nothing has."""
    parts = []
    if len(plain.gradients) != len(ours.gradients):
        parts.append(f"{len(ours.gradients)} steps, not {len(plain.gradients)}")
    pairs = zip(plain.gradients, ours.gradients, strict=False)
    if (step := next((i for i, (a, b) in enumerate(pairs) if a != b), None)) is not None:
        parts.append(f"gradients from step {step}")
    if count := _num_different(plain.numbers, ours.numbers):
        parts.append(f"{count} of {len(plain.numbers)} numbers")
    if count := _num_different(plain.state, ours.state):
        parts.append(f"{count} of {len(plain.state)} weights")
    if count := len(ours.state.keys() - plain.state.keys()):
        parts.append(f"{count} more weights")
    return ", ".join(parts)


def _num_different(plain: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> int:
    """How many have other bits. What only our run has is its own: the monitor logs, too."""
    return sum(name not in ours or not same_bits(plain[name], ours[name]) for name in plain)


def _flat(numbers: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """The numbers of nested lists, dictionaries and tables, with where they stand."""
    if isinstance(numbers, Tensor):
        yield place, numbers.detach().clone()
    elif isinstance(numbers, (Mapping, list, tuple)):
        items = numbers.items() if isinstance(numbers, Mapping) else enumerate(numbers)
        for name, item in items:
            yield from _flat(item, f"{place}/{name}")
    else:
        yield place, torch.from_numpy(np.array(numbers, dtype=np.float64, order="C"))
