"""Record the scale of every tensor of a module's last step with ``track_scales``."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_unitscale.capture.copy_graphs import rename_node
from lightning_unitscale.capture.graph_nodes import MODULE, NAME
from lightning_unitscale.capture.module_steps import (
    TRACKER,
    ModuleSteps,
    own_copy,
    set_explain,
    steps_of,
)
from lightning_unitscale.matmuls.torch_internals import current_node
from lightning_unitscale.monitor.names import full_name
from lightning_unitscale.monitor.probes import ProbedCall, ScaleProbes, sent_snapshot
from lightning_unitscale.monitor.rows import TensorRow
from lightning_unitscale.monitor.scales_graph import (
    CLEAN_NAME,
    FLOAT_TENSOR,
    METRICS,
    TRAINED,
    Metrics,
    ScalesGraph,
)
from lightning_unitscale.monitor.tracked_call import (
    ExactMoments,
    Made,
    State,
    TrackedCall,
    state_of,
)
from lightning_unitscale.monitor.watcher import CalledMethod, StepWatcher
from lightning_unitscale.patching import Shadow, shadowed
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.snapshot import ScaleSnapshot


def track_scales(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` that computes the same bits and keeps metrics of its tensors.

    It measures every floating-point tensor of each call, and its gradient if a backward pass
    follows. This includes intermediate tensors, parameters, and inputs, even inputs that do not
    require a gradient. ``module.scales_graph()`` returns a :class:`ScalesGraph` of the last
    complete call, with the latest gradients. It is empty before the first call.

    The prune functions reduce the graph to the informative nodes::

        model = track_scales(model)
        model(inputs).backward()
        graph = prune_same_scale_tensors(prune_non_float_tensors(model.scales_graph()))
        print(graph.tabulate())

    It supports any Python code, since nothing is captured. To get the gradient of an input that
    does not require one, the functions that read it run a second time, on copies. This gradient is
    missing if it cannot be computed completely: for custom autograd functions, functions with side
    effects, ``torch.func`` and recurrent layers.

    The operands and results of scaled matmuls are separate nodes, such as ``fc.linear:weight`` and
    ``fc.linear:stored``. If another transform captures the module, such as :func:`unit_scale`, the
    nodes are the tensors of the captured graphs.

    Args:
        module: A module, transformed or not. It does not change.

    Returns:
        A new module with its own parameters, ``scales_graph()`` and ``explain()``. A result that
        was computed from an input requires a gradient, even if that of ``module`` does not. Buffers
        and the tensors that you pass in do not change.

    Raises:
        ValueError: If ``module`` was compiled by the user.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), on the use of such metrics.
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
    """Track the tensors of captured steps."""
    tracker = next((one for one in steps.passes if isinstance(one, CapturedScales)), None)
    if tracker is None:
        tracker = CapturedScales(module)
        steps.add_pass(tracker)
    steps.observe("track_scales", True, always=True)
    vars(module)["scales_graph"] = tracker.scales_graph


class CapturedScales(ScaleProbes):
    """Measures every tensor of captured steps, and keeps those of the last call."""

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
        return _graph_of_probes(snapshot, state_of(self._module), self._complete)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedScales:
        new = memo[id(self)] = CapturedScales(copy.deepcopy(self._module, memo))
        return new


class _TrackedForward(CalledMethod):
    """Stands in for the ``forward`` of a tracked module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.owner, memo).method


