"""Count bytes of real tensors, and measure the peak of a step."""

from __future__ import annotations

import gc
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_unitscale.capture.absent_ranks import dense_parts, local_tensor
from lightning_unitscale.capture.fake_device import FakeScalars, SimulatedDevice
from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.memory.costs import size_hint
from lightning_unitscale.memory.fake_step import (
    FakeCopies,
    make_state,
    optimizer_for,
    state_tensors,
)
from lightning_unitscale.memory.record_operators import StorageRecorder
from lightning_unitscale.memory.step_record import memory_timeline

_MARK = "lightning_unitscale.peak_meter"


def storages_of(values: Any) -> dict[int, int]:
    """Return the storages and bytes of all tensors in a nested value, on this rank only."""
    storages = (
        part.untyped_storage()
        for tensor in tensors_in(values)
        for part in dense_parts(local_tensor(tensor))
    )
    return {storage._cdata: size_hint(storage.nbytes()) for storage in storages}


def storage_bytes(values: Any) -> int:
    """Return the bytes of all tensors in a nested value, each storage once."""
    return sum(storages_of(values).values())


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of the gradients of a module's parameters once all of them exist."""
    return storage_bytes([param for param in module.parameters() if param.requires_grad])


def optimizer_state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of the optimizers' states, now or after the first step."""
    return sum(
        storage_bytes(state_tensors(optimizer)) if optimizer.state else _first_state(optimizer)
        for optimizer in optimizers
    )


def _first_state(optimizer: Optimizer) -> int:
    """Return the bytes of the state after a first step on fake parameters."""
    # One parameter stands for all of its shape and type in its group.
    alike: dict[tuple[int, torch.Size, torch.dtype], list[nn.Parameter]] = defaultdict(list)
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param.requires_grad:
                alike[index, param.shape, param.dtype].append(param)
    if not alike:
        return 0
    mode = SimulatedDevice(torch.device(next(iter(alike.values()))[0].device.type))
    copies = FakeCopies(mode)
    groups: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
    try:
        for (index, *_), params in alike.items():
            groups[index].append(copies.of(params[0]))
        fake = optimizer_for(optimizer, groups)
        with mode:
            make_state(fake, mode.device)
    except Exception as error:  # a user's class may need, and raise, anything
        warnings.warn(
            f"{type(optimizer).__name__}: its state could not be measured ({error}), so two values "
            "per parameter are assumed. Make its step() work on fake tensors.",
            stacklevel=2,
        )
        return 2 * storage_bytes(list(alike.values()))
    return sum(
        len(params) * storage_bytes(dict(fake.state[copies.of(params[0])]))
        for params in alike.values()
    )


def stepping_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the most bytes of temporaries that a step of one of the optimizers makes at once."""
    return max(map(_temporary_bytes, optimizers), default=0)


def _temporary_bytes(optimizer: Optimizer) -> int:
    """Run the optimizer's step on fake parameters, and return its additional peak."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trained = [param for param in params if param.requires_grad]
    if not trained:
        return 0
    mode = SimulatedDevice(torch.device(trained[0].device.type))
    copies, recorder = FakeCopies(mode), StorageRecorder(mode.device)
    groups = [[copies.of(param) for param in group["params"]] for group in optimizer.param_groups]
    try:
        fake = optimizer_for(optimizer, groups)
        with mode:
            make_state(fake, mode.device)
            gradients = [torch.zeros_like(copies.of(param)) for param in trained]
            for param, gradient in zip(trained, gradients, strict=True):
                copies.of(param).grad = gradient
            with recorder, FakeScalars():
                for tensor in (*copies.fakes.values(), *gradients, *state_tensors(fake)):
                    recorder.declare(tensor, "optimizer")
                fake.step()
    except Exception:  # a user's class may need, and raise, anything
        return 0
    timeline, peak = memory_timeline(recorder.finished())
    return peak.num_bytes - timeline.before_bytes


class PeakMeter:
    """Measures the most bytes alive at once between :meth:`mark` and :meth:`stop`.

    On a GPU that is the allocator's own maximum. A CPU's allocator keeps none, so its events are
    recorded and summed up. They lack the release of tensors from before :meth:`start`. So start one
    step early, to include the gradients of the step before, and pass the tensors alive at the mark.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[tuple[Any, int]] = []  # (label at the end, peak), the last without label
        self._labels: list[Any] = []
        self._peaks: list[int] = []
        self._alive: int | None = None
        self._profile: Any = None

    @property
    def is_marked(self) -> bool:
        """Check whether the measurement has begun."""
        return self._alive is not None

    def start(self) -> None:
        """Start to record."""
        if self.device.type == "cpu":
            gc.collect()  # otherwise garbage of an earlier recorded step is freed within this one
            # torch.profiler would also build a tree of the events, which takes longer than the step
            self._profile = torch.autograd.profiler.profile(profile_memory=True)
            self._profile.__enter__()

    def mark(self, alive: Any, *, beside: int = 0) -> None:
        """Start to measure, with the tensors in ``alive`` and ``beside`` more bytes alive."""
        self._alive = storage_bytes(alive) + beside
        self._begin_part()

    def note(self, label: Any) -> None:
        """End a measured part, and start another. Do nothing before the mark."""
        if self.is_marked:
            self._end_part()
            self._labels.append(label)
            self._begin_part()

    def stop(self) -> int | None:
        """Stop, and return the peak in bytes, or ``None`` if nothing was marked."""
        if self.is_marked:
            self._end_part()
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            if self._alive is not None:
                events = list(self._profile.kineto_results.events())
                self._peaks = _peaks_after_marks(events, self._alive)
            self._profile = None
        self.parts = list(zip([*self._labels, None], self._peaks, strict=False))
        return max(self._peaks, default=None)

    def _begin_part(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self._profile is not None:
            with torch.profiler.record_function(_MARK):
                pass

    def _end_part(self) -> None:
        if self.device.type == "cuda":
            self._peaks.append(torch.cuda.max_memory_allocated(self.device))


def _peaks_after_marks(events: list[Any], alive: int) -> list[int]:
    """Return the peak after each mark, up to the next one."""
    marks = sorted(event.start_ns() for event in events if event.name() == _MARK)
    changes = [e for e in events if e.name() == "[memory]" and e.start_ns() >= marks[0]]
    peaks = [alive]
    for change in sorted(changes, key=lambda change: change.start_ns()):
        while len(peaks) < len(marks) and change.start_ns() >= marks[len(peaks)]:
            peaks.append(alive)
        alive += change.nbytes()
        peaks[-1] = max(peaks[-1], alive)
    return [*peaks, *[alive] * (len(marks) - len(peaks))]
