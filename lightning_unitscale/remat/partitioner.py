"""The file that touches functorch's partitioner, AOTAutograd's and Dynamo's own names.

Planning is done on :class:`RematProblem`; here the joint graph is made ready for it.
Private names used here were checked on torch 2.13 and 2.11: ``TracingContext``, and the table in
which its fake tensors are kept by the tensors they stand for; ``cleanup_recompute_tags``,
``force_save_collectives``, ``force_save_effectful_ops``, ``force_save_bw_mutation_src``,
``InputMutationAOTOutput``. Those that an older torch does not have are left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from lightning_unitscale.dynamo.capture import execute_with
from lightning_unitscale.profiler.costs import (
    CostModel,
    assuming_sizes,
    default_cost_model,
    size_hint,
)
from lightning_unitscale.remat.budget import Budget, check_budget
from lightning_unitscale.remat.joint_graph import (
    Recomputable,
    changing_sizes,
    must_recompute,
    read_joint_graph,
)
from lightning_unitscale.remat.planner import PLANNER_VERSION, Planner, RematPlan
from lightning_unitscale.remat.schedule import input_bytes
from lightning_unitscale.remat.split_graph import split

PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
# By how much the sizes may outgrow those that were planned for; the largest that fits is taken.
_FACTORS = (8.0, 4.0, 2.0, 1.5, 1.25, 1.1)
_SET = torch.ops.aten.set_.source_Tensor


def prepare(joint_module: fx.GraphModule) -> None:
    """Mark what a user's checkpoint, a collective, an effect or a mutation fixes. Idempotent."""
    keep_old_data(joint_module)
    if any(must_recompute(node) for node in joint_module.graph.nodes):
        partitioners.cleanup_recompute_tags(joint_module, is_default_partition=False)
    partitioners.force_save_collectives(joint_module)
    for name in ("force_save_effectful_ops", "force_save_bw_mutation_src"):
        mark = getattr(partitioners, name, None)
        if mark is not None:
            mark(joint_module)


def limit_reach(sizes: Sequence[torch.SymInt], fits: Callable[[], bool]) -> None:
    """Let a plan serve sizes only as far as it fits: beyond, the step is planned again.

    Args:
        sizes: What changes from call to call.
        fits: Whether the plan is within its budget; asked for larger sizes than those planned for.
    """
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
        bool(size <= limit)  # asking makes it a guard of the captured graph


def real_inputs(graph: fx.Graph) -> dict[str, Tensor]:
    """The tensors behind a graph's fake inputs; those that are not known are left out."""
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return {}
    converter = context.fake_mode.fake_tensor_converter.meta_converter
    fakes = {
        fake.untyped_storage()._cdata: tensor
        for tensor, number in list(converter.describer.lookup_tensor.items())
        if isinstance(fake := converter.tensor_memo.get(number), FakeTensor)
    }
    real: dict[str, Tensor] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and (key := value.untyped_storage()._cdata) in fakes:
            real[node.name] = fakes[key]
    return real


def keep_old_data(joint_module: fx.GraphModule) -> None:
    """Copy the data of a reassigned parameter where the backward pass reads what it was before.

    A saved input is the caller's own tensor, which has the new data by then.
    """
    graph = joint_module.graph
    for node in graph.find_nodes(op="call_function", target=_SET):
        param = node.args[0]
        if not isinstance(param, fx.Node) or param.op != "placeholder" or not _is_kept(param):
            continue
        readers = [user for user in param.users if user.op != "output" and user.target is not _SET]
        with graph.inserting_before(min(readers)):
            old = graph.call_function(torch.ops.aten.clone.default, (param,))
        old.meta["val"] = param.meta["val"].clone()
        for reader in readers:
            reader.replace_input_with(param, old)


def _is_kept(node: fx.Node) -> bool:
    """Whether the backward pass reads a node, or a view of it."""
    return any(
        user.meta.get("partitioner_tag") == "is_backward" or (_is_view(user) and _is_kept(user))
        for user in node.users
    )


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info is not None for value in schema.returns)


