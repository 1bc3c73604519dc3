"""``track_scales``: a module that knows the scale of every tensor of its last step."""

from __future__ import annotations

from torch import nn

from lightning_unitscale.transforms.attach import captured_forward
from lightning_unitscale.transforms.scale_tracker import ScaleTracker
from lightning_unitscale.transforms.scales_graph import ScalesGraph


def track_scales(module: nn.Module) -> nn.Module:
    """A copy of ``module`` that computes the same bits and keeps metrics of its tensors.

    Every floating-point tensor of the captured graphs is measured in each call, and so is its
    gradient when a backward pass follows: intermediate tensors, parameters, and inputs, whether
    they ask for a gradient or not. ``module.scales_graph()`` returns one :class:`ScalesGraph` of
    all the graphs of the last call that returned, with the last gradients that have arrived; it
    has no nodes before the first call.

    The prune functions reduce the graph to the nodes that tell something::

        model = track_scales(model)
        model(inputs).backward()
        graph = prune_same_scale_tensors(prune_non_float_tensors(model.scales_graph()))
        print(graph.tabulate())

    Tensors of a module that is unit-scaled as well are shown as they are stored, and the changes of
    units as nodes of their own.

    Args:
        module: A module, transformed or not, that Dynamo can capture; it is left as it is.

    Returns:
        A new module with parameters of its own, ``scales_graph()`` and ``explain()``. What is
        computed from an input requires a gradient, even if the plain module's result would not;
        buffers, and tensors that the caller passes in, are as they would be. An input that needs a
        gradient and is read several times is shown with all of its gradient, to which the caller's
        own operations on it may contribute.

    Raises:
        ValueError: If ``module`` was compiled by the user.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), on what such metrics are for.
    """
    new, step = captured_forward(module, "track_scales")
    tracker = next((one for one in step.owner.passes if isinstance(one, ScaleTracker)), None)
    if tracker is None:
        tracker = ScaleTracker()
        step.owner.add_pass(tracker)
    step.owner.observe("track_scales", True, always=True)
    new.__dict__["scales_graph"] = _ScalesGraphOf(tracker)
    return new


class _ScalesGraphOf:
    """``module.scales_graph()``: an object rather than a closure, so that a copy shows its own."""

    def __init__(self, tracker: ScaleTracker) -> None:
        self.tracker = tracker

    def __call__(self) -> ScalesGraph:
        """All graphs of the last call as one, each node with its metrics."""
        return self.tracker.scales_graph()
