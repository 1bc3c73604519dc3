"""Watch the calls of a step, and measure the results of the torch functions that they call."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, has_torch_function
from typing_extensions import override

from lightning_unitscale.capture.decompose import open_function
from lightning_unitscale.matmuls.calls import watching
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.matmuls.torch_internals import is_recording
from lightning_unitscale.monitor.names import Callers, StartNames, describe_function
from lightning_unitscale.monitor.probes import snapshot_of
from lightning_unitscale.monitor.rows import Measuring
from lightning_unitscale.monitor.torch_state import (
    answering_as_without,
    in_force,
    is_transformed,
    outside_of_compiled_code,
    running_again_by,
)
from lightning_unitscale.monitor.watched_call import WatchedCall
from lightning_unitscale.patching import StandIn
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot

# Functions that are shown as the functions inside them, and those that run a backward pass.
_OPENED = {
    function: open_function(function)
    for function in (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward)
}


class CalledMethod(StandIn):
    """A stand-in for a method of a module, whose calls its owner runs."""

    def __init__(self, method: Any, owner: Any, run: Callable[..., Any]) -> None:
        super().__init__(method)
        self.owner = owner
        self._run = run

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording():
            return self._method(*args, **kwargs)
        called = self.called_by(sys._getframe(1).f_back)
        if not isinstance(called, type(self)):
            return called(*args, **kwargs)
        return self._run(called._method, args, kwargs)


class StepWatcher:
    """A watcher that runs the calls of a step and makes snapshots of them."""

    # Nothing is captured and nothing is attached to the module: a torch function mode of this
    # thread sees the functions that a call uses, and hooks on autograd nodes see the gradients.

    call_type: type[WatchedCall] = WatchedCall

    def __init__(
        self,
        layout: RowLayout,
        select: Callable[[str, str], bool],
        ignored: Collection[CodeType] = (),
    ) -> None:
        self._select = select
        self._ignored = ignored
        self._measuring = Measuring(layout)
        self._calls: list[WatchedCall] = []
        # The unit in which a matmul stored each value, by the name that it was computed under.
        self._units: dict[str, int] = {}

    def run(
        self, module: nn.Module, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Call a step of a module and watch it."""
        self.close()
        if is_transformed():
            warnings.warn(
                f"{type(module).__name__}: torch.func calls the module, so the monitor cannot show "
                "its tensors. Expected calls outside of torch.func's transforms.",
                stacklevel=2,
            )
            return step(*args, **kwargs)
        callers = Callers(module, StepWatcher.run.__code__, self._ignored)
        parameters = list(module.named_parameters())
        names = StartNames(module, step, args, kwargs, parameters)
        call = self.call_type(callers, names, self._measuring, self._select, self._units)
        self._calls.append(call)
        call.gradients.begin(parameter for _, parameter in parameters)
        mode = _WatchMode(call)
        with watching(call.see):
            try:
                with mode.watching(), mode:
                    result = step(*args, **kwargs)
            finally:
                mode.is_running = False
            call.finish(module, result)
        return result

    def close(self) -> None:
        """Stop measuring gradients of the calls so far."""
        for call in self._calls:
            call.close()

    def clear(self) -> None:
        """Forget the measurements since the last snapshot."""
        self.close()
        self._calls.clear()
        self._measuring.clear()

    def take(self, step: int, *, grad_scale: float = 1.0) -> Callable[[], ScaleSnapshot] | None:
        """Start the transfer of the measurements since the last call; the result waits for it."""
        self.close()
        calls, self._calls = self._calls, []
        for call in calls:
            rows = (*call.given, *call.made)
            self._units.update((row.made_as, row.log2_sigma) for row in rows)
        found = [measured for call in calls for measured in call.measured()]
        sent, sent_blocks = self._measuring.send()
        if not found:
            return None
        tensors, shown = zip(*found, strict=True)
        forward = [[row.forward] for row in shown]
        layout, gauge = self._measuring.layout, Gauge()
        spacing = self._measuring.spacing

        def arrived() -> ScaleSnapshot:
            described = [(tensor, gauge) for tensor in tensors]
            rows = sent([*forward, *(row.backward for row in shown)])
            blocks = sent_blocks(
                [*(row.forward_blocks for row in shown), *(row.backward_blocks for row in shown)]
            ).numpy()
            made = snapshot_of(step, described, layout, grad_scale, rows, blocks)
            return replace(made, spacing=spacing)

        return arrived


class _WatchMode(TorchFunctionMode):
    """Passes the torch functions that a step calls to its watched call."""

    def __init__(self, call: WatchedCall) -> None:
        super().__init__()
        self.call = call
        # True while the call runs; later, checkpoints may compute parts of it again.
        self.is_running = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        word, is_answer = describe_function(func)
        if is_answer:
            return func(*args, **kwargs)
        if is_transformed():
            self.call.pass_by((*args, *kwargs.values()))
            return func(*args, **kwargs)
        opened = _OPENED.get(func) if word in {"multi_head_attention_forward", "backward"} else None
        if opened is not None and not has_torch_function((*args, *kwargs.values())):
            with self:
                return opened(*args, **kwargs)
        # A hook may be torch's own function, which a thread of the engine calls without a frame.
        caller = self.call.callers.find(sys._getframe().f_back)
        if caller is None:
            return func(*args, **kwargs)
        return self.call.run(func, args, kwargs, word, caller)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Prepare torch for the mode within this context, and activate it."""
        with (
            outside_of_compiled_code(self, self.call.see_compiled),
            answering_as_without(self),
            running_again_by(self._run_again, is_own=self.call.checkpoints.__contains__),
        ):
            yield

    def _run_again(self, function: Callable[..., Any], *args: Any) -> Any:
        """Recompute for a checkpoint, on any thread. Watch it while the call is open."""
        if not self.call.is_open:
            return function(*args)
        with contextlib.nullcontext() if self.is_running else self.watching(), in_force(self):
            return function(*args)
