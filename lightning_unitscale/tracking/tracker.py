"""``track_scales``: a module that knows the scale of every tensor of its last step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.capture.attach import captured_forward
from lightning_unitscale.dynamo.capture import GraphInput
from lightning_unitscale.dynamo.graphs import is_checkpoint, is_custom_operator, is_higher_order
from lightning_unitscale.graph.aliasing import aliased_by_mutation, memory_roots, written_arguments
from lightning_unitscale.graph.grad_order import refuses_gradient, repeated_reads
from lightning_unitscale.graph.nodes import (
    INPUT,
    example_tensor,
    is_float_tensor,
    op_name,
    requires_grad,
)
from lightning_unitscale.graph.passes import GraphPass, Phase, Region, Run, StepGraph
from lightning_unitscale.graph.recorder import CallRecord
from lightning_unitscale.graph.regions import Place, Places, is_passed_through, probeable_nodes
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.tracking.probes import insert_probes
from lightning_unitscale.tracking.scales_graph import ScalesGraph
from lightning_unitscale.tracking.tracked_graph import TrackedCall, TrackedGraph, assemble

# Sources of inputs that are the module's own state, not an argument or an intermediate tensor.
_STATE_SOURCES = ("L['self']", "G[")


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
    tracker = next(
        (graph_pass for graph_pass in step.owner.passes if isinstance(graph_pass, ScaleTracker)),
        None,
    )
    if tracker is None:
        tracker = ScaleTracker()
        step.owner.add_pass(tracker)
    step.owner.observe("track_scales", True, always=True)
    # A bound method is copied with what it is bound to: a copy of the module shows its own.
    new.__dict__["scales_graph"] = tracker.scales_graph
    return new


class ScaleTracker(GraphPass):
    """Records metrics of every tensor that the graphs of a step make, and puts them together.

    A floating-point input that asks for no gradient is given one inside the graph, by its slot: the
    caller's own tensor stays as it is. Where an operation would choose another kernel, and with it
    other bits, because of that, it reads the tensor detached.
    """

    name = "track scales"
    phase = Phase.OBSERVE
    out_of_place = True
    observes = True

    def __init__(self) -> None:
        self._calls: list[TrackedCall] = []
        self._complete: list[TrackedCall] = []
        self._made: dict[int, _Made] = {}

    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Insert the probes."""
        places = Places(graph)
        chosen = [
            Place(region, node)
            for region in places.regions
            for node in _tracked_nodes(region)
            if not is_passed_through(node, places.bodies)
        ]
        rows_of = {node: row for row, (_, node) in enumerate(chosen)}
        gathered = _gathered_inputs(graph.graph)
        inputs = [node for node in graph.graph.find_nodes(op="placeholder") if INPUT in node.meta]
        hooked = {
            i: rows_of[node] for i, node in enumerate(inputs) if node in gathered & {*rows_of}
        }
        tracked = TrackedGraph(places, rows_of)
        records: list[CallRecord] = []
        graph.wrap(functools.partial(self._around, tracked, records, hooked))
        if not chosen:
            return ("no tensor to track",)
        for region in places.regions:
            _keep_kernels(region)
        without_slot = gathered.union(*(aliased_by_mutation(r.graph) for r in places.regions))
        insert_probes(
            graph,
            places,
            chosen,
            MOMENTS,
            records.append,
            needs_slot=lambda index: chosen[index].node not in without_slot,
            is_forced=_is_argument,
        )
        return (f"{len(chosen)} tensors tracked",)

    def before_step(self, module: nn.Module) -> None:
        """Begin a new record; the last complete one stays until this call has returned."""
        _release(self._calls)
        self._calls = []
        self._made.clear()

    def after_step(self, module: nn.Module, result: Any) -> None:
        """Publish the record, and let the caller's backward pass reach the tracked tensors.

        Only through the results: what the module keeps, such as a running mean of its inputs, stays
        without gradient as in the plain module.
        """
        kept = {id(buffer) for buffer in module.buffers()}
        for tensor in tree_leaves(result):
            source = self._made.get(id(tensor))
            if source is None or source.tensor() is not tensor or id(tensor) in kept:
                continue
            if source.attached is not None:
                with torch.enable_grad():
                    _Attach.apply(tensor, source.attached)
        _release(self._complete)
        self._complete, self._calls = self._calls, []
        self._made.clear()

    def scales_graph(self) -> ScalesGraph:
        """All graphs of the last complete call as one, with the gradients that have arrived."""
        return assemble(self._complete)

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaleTracker:
        new = type(self)()
        memo[id(self)] = new
        return new

    def _around(
        self,
        graph: TrackedGraph,
        records: list[CallRecord],
        hooked: Mapping[int, int],
        run: Run,
        inputs: Sequence[Any],
    ) -> Sequence[Any]:
        """Run a graph and note which earlier graphs made its inputs."""
        links, values = {}, list(inputs)
        for position, tensor in enumerate(inputs):
            source = self._made.get(id(tensor))
            if source is not None and source.tensor() is tensor:
                links[position] = source.output
                if source.attached is not None and position not in graph.written:
                    values[position] = source.attached
        outputs = run(values)
        call_index = len(self._calls)
        call = TrackedCall(graph, records.pop() if records else None, links)
        for position, row in hooked.items():
            if inputs[position].requires_grad and torch.is_grad_enabled():
                call.watch(inputs[position], row)
        self._calls.append(call)
        return tuple(
            self._hand_out(tensor, (call_index, position), graph.output_gradients[position])
            if isinstance(tensor, Tensor) and not any(tensor is other for other in values)
            else tensor
            for position, tensor in enumerate(outputs)
        )

    def _hand_out(self, tensor: Tensor, output: tuple[int, int], has_gradient: bool) -> Tensor:
        """The tensor as the plain module returns it, without a gradient that only we gave it."""
        attached = None
        if tensor.requires_grad and not has_gradient:
            # Not detach(), which would count writes into it as writes into what autograd saved.
            attached, tensor = tensor, tensor.data
        self._made[id(tensor)] = _Made(weakref.ref(tensor), output, attached)
        return tensor


