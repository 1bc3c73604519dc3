"""Prepare a joint graph for planning, and split it by the plan.

Planning is done on :class:`RematProblem`. Torch 2.11 lacks ``is_opaque_node``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.compile_utils import raise_getitems
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.capture.aliasing import is_view
from lightning_unitscale.capture.executors import execute_with
from lightning_unitscale.capture.graph_nodes import drop_unread_draws, is_seeded, tensors_in
from lightning_unitscale.memory.budgets import Budget, BudgetError, check_budget
from lightning_unitscale.memory.costs import (
    CostModel,
    assuming_sizes,
    default_cost_model,
    size_hint,
)
from lightning_unitscale.memory.gpus import present_gpu
from lightning_unitscale.memory.joint_graph import (
    JointGraphReader,
    Symbolic,
    changing_sizes,
    must_recompute,
)
from lightning_unitscale.memory.offload import (
    OP_BY_OP,
    Offload,
    check_offload,
    gpu_cost_model,
    link_of,
)
from lightning_unitscale.memory.offload_graph import insert_moves
from lightning_unitscale.memory.planner import Planner
from lightning_unitscale.memory.problem import NodeRegion, recomputed
from lightning_unitscale.memory.real_memory import storage_bytes
from lightning_unitscale.memory.remat_plan import PLANNER_VERSION, RematPlan
from lightning_unitscale.memory.schedule import input_bytes, lazy_order

PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
# Sizes may exceed the planned ones by these factors. The largest factor that fits is used.
_FACTORS = (8.0, 4.0, 2.0, 1.5, 1.25, 1.1)
# Key in the meta of a backward graph's nodes: their place in the joint graph. Their names change if
# they run several times.
_NUMBER = "lightning_unitscale.joint_number"
_SET = torch.ops.aten.set_.source_Tensor


def prepare(joint_module: fx.GraphModule) -> None:
    """Mark the nodes that a user's checkpoint, a collective, an effect or a mutation fixes."""
    keep_old_data(joint_module)
    if any(must_recompute(node) for node in joint_module.graph.nodes):
        partitioners.cleanup_recompute_tags(joint_module, is_default_partition=False)
    partitioners.force_save_collectives(joint_module)
    partitioners.force_save_effectful_ops(joint_module)
    partitioners.force_save_bw_mutation_src(joint_module)


def limit_reach(sizes: Sequence[torch.SymInt], fits: Callable[[], bool]) -> None:
    """Limit a plan to sizes that fit. For larger ones the step is planned again."""
    if not sizes:
        return
    limits = list(map(size_hint, sizes))
    for factor in _FACTORS:
        larger = [ceil(factor * limit) for limit in limits]
        with assuming_sizes(sizes, larger):
            if fits():
                limits = larger
                break
    for size, limit in zip(sizes, limits, strict=True):
        bool(size <= limit)  # bool() adds a guard to the captured graph


