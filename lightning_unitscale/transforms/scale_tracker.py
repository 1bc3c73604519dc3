"""The pass behind ``track_scales``: every floating-point tensor of a step, in both directions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from lightning_unitscale.graph.aliasing import (
    aliased_by_mutation,
    memory_roots,
    returned_alone,
    written_arguments,
)
from lightning_unitscale.graph.capture import (
    GraphInput,
    is_checkpoint,
    is_custom_operator,
    is_higher_order,
)
from lightning_unitscale.graph.nodes import (
    INPUT,
    example_tensor,
    first_operation,
    is_float_tensor,
    op_name,
    requires_grad,
)
from lightning_unitscale.graph.passes import GraphPass, Region, Run, Stage, StepGraph
from lightning_unitscale.graph.recording import CallRecord, CallRecorder
from lightning_unitscale.graph.repeated_reads import repeated_reads
from lightning_unitscale.transforms.metrics import MOMENTS
from lightning_unitscale.transforms.probed_places import (
    Place,
    Places,
    is_passed_through,
    probeable_nodes,
)
from lightning_unitscale.transforms.probes import ProbeFunctions, insert_probe
from lightning_unitscale.transforms.scales_graph import ScalesGraph
from lightning_unitscale.transforms.tracked_graph import (
    TrackedCall,
    TrackedGraph,
    assemble,
)

# Sources of inputs that are the module's own state, not an argument or an intermediate tensor.
_STATE_SOURCES = ("L['self']", "G[")


class ScaleTracker(GraphPass):
    """Records metrics of every tensor that the graphs of a step make, and puts them together.

    A floating-point input that asks for no gradient is given one inside the graph, by its slot: the
    caller's own tensor stays as it is. Where an operation would choose another kernel, and with it
    other bits, because of that, it reads the tensor detached.
    """

    name = "track scales"
    stage = Stage.OBSERVE
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
        inputs = [one for one in graph.graph.find_nodes(op="placeholder") if INPUT in one.meta]
        hooked = {i: rows_of[one] for i, one in enumerate(inputs) if one in gathered & {*rows_of}}
        tracked = TrackedGraph(places.regions[0], places.bodies, rows_of)
        records: list[CallRecord] = []
        graph.wrap(functools.partial(self._around, tracked, records, hooked))
        if not chosen:
            return ("no tensor to track",)
        for region in places.regions:
            _keep_kernels(region)
        # Probes of inputs go before them, and after the slots, which are inputs themselves.
        anchors = {id(region): first_operation(region.graph) for region in places.regions}
        recorder = CallRecorder(graph, len(chosen), MOMENTS.num_columns, records.append)
        rows = _insert_probes(graph, places, chosen, recorder, anchors, gathered)
        recorder.finish(rows)
        return (f"{len(chosen)} tensors tracked",)

    def before_step(self, module: nn.Module) -> None:
        """Begin a new record; the last complete one stays until this call has returned."""
        _release(self._calls)
        self._calls = []
        self._made.clear()

    def after_step(self, module: nn.Module, result: Any) -> None:
        """Put the record in force, and let the caller's backward pass reach what is tracked.

        The tensors among the results only: what the module keeps, a running mean of its inputs,
        stays without gradient as in the plain module.
        """
        kept = {id(one) for one in module.buffers()}
        for one in tree_leaves(result):
            made = self._made.get(id(one))
            if made is None or made.tensor() is not one or id(one) in kept:
                continue
            if made.attached is not None:
                with torch.enable_grad():
                    _Attach.apply(one, made.attached)
        _release(self._complete)
        self._complete, self._calls = self._calls, []
        self._made.clear()

    def scales_graph(self) -> ScalesGraph:
        """All graphs of the last complete call as one, with what is known of its backward pass."""
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
        """Run a graph and note where its inputs come from and its outputs go."""
        links, given = {}, list(inputs)
        for position, one in enumerate(inputs):
            made = self._made.get(id(one))
            if made is not None and made.tensor() is one:
                links[position] = made.place
                if made.attached is not None and position not in graph.written:
                    given[position] = made.attached
        outputs = run(given)
        place = len(self._calls)
        call = TrackedCall(graph, records.pop() if records else None, links)
        for position, row in hooked.items():
            if inputs[position].requires_grad and torch.is_grad_enabled():
                call.watch(inputs[position], row)
        self._calls.append(call)
        return tuple(
            self._hand_out(one, (place, position), graph.output_gradients[position])
            if isinstance(one, Tensor) and not any(one is other for other in given)
            else one
            for position, one in enumerate(outputs)
        )

    def _hand_out(self, tensor: Tensor, place: tuple[int, int], has_gradient: bool) -> Tensor:
        """The tensor as the plain module would make it: without gradient if only we gave it one."""
        attached = None
        if tensor.requires_grad and not has_gradient:
            # Not detach(), which would count writes into it as writes into what autograd saved.
            attached, tensor = tensor, tensor.data
        self._made[id(tensor)] = _Made(weakref.ref(tensor), place, attached)
        return tensor


@dataclass(frozen=True)
class _Made:
    """A tensor that a graph returned: if a later graph of the step reads it, there is an edge.

    Attributes:
        tensor: The tensor.
        place: Which output of which call of the step it is.
        attached: The same with a gradient, if the plain module gives it none.
    """

    tensor: weakref.ref[Tensor]
    place: tuple[int, int]
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


def _insert_probes(
    graph: StepGraph,
    places: Places,
    chosen: Sequence[Place],
    recorder: CallRecorder,
    anchors: Mapping[int, fx.Node],
    gathered: Collection[fx.Node],
) -> list[fx.Node]:
    """Probe the nodes; returns their rows, in the same order, as nodes of the outermost graph.

    Those of ``gathered`` in the forward direction only.
    """
    forced = ProbeFunctions(MOMENTS)
    existing = ProbeFunctions(MOMENTS, if_differentiable=True)
    mutated = {id(region): aliased_by_mutation(region.graph) for region in places.regions}
    # What a checkpoint returns, the graph around it may write into: the rule is for that graph.
    alone = returned_alone(graph.graph)
    rows: list[fx.Node] = []
    for index, (region, node) in enumerate(chosen):
        slot = None
        if node not in mutated[id(region)] and node not in gathered:
            slot = recorder.slot(index, region)
        functions = forced if _is_argument(node) else existing
        anchor = anchors[id(region)]
        rows.append(insert_probe(region.graph, node, anchor, slot, functions, alone=node in alone))
    return places.bring_out(chosen, rows)


def _is_argument(node: fx.Node) -> bool:
    """Whether the node is an input that the caller gave, rather than state of the module."""
    given: GraphInput | None = node.meta.get(INPUT)
    if given is None or given.kind != "input":
        return False
    return not given.source.startswith(_STATE_SOURCES)


def _gathered_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Inputs with a gradient that several operations of the graph contribute to.

    The caller may read such a tensor as well, and adds gradients up one by one; a probe would add
    up those of this graph first, which is another order. A hook sees the sum.
    """
    several = {one for read in repeated_reads(graph).values() for one in read}
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
    for one in calls:
        one.release()