@dataclass(frozen=True)
class _Made:
    """A tensor that a graph returned; a later graph that reads it gets an edge to it.

    Attributes:
        tensor: The tensor.
        output: Index of the call that made it, and position among the outputs of that call.
        attached: The same with a gradient, if the plain module gives it none.
    """

    tensor: weakref.ref[Tensor]
    output: tuple[int, int]
    attached: Tensor | None


class _Attach(torch.autograd.Function):
    """Makes the very tensor ``result`` take part in the backward pass, as ``attached`` does."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, attached: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[None, Tensor | None]:
        return None, grad_output


def _tracked_nodes(region: Region) -> list[fx.Node]:
    """Nodes of a region to track; its own inputs and outputs are tensors of the outer graph."""
    nodes = probeable_nodes(region, internal=True)
    # Placeholders that a pass added carry its factors and slots.
    return [node for node in nodes if node.op != "placeholder" or INPUT in node.meta]


def _is_argument(node: fx.Node) -> bool:
    """Whether the node is an input that the caller gave, rather than state of the module."""
    described: GraphInput | None = node.meta.get(INPUT)
    if described is None or described.kind != "input":
        return False
    return not described.source.startswith(_STATE_SOURCES)


def _gathered_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs with a gradient that several operations of the graph contribute to.

    The caller may read such a tensor as well, and adds gradients up one by one; a probe would add
    up those of this graph first, which is another order. A hook sees the sum.
    """
    several = {node for read in repeated_reads(graph).values() for node in read}
    written = aliased_by_mutation(graph)
    return {
        node
        for node in graph.find_nodes(op="placeholder")
        if _is_argument(node)
        and requires_grad(node)
        and node not in written
        and (len(node.users) > 1 or node in several)
    }


def _release(calls: Sequence[TrackedCall]) -> None:
    for call in calls:
        call.release()


def _keep_kernels(region: Region) -> None:
    """Detach arguments whose gradient would change bits, or make an operation fail.

    Only arguments that have no gradient in the plain module: for the others nothing changes.
    """
    graph = region.graph
    roots = memory_roots(graph)
    for node in list(graph.nodes):
        touchy = _touchy_arguments(node)
        targets = written_arguments(node)
        if any(roots[target].op in {"placeholder", "get_attr"} for target in targets):
            # A write into the caller's or the module's own tensor must not leave a gradient there.
            touchy += [tensor for tensor in node.all_input_nodes if tensor not in targets]
        for tensor in dict.fromkeys(touchy):
            if is_float_tensor(tensor) and not requires_grad(tensor):
                with graph.inserting_before(node):
                    detached = graph.call_method("detach", (tensor,))
                node.replace_input_with(tensor, detached)


def _touchy_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments by whose gradient the operation chooses its kernel, or is refused."""
    if node.op not in {"call_function", "call_method"}:
        return []
    tensors = [tensor for tensor in node.all_input_nodes if example_tensor(tensor) is not None]
    name = op_name(node)
    if is_higher_order(node) or is_custom_operator(node):
        # Either may have no derivative.
        return [] if is_checkpoint(node) else tensors
    if node.target is F.scaled_dot_product_attention:
        # A fused kernel gives no gradient to its mask.
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        return [mask] if isinstance(mask, fx.Node) else []
    if name in {"matmul", "imatmul", "rmatmul", "linear"}:
        # torch folds a batch of products into one if the smaller operand requires a gradient.
        is_batch = any(_num_dims(tensor) > 2 for tensor in tensors)
        return [tensor for tensor in tensors if _num_dims(tensor) <= 2] if is_batch else []
    if "eigvals" in name or "svdvals" in name or name in {"cond", "matrix_norm"}:
        return tensors
    without = [
        tensor for tensor in tensors if is_float_tensor(tensor) and not requires_grad(tensor)
    ]
    return [tensor for tensor in without if refuses_gradient(node, tensor)]


def _num_dims(node: fx.Node) -> int:
    tensor = example_tensor(node)
    return 0 if tensor is None else tensor.dim()