def real_inputs(graph: fx.Graph) -> dict[str, Tensor]:
    """Return the tensors behind a graph's fake inputs, as far as they are known."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return {}
    converter = context.fake_mode.fake_tensor_converter.meta_converter
    fakes = {
        fake.untyped_storage()._cdata: tensor
        for tensor, number in list(converter.describer.lookup_tensor.items())
        if isinstance(fake := converter.tensor_memo.get(number), FakeTensor)
    }
    return {
        node.name: fakes[key]
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := node.meta.get("val"), Tensor)
        and (key := value.untyped_storage()._cdata) in fakes
    }


def keep_old_data(joint_module: fx.GraphModule) -> None:
    """Copy the data of a reassigned parameter if the backward pass reads the old data."""
    # A saved input is the caller's own tensor, which has the new data by then.
    graph = joint_module.graph
    for node in graph.find_nodes(op="call_function", target=_SET):
        param = node.args[0]
        if not isinstance(param, fx.Node) or param.op != "placeholder" or not is_kept(param):
            continue
        readers = [user for user in param.users if user.op != "output" and user.target is not _SET]
        with graph.inserting_before(min(readers)):
            old = graph.call_function(torch.ops.aten.clone.default, (param,))
        old.meta["val"] = param.meta["val"].clone()
        for reader in readers:
            reader.replace_input_with(param, old)


def is_kept(node: fx.Node) -> bool:
    """Check whether the backward pass reads a node, or a view of it."""
    return any(
        user.meta.get("partitioner_tag") == "is_backward" or (is_view(user) and is_kept(user))
        for user in node.users
    )


def mutated_inputs(joint_module: fx.GraphModule) -> list[fx.Node]:
    """Return the inputs that the step writes to after the graph has run."""
    output = joint_module.graph.output_node()
    written = [
        description.mutated_input
        for description in tree_leaves(list(output.meta.get("desc", ())))
        if isinstance(description, InputMutationAOTOutput)
    ]
    placeholders = joint_module.graph.find_nodes(op="placeholder")
    return [node for node in placeholders if node.meta.get("desc") in written]


class RematPartitioner(CustomPartitionerFn):
    """A ``partition_fn`` that plans every joint graph to a budget.

    Use it with ``aot_autograd(partition_fn=...)``, as Inductor's ``custom_partitioner_fn`` or with
    :func:`aot_backend`.

    Args:
        budget: Bytes, a float from 0 (the smallest peak, also ``"min"``) to 1 (the default plan's
            peak), ``"min_cut"``, or ``"default"``.
        cost_model: Cost of running an operator. The default is that of the graph's device.
        on_plan: Called with every plan.
        offload: ``"host"`` for plans that also move saved values to host memory, or the link to the
            host that they assume. Graphs must run op by op.

    Attributes:
        planning_seconds: Total time of planning so far.

    Raises:
        ValueError: If the budget is malformed. When a graph is partitioned, if it is in bytes and
            below the floor.
    """

    def __init__(
        self,
        budget: Budget = "min_cut",
        *,
        cost_model: CostModel | None = None,
        on_plan: Callable[[RematPlan], None] | None = None,
        offload: Offload = None,
    ) -> None:
        self.budget = budget if budget == "default" else check_budget(budget)
        self.offload = check_offload(offload, self.budget)
        self.cost_model = cost_model
        self.on_plan = on_plan
        # The tensors behind inputs of the graph that is planned, as far as they are known.
        self.inputs: dict[str, Tensor] = {}
        self.planning_seconds = 0.0
        # For messages: what an uncaptured step loses, and why nothing is planned.
        self.loss_without_plan = f", and without a plan: budget={budget!r} may not hold"
        self.given_up = ""

    def give_up(self, reason: str) -> None:
        """Plan nothing, since the step is not captured."""
        self.given_up = f"Nothing is planned: {reason}."

    def __call__(  # type: ignore[override]
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        compiler: str = "aot_eager",
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph of a joint graph."""
        started = time.perf_counter()
        prepare(gm)
        self.inputs = real_inputs(gm.graph)
        is_fused = compiler == "inductor"
        values = tensors_in([node.meta.get("val") for node in gm.graph.nodes])
        types = (value.device.type for value in values)
        device = next((kind for kind in types if kind not in ("cpu", "meta")), "cpu")
        if self.offload is not None and is_fused:
            raise BudgetError(f"offload={self.offload!r}: {OP_BY_OP}")
        model = self.cost_model or (
            gpu_cost_model(present_gpu())
            if self.offload is not None and device == "cuda"
            else default_cost_model(device, fused=is_fused)
        )
        reader = JointGraphReader(
            gm.graph,
            num_fwd_outputs,
            model,
            mutated_inputs=[*mutated_inputs(gm), *self.changing_inputs(gm.graph)],
            # Inductor has no kernel that starts from a saved state, except for a user's checkpoint.
            replay_random=not is_fused,
        )
        problem = reader.read()
        placeholders = gm.graph.find_nodes(op="placeholder")
        static = [placeholders[i].meta.get("val") for i in static_lifetime_input_indices or ()]
        # Only torch.compile's own backends know parameters and buffers. Otherwise all inputs count.
        static_bytes = storage_bytes(static) or input_bytes(problem)
        resident, forward, stepping = self.resident_bytes(static_bytes)
        planner = Planner(
            problem,
            resident_bytes=resident,
            forward_bytes=forward,
            stepping_bytes=stepping,
            link=link_of(device) if self.offload == "host" else self.offload,
        )
        plan = self.choose(planner)
        self.limit_sizes(changing_sizes(gm.graph), lambda: planner.in_problem(plan, reader.read()))
        if self.on_plan is not None:
            self.on_plan(plan)
        self.inputs = {}  # after a graph break they are activations
        graphs = split(gm, plan, reader.nodes, num_fwd_outputs)
        self.planning_seconds += time.perf_counter() - started
        return graphs

    def changing_inputs(self, graph: fx.Graph) -> list[fx.Node]:
        """Return inputs that code after the graph may change, so nothing is computed again."""
        return []

    def resident_bytes(self, static_bytes: int) -> tuple[int, int, int]:
        """Return bytes besides a graph's inputs: in the whole step, and only in parts of it.

        The parts are the forward pass and the step of the optimizer.
        """
        return 0, 0, 0

    def choose(self, planner: Planner) -> RematPlan:
        """Return the plan of one graph. A subclass may choose another."""
        return planner.default if self.budget == "default" else planner.plan(self.budget)

    def limit_sizes(self, sizes: Sequence[torch.SymInt], enlarged: Callable[[], RematPlan]) -> None:
        """Limit a plan to changing sizes for which a budget in bytes is kept.

        ``enlarged`` returns the plan for the sizes that are assumed when it is called.
        """
        if isinstance(self.budget, int):
            limit = self.budget
            limit_reach(sizes, lambda: self.peak_bytes(enlarged()) <= limit)

    def peak_bytes(self, plan: RematPlan) -> int:
        """Return the bytes that the budget limits."""
        return plan.peak_bytes

    def uuid(self) -> Any:
        """Return the key in Inductor's cache, or ``None`` for no caching."""
        if type(self) is not RematPartitioner or self.on_plan is not None:
            return None
        return f"remat-{PLANNER_VERSION}-{self.budget!r}-{self.cost_model!r}-{self.offload!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> RematPartitioner:
        return self  # it has no state of a module

    def __reduce__(self) -> Any:
        # Inductor pickles its settings, and so this object, into the key of its cache.
        return (str, (repr(self.uuid()),))