class ScaleTracker(StepWatcher):
    """Watches every call of a module's ``forward``."""

    call_type = TrackedCall

    def __init__(self, module: nn.Module) -> None:
        super().__init__(MOMENTS, lambda *_: True)
        self._measuring = ExactMoments()
        self._module = module
        self._complete: TrackedCall | None = None
        self._is_running = False  # a module may call itself
        self.method = _TrackedForward(module.forward, self, self.track)
        self._shadow = Shadow(module, "forward", self.method)
        vars(module).update({TRACKER: self, "scales_graph": self.scales_graph})

    def track(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run ``forward`` and watch it. The graph is that of the last call that returns."""
        complete = self._complete
        # A checkpoint around the module recomputes it within the same step.
        is_again = complete is not None and complete.gradients.hooks
        if self._is_running or (is_again and current_node() is not None):
            return method(*args, **kwargs)
        self.clear()
        with shadowed(self, _is_running=True):
            result = self.run(self._module, method, args, kwargs)
        if self._calls:  # nothing is watched inside ``torch.func``
            self._complete = cast(TrackedCall, self._calls[-1])
        return result

    def scales_graph(self) -> ScalesGraph:
        """Return the graph of the last call that returned, with the gradients that have arrived."""
        return ScalesGraph() if self._complete is None else _graph_of_call(self._complete)

    def capture(self, steps: ModuleSteps) -> None:
        """Track the tensors of captured steps from now on."""
        _capture(self._module, steps)

    def detach(self) -> None:
        """Restore ``forward``. Idempotent."""
        self.clear()
        self._shadow.remove()
        vars(self._module).pop(TRACKER, None)

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
            "pickled. Expected an untracked module. Save its state_dict() instead, or pickle "
            "the original module."
        )


def _graph_of_call(call: TrackedCall) -> ScalesGraph:
    """Return the graph of a call that was watched, with the gradients that have arrived."""
    graph = ScalesGraph()
    metrics = _metrics(call, (*call.given, *call.made))
    nodes: dict[Any, fx.Node] = {}
    for row in call.given:
        nodes[row] = _add_input(graph, row.name, row.module, metrics[row], call.state)
    for row in call.made:
        made = call.how_made.get(row) or Made(
            "call_method", row.name.rpartition(".")[2], row.inputs, {}
        )
        if row in call.in_units:
            node = _add_in_units(graph, nodes, call, made, row, metrics)
        else:
            node = _add_call(graph, nodes, made, row.module)
        nodes[row] = node
        _describe(node, row.name, row.module, metrics[row])
    _finish(graph, [nodes[row] for row in call.outputs])
    return graph


def _graph_of_probes(
    snapshot: ScaleSnapshot, state: State, calls: Iterable[ProbedCall]
) -> ScalesGraph:
    """Return the graph of a captured step, made of the tensors that its probes measured."""
    graph = ScalesGraph()
    made_by = {tensor.name: tensor.made_by for call in calls for tensor in call.tensors}
    nodes: dict[str, fx.Node] = {}
    for index, name in enumerate(snapshot.names):
        # A gradient that has not arrived has no numbers.
        rows = (snapshot.forward[index], snapshot.backward[index])
        forward, backward = (Metrics.from_row(row) if row[0] >= 0 else None for row in rows)
        metrics = None if forward is None else _metrics_of(forward, backward)
        op, target = made_by[name] or ("placeholder", name)
        if op in {"placeholder", "get_attr"}:
            node = _add_input(graph, name, snapshot.modules[index], metrics, state)
        else:
            sources = tuple(nodes[one] for one in snapshot.inputs[index] if one in nodes)
            node = graph.create_node(op, target, sources)
            _describe(node, name, snapshot.modules[index], metrics)
        nodes[name] = node
    _finish(graph, [node for node in nodes.values() if not node.users])
    return graph


def _metrics(call: TrackedCall, rows: Iterable[TensorRow]) -> dict[TensorRow, Metrics | None]:
    """Return metrics of tensors, with one transfer from each device."""
    pairs = {row: call.rows_of(row) for row in rows}
    taken: dict[int, Tensor] = {
        id(one): one for pair in pairs.values() for one in pair if one is not None
    }
    data: dict[int, Metrics.Data] = {}
    for device in {one.device for one in taken.values()}:
        there = {key: one for key, one in taken.items() if one.device == device}
        numbers = torch.stack([*there.values()]).tolist()
        data |= dict(zip(there, map(Metrics.from_row, numbers), strict=True))
    return {
        row: None if forward is None else _metrics_of(data[id(forward)], data.get(id(backward)))
        for row, (forward, backward) in pairs.items()
    }


def _metrics_of(forward: Metrics.Data, backward: Metrics.Data | None) -> Metrics:
    """Return metrics without the gradient of an empty tensor, which has no numbers."""
    return Metrics(forward, backward if backward is not None and backward.numel else None)


def _add_call(graph: ScalesGraph, nodes: dict[Any, fx.Node], made: Made, module: str) -> fx.Node:
    """Add the node of a call, and that of its result if the call returns several tensors."""

    def argument(value: Any) -> Any:
        if isinstance(value, slice):
            return slice(*map(argument, (value.start, value.stop, value.step)))
        return nodes.get(value) if isinstance(value, TensorRow) else value

    key = id(made.kwargs)
    node = nodes.get(key) if made.index is not None else None
    if node is None:
        args, kwargs = (tree_map(argument, each) for each in (made.args, made.kwargs))
        node = graph.create_node(made.op, made.target, args, kwargs)
        if made.index is not None:
            nodes[key] = node
            _describe(node, full_name(module, made.name), module, None)
    if made.index is not None:
        node = graph.call_function(operator.getitem, (node, made.index))
    if (made.index or 0) < len(made.variables):
        rename_node(node, made.variables[made.index or 0])
    return node


def _add_in_units(
    graph: ScalesGraph,
    nodes: dict[Any, fx.Node],
    call: TrackedCall,
    made: Made,
    row: TensorRow,
    metrics: dict[TensorRow, Metrics | None],
) -> fx.Node:
    """Add the nodes of a matmul that ran on scaled operands, and the changes of units around it."""

    def scale(node: fx.Node, log2_factor: int) -> fx.Node:
        return graph.call_function(torch.mul, (node, 2.0**log2_factor))

    matmul = call.in_units[row]
    total, gamma = sum(matmul.log2_units), matmul.log2_gamma
    scaled = dict(nodes)
    for (name, operand), unit in zip(matmul.operands.items(), matmul.log2_units, strict=True):
        scaled[operand] = scale(nodes[operand], -unit)
        # If other code, such as the caller, reads the operand too, only its total gradient is
        # known.
        readers = sum(operand in one.inputs for one in call.made) + call.outputs.count(operand)
        backward = unit - total - gamma if readers == 1 else None
        _describe(scaled[operand], name, row.module, _scaled(metrics[operand], -unit, backward))
    stored = _add_call(graph, scaled, made, row.module)
    name = f"{next(iter(matmul.operands)).partition(':')[0]}:stored"
    _describe(stored, name, row.module, _scaled(metrics[row], -total, -gamma))
    return scale(stored, total)


def _scaled(metrics: Metrics | None, forward: int, backward: int | None) -> Metrics | None:
    """Return metrics of a tensor times a power of two, and of its gradient if there is one."""
    if metrics is None:
        return None
    no_gradient = backward is None or metrics.bwd is None
    return Metrics(
        _times(metrics.fwd, forward), None if no_gradient else _times(metrics.bwd, backward)
    )


def _times(data: Any, log2_factor: Any) -> Metrics.Data:
    scaled: dict[str, Any] = {
        name: value if name == "numel" else math.ldexp(value, log2_factor)
        for name, value in vars(data).items()
    }
    return Metrics.Data(**scaled)


def _add_input(
    graph: ScalesGraph, name: str, module: str, metrics: Metrics | None, state: State
) -> fx.Node:
    """Add an input, parameter or buffer under the name that Dynamo would give it."""
    clean, (kind, is_trained) = name.removeprefix("input."), state.get(name, ("", False))
    if kind:
        *modules, own = name.split(".")
        clean = "_".join(("self", *(f"modules_{one}" for one in modules), kind, own))
    node = graph.placeholder(f"l_{clean}_")
    node.target = f"L_{clean}_"
    _describe(node, name, module, metrics, clean, is_trained)
    return node


def _describe(
    node: fx.Node,
    name: str,
    module: str,
    metrics: Metrics | None,
    clean: str = "",
    trained: bool = False,
) -> None:
    node.meta |= {
        METRICS: metrics,
        FLOAT_TENSOR: metrics is not None,
        CLEAN_NAME: clean or node.name.strip("_"),
        TRAINED: trained,
        NAME: name,
        MODULE: module,
    }


def _finish(graph: ScalesGraph, outputs: Iterable[fx.Node]) -> None:
    _describe(graph.output(tuple(outputs)), "output", "", None)