def _keep_kernels(region: Region) -> None:
    """Detach arguments whose gradient would change bits, or make an operation fail.

    Only arguments that have no gradient in the plain module: for the others nothing changes.
    """
    graph = region.graph
    roots = memory_roots(graph)
    for node in list(graph.nodes):
        touchy = _touchy_arguments(node)
        targets = written_arguments(node)
        if any(roots[one].op in {"placeholder", "get_attr"} for one in targets):
            # A write into the caller's or the module's own tensor must not leave a gradient there.
            touchy += [one for one in node.all_input_nodes if one not in targets]
        for one in dict.fromkeys(touchy):
            if is_float_tensor(one) and not requires_grad(one):
                with graph.inserting_before(node):
                    detached = graph.call_method("detach", (one,))
                node.replace_input_with(one, detached)


def _touchy_arguments(node: fx.Node) -> list[fx.Node]:
    """Arguments by whose gradient the operation chooses its kernel, or is refused."""
    if node.op not in {"call_function", "call_method"}:
        return []
    tensors = [one for one in node.all_input_nodes if example_tensor(one) is not None]
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
        is_batch = any(_num_dims(one) > 2 for one in tensors)
        return [one for one in tensors if _num_dims(one) <= 2] if is_batch else []
    if "eigvals" in name or "svdvals" in name or name in {"cond", "matrix_norm"}:
        return tensors
    return []


def _num_dims(node: fx.Node) -> int:
    tensor = example_tensor(node)
    return 0 if tensor is None else tensor.dim()