def aot_backend(partition_fn: PartitionFn) -> Callable[..., Any]:
    """Return a backend of ``torch.compile`` that runs AOTAutograd's graphs op by op."""

    def run(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return execute_with("aot_eager", graph_module, inputs, partition_fn)

    return run


def split(
    joint_module: fx.GraphModule, plan: RematPlan, nodes: Sequence[fx.Node], num_fwd_outputs: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a plan."""
    problem, saved = plan.problem, plan.saved
    runs = recomputed(problem, saved)
    replays = False
    for index, node in enumerate(nodes):
        if runs[index] and is_seeded(node):
            # functorch replays nodes with this mark from the generator's state of the forward pass.
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            replays = True
    is_opaque = getattr(partitioners, "is_opaque_node", None)  # torch 2.11 has no opaque values
    values: list[fx.Node] = []
    symbols: list[fx.Node] = []
    opaque: list[fx.Node] = []
    for node in (node for node, is_saved in zip(nodes, saved, strict=True) if is_saved):
        is_symbol = isinstance(node.meta.get("val"), Symbolic)
        if node.op != "get_attr":  # the bodies of a torch.cond or scan are in both graphs
            is_other = is_opaque is not None and is_opaque(node)
            (symbols if is_symbol else opaque if is_other else values).append(node)
    options: dict[str, Any] = {"saved_sym_nodes": symbols, "num_fwd_outputs": num_fwd_outputs}
    if is_opaque is not None:
        options["saved_opaque_nodes"] = opaque
    fwd_module, bwd_module = partitioners._extract_fwd_bwd_modules(joint_module, values, **options)
    if replays:
        fwd_module, bwd_module = partitioners.functionalize_rng_ops(
            joint_module, fwd_module, bwd_module, len(symbols)
        )
    number = {node.name: index for index, node in enumerate(nodes)}
    regions = zip(number, problem.nodes, strict=True)
    backward_only = {name for name, node in regions if node.region is NodeRegion.BACKWARD}
    drop_unread_draws(fwd_module.graph, backward_only)  # each draws in its own pass only
    graphs = [raise_getitems(fwd_module), raise_getitems(_reordered(bwd_module, plan, number))]
    if plan.moves:
        insert_moves(
            graphs[0].graph,
            graphs[1].graph,
            plan,
            lambda node: number.get(node.name),
            lambda node: node.meta.get(_NUMBER),
        )
        for graph in graphs:
            graph.recompile()
    thread = partitioners.thread_graphsafe_rng_from_hops
    return thread(graphs[0], is_backward=False), thread(graphs[1], is_backward=True)


def _reordered(module: fx.GraphModule, plan: RematPlan, number: dict[str, int]) -> fx.GraphModule:
    """Return the backward graph with recomputation where, and as often as, it is needed."""
    nodes, segments, kept = plan.problem.nodes, plan.segments, plan.kept
    old = list(module.graph.nodes)
    index = {node: i for i, node in enumerate(old)}
    of_joint = [number.get(node.name) for node in old]
    is_placed = [node.op in ("placeholder", "output") for node in old]
    # A renamed node is a replayed random operator, or passes on a generator. Never run it twice.
    is_backward = [j is not None and nodes[j].region is NodeRegion.BACKWARD for j in of_joint]
    # Effects keep their place relative to the operators of the backward pass.
    has_effect = [
        node.op == "call_function" and node.is_impure() and not is_seeded(node) for node in old
    ]
    anchors = [i for i in range(len(old)) if not is_placed[i] and (is_backward[i] or has_effect[i])]
    order = lazy_order(
        [[index[read] for read in node.all_input_nodes] for node in old],
        anchors,
        [not placed for placed in is_placed],
        wanted_at_end=[index[read] for read in module.graph.output_node().all_input_nodes],
        segments=None if segments is None else [0 if j is None else segments[j] for j in of_joint],
        kept=None if kept is None else [True if j is None else bool(kept[j]) for j in of_joint],
    )
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    placeholders = module.graph.find_nodes(op="placeholder")
    for node in (*placeholders, *(old[i] for i in order), module.graph.output_node()):
        # A later copy of a node replaces the earlier one for all later nodes.
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta[_NUMBER] = of_joint[index[node]]
    graph.lint()
    return fx.GraphModule(module, graph)