def mutated_inputs(joint_module: fx.GraphModule) -> list[fx.Node]:
    """Inputs that the step writes to after the graph has run, as its outputs' descriptions say."""
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

    Usable with ``aot_autograd(partition_fn=...)``, as Inductor's ``custom_partitioner_fn`` and with
    :func:`aot_backend`.

    Args:
        budget: Bytes, a fraction of the default plan's peak, ``"min_cut"``, or ``"default"``.
        cost_model: What running an operation costs; by default that of the graph's device.
        recomputable_ops: Operators that may run again; by default all that are pure.
        resident: Bytes alive throughout a step and those in the forward pass only, beside the
            graph's inputs, for a graph whose parameters and buffers take the given bytes.
        on_plan: Called with every plan.

    Raises:
        ValueError: If the budget is malformed; when a graph is partitioned, if it is below the
            floor.
    """

    def __init__(
        self,
        budget: Budget = "min_cut",
        *,
        cost_model: CostModel | None = None,
        recomputable_ops: Recomputable | None = None,
        resident: Callable[[int], tuple[int, int]] | None = None,
        on_plan: Callable[[RematPlan], None] | None = None,
    ) -> None:
        self.budget = budget if budget == "default" else check_budget(budget)
        self.cost_model = cost_model
        self.recomputable_ops = recomputable_ops
        self.resident = resident
        self.on_plan = on_plan

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
        """The forward and the backward graph of a joint graph."""
        prepare(gm)
        is_fused = compiler == "inductor"
        model = self.cost_model or default_cost_model(_device_type(gm), fused=is_fused)
        read = functools.partial(
            read_joint_graph,
            gm.graph,
            num_fwd_outputs,
            model,
            mutated_inputs=mutated_inputs(gm),
            recomputable_ops=self.recomputable_ops,
            # Inductor draws by seeds of its own, which are saved.
            replay_random=not is_fused,
        )
        problem, nodes = read()
        resident, forward = (0, 0)
        if self.resident is not None:
            static = _static_bytes(gm, static_lifetime_input_indices)
            # Unknown outside of torch.compile's own backends: then all inputs count for them.
            resident, forward = self.resident(static or input_bytes(problem))
        planner = Planner(problem, resident_bytes=resident, forward_bytes=forward)
        plan = self.choose(planner)
        if isinstance(self.budget, int):
            limit = self.budget
            limit_reach(
                changing_sizes(gm.graph),
                lambda: self.peak_bytes(planner.in_problem(plan, read()[0])) <= limit,
            )
        if self.on_plan is not None:
            self.on_plan(plan)
        segments, kept = plan.segments, plan.kept
        return split(gm, problem, nodes, plan.saved, num_fwd_outputs, segments=segments, kept=kept)

    def choose(self, planner: Planner) -> RematPlan:
        """The plan of one graph; a subclass may choose another."""
        return planner.default if self.budget == "default" else planner.plan(self.budget)

    def peak_bytes(self, plan: RematPlan) -> int:
        """What the budget limits."""
        return plan.peak_bytes

    def uuid(self) -> Any:
        """What Inductor's cache keys graphs by; ``None``, no cache, if more than that decides."""
        if self.resident is not None or self.on_plan is not None:
            return None
        ops = sorted(map(str, self.recomputable_ops)) if self.recomputable_ops is not None else None
        model = None if self.cost_model is None else self.cost_model.key()
        return f"remat-{PLANNER_VERSION}-{self.budget!r}-{model}-{ops}"

    def __deepcopy__(self, memo: dict[int, Any]) -> RematPartitioner:
        return self  # it keeps no state of a module

    def __reduce__(self) -> Any:
        # Inductor pickles its settings into the key of its cache, this one among them.
        return (str, (repr(self.uuid()),))


class PlanOnly(RematPartitioner):
    """Keeps the planner of every joint graph, and partitions by the default.

    Args:
        cost_model: As of :class:`RematPartitioner`.
        resident_bytes: Bytes alive throughout beside the graph's inputs.
    """

    def __init__(self, cost_model: CostModel | None = None, resident_bytes: int = 0) -> None:
        super().__init__(
            "default", cost_model=cost_model, resident=lambda static: (resident_bytes, 0)
        )
        self.planners: list[Planner] = []

    def choose(self, planner: Planner) -> RematPlan:
        """The default plan; the planner is kept."""
        self.planners.append(planner)
        return planner.default


def _device_type(joint_module: fx.GraphModule) -> str:
    for node in joint_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            return value.device.type
    return "cpu"


def _static_bytes(joint_module: fx.GraphModule, indices: Sequence[int] | None) -> int:
    placeholders = joint_module.graph.find_nodes(op="placeholder")
    storages = {}
    for index in indices or ():
        value = placeholders[index].meta.get("val")
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage._cdata] = size_hint(storage.nbytes())
    return sum(storages.values())


def aot_backend(partition_fn: PartitionFn) -> Callable[..., Any]:
    """A backend of ``torch.compile`` that runs AOTAutograd's graphs op by op."""

    def run(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return execute_with("aot_eager", graph_module, inputs, partition_fn)

    return run
