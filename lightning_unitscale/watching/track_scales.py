"""``track_scales``: a module that knows the scale of every tensor of its last step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from typing_extensions import override

from lightning_unitscale.capture.attach import TRACKER, own_copy, set_explain
from lightning_unitscale.capture.steps import ModuleSteps, steps_of
from lightning_unitscale.dispatch.torch_internals import current_node, is_recording
from lightning_unitscale.patching import Shadow, StandIn
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.watching.names import Callers, StartNames
from lightning_unitscale.watching.probes import ProbedCall, ScaleProbes, sent_snapshot
from lightning_unitscale.watching.scales_graph import ScalesGraph
from lightning_unitscale.watching.tracked_call import ExactMoments, State, TrackedCall
from lightning_unitscale.watching.tracked_graph import graph_of_call, graph_of_probes
from lightning_unitscale.watching.watcher import StepWatcher


def track_scales(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` that computes the same bits and keeps metrics of its tensors.

    Every floating-point tensor of each call is measured, and so is its gradient when a backward
    pass follows: intermediate tensors, parameters, and inputs, whether they ask for a gradient or
    not. ``module.scales_graph()`` returns a :class:`ScalesGraph` of the last call that returned,
    with the last gradients that have arrived; it has no nodes before the first call.

    The prune functions reduce the graph to the nodes that tell something::

        model = track_scales(model)
        model(inputs).backward()
        graph = prune_same_scale_tensors(prune_non_float_tensors(model.scales_graph()))
        print(graph.tabulate())

    Any Python code will do: the step runs as it is written, and nothing is captured. A function
    that reads an input without a gradient runs a second time, on copies, which gives the gradient
    of the input. That is left out where a part of it is not known: where a function of your own has
    a derivative or effects, under ``torch.func``, and in recurrent layers.

    The scaled operands and results of matmuls that run in units are nodes of their own, such as
    ``fc.linear:weight`` and ``fc.linear:stored``. Of a module that another transform captures, such
    as :func:`unit_scale`, the tensors of its graphs are shown, with the gradients that these
    compute.

    Args:
        module: A module, transformed or not; it is left as it is.

    Returns:
        A new module with parameters of its own, ``scales_graph()`` and ``explain()``. What it
        returns requires a gradient if it was computed from an input, even if the plain module's
        result would not; buffers, and tensors that the caller passes in, are as they would be.

    Raises:
        ValueError: If ``module`` was compiled by the user.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), on what such metrics are for.
    """
    new = own_copy(module)
    steps = steps_of(new)
    if steps is not None:
        _capture(new, steps)
    elif TRACKER not in vars(new):
        ScaleTracker(new)
    set_explain(new)
    return new


def _capture(module: nn.Module, steps: ModuleSteps) -> None:
    """Have the tensors of captured steps tracked."""
    tracker = next((one for one in steps.passes if isinstance(one, CapturedScales)), None)
    if tracker is None:
        tracker = CapturedScales(module)
        steps.add_pass(tracker)
    steps.observe("track_scales", True, always=True)
    vars(module)["scales_graph"] = tracker.scales_graph


class CapturedScales(ScaleProbes):
    """Measures every tensor of captured steps; those of the last call count."""

    name = "track scales"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(MOMENTS)
        self._module = module
        self._complete: list[ProbedCall] = []

    @override
    def before_step(self, module: nn.Module) -> None:
        self.clear()

    @override
    def after_step(self, module: nn.Module, result: Any) -> None:
        self._complete, self._calls = self._calls, []

    def scales_graph(self) -> ScalesGraph:
        """Return the graph of the last complete call, with the gradients that have arrived."""
        if not self._complete:
            return ScalesGraph()
        snapshot = sent_snapshot(0, self._complete, MOMENTS, 1.0)()
        return graph_of_probes(snapshot, State.of(self._module), self._complete)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedScales:
        new = memo[id(self)] = CapturedScales(copy.deepcopy(self._module, memo))
        return new


class _TrackedForward(StandIn):
    """Stands in for the ``forward`` of a tracked module."""

    def __init__(self, owner: ScaleTracker, method: Any) -> None:
        super().__init__(method)
        self.owner = owner

    @override
    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording():
            return self._method(*args, **kwargs)
        called = self.called_by(sys._getframe(1).f_back)
        if not isinstance(called, _TrackedForward):
            return called(*args, **kwargs)
        return called.owner.track(called._method, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.owner, memo).method


class ScaleTracker(StepWatcher):
    """Watches every call of a module's ``forward``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(MOMENTS, lambda *_: True)
        self._measuring = ExactMoments()
        self._module = module
        self._complete: TrackedCall | None = None
        self._latest: TrackedCall | None = None
        # A module may call itself.
        self._is_running = False
        self.method = _TrackedForward(self, module.forward)
        self._shadow = Shadow(module, "forward", self.method)
        vars(module).update({TRACKER: self, "scales_graph": self.scales_graph})

    def track(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run ``forward`` and watch it; the last call that returns counts."""
        complete = self._complete
        # A checkpoint around the module computes it again, within the same step.
        is_again = complete is not None and complete.gradients.are_measured
        if self._is_running or (is_again and current_node() is not None):
            return method(*args, **kwargs)
        self.clear()
        self._is_running = True
        try:
            result = self.run(self._module, method, args, kwargs)
        finally:
            self._is_running = False
        self._complete = self._latest
        return result

    def scales_graph(self) -> ScalesGraph:
        """Return the graph of the last call that returned, with the gradients that have arrived."""
        return ScalesGraph() if self._complete is None else graph_of_call(self._complete)

    def capture(self, steps: ModuleSteps) -> None:
        """Have the tensors of captured steps tracked from now on."""
        _capture(self._module, steps)

    def detach(self) -> None:
        """Put ``forward`` back. May be called more than once."""
        self.clear()
        self._shadow.remove()
        vars(self._module).pop(TRACKER, None)

    @override
    def _new_call(self, callers: Callers, names: StartNames) -> TrackedCall:
        self._latest = TrackedCall(callers, names, self._measuring)
        return self._latest

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleTracker:
        module = copy.deepcopy(self._module, memo)
        if id(self) in memo:
            known: ScaleTracker = memo[id(self)]
            return known
        # The module's copy may still be an empty shell.
        before = copy.deepcopy(self._shadow.below, memo)
        if before is not None:
            vars(module)["forward"] = before
        new = memo[id(self)] = ScaleTracker(module)
        return new

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self._module).__name__}: its scales are tracked, and such a module cannot be "
            "pickled; expected a module as it is written; save its state_dict() instead, or pickle "
            "the module that it was made of."
        )
