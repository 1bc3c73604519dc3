"""Run a rewritten graph: op by op, by AOTAutograd's graphs op by op, or by Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config

from lightning_unitscale.capture.aliasing import aliased_by_mutation, is_random
from lightning_unitscale.capture.aot_backend import (
    keep_workspaces,
    lstm_with_workspace,
    on_plain_tensors,
    partitioned_by,
    plain_kernels,
    recurrent_dropout,
)
from lightning_unitscale.capture.copy_graphs import compiled_forward, is_checkpoint
from lightning_unitscale.capture.dynamo_capture import GraphInput
from lightning_unitscale.capture.graph_nodes import (
    DATA_WRITES,
    drop_unread_draws,
    line_of,
    op_name,
    requires_grad,
)
from lightning_unitscale.capture.held_inputs import hold_inputs
from lightning_unitscale.capture.patches import LETS_TRAIN, drop_inference_mode
from lightning_unitscale.scales.statistics import join_rows

Executor = Literal["eager", "aot_eager", "inductor"]
# ``mode`` of ``torch.compile``.
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


aten = torch.ops.aten

# Otherwise torch drops draws that nothing reads, and later ones draw other numbers.
_KEEPING_DRAWS = {"fallback_random": True}


class GraphRewriter(Protocol):
    """Rewriter of the aten graphs that AOTAutograd makes of a captured graph."""

    def describe(self, graph: Any) -> None:
        """Note the units in which matmuls read the tensors of a captured graph, for its probes."""

    def rewrite_joint(self, graph: fx.Graph) -> None:
        """Rewrite the graph of both passes, or the only one of a step without gradients."""

    def rewrite_part(self, graph: fx.Graph) -> None:
        """Finish the graph of one pass, which the executor then runs op by op."""


def execute_with(
    executor: Executor,
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    partition_fn: Any = None,
    mode: CompileMode = "default",
    *,
    backward_is_autocast: bool = False,
    rewriter: GraphRewriter | None = None,
) -> Callable[..., Any]:
    """Turn a rewritten graph into a callable."""
    if executor == "eager":
        _restore_checkpointing(graph_module)
        return compiled_forward(graph_module)
    drop_inference_mode(graph_module)
    backward_autocast = "same_as_forward" if backward_is_autocast else "off"
    backward = functorch_config.patch(backward_pass_autocast=backward_autocast)
    if executor == "aot_eager":
        partition_fn = _as_uncaptured(partition_fn or min_cut_rematerialization_partition)
        # Boxed inputs let each saved tensor be freed after its last reader.
        options = {"fw_compiler": _run_op_by_op, "partition_fn": partition_fn}
        if rewriter is not None:
            options = _rewriting(rewriter, partition_fn)
        # If writes into inputs stay in the graph, torch (2.13) swaps results that are such inputs,
        # when others are written later, as in torchmetrics' MeanMetric. If they do not, torch does
        # not support ``.data = ...``.
        has_data = any(op_name(node) in DATA_WRITES for node in graph_module.graph.nodes)
        backend = aot_autograd(keep_inference_input_mutations=has_data, **options)
        # An error in the middle of it would leave gradients off.
        with (
            plain_kernels(),
            backward,
            inductor_config.patch(_KEEPING_DRAWS),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            compiled: Callable[..., Any] = backend(graph_module, inputs)
        return on_plain_tensors(compiled, inputs)
    # Imported here: Inductor takes a second to load, and most runs never need it.
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    of_forward: set[str] = set()  # names of nodes

    def compile_one(one: fx.GraphModule, *args: Any, **options: Any) -> Any:
        if options.get("is_backward"):
            _draw_once(one.graph, of_forward)
        else:
            of_forward.update(node.name for node in one.graph.nodes)
        join_rows(one)
        # Inductor (2.14) checks the sizes of results, and takes the workspace of an LSTM for empty.
        is_checked = not keep_workspaces(one.graph) and inductor_config.size_asserts
        one.recompile()
        with inductor_config.patch(size_asserts=is_checked):
            return compile_fx_inner(one, *args, **options)

    lstm_with_workspace()  # which a graph from Inductor's caches may call
    with partitioned_by(partition_fn), backward, recurrent_dropout():
        # These settings also apply when the backward graph is compiled, which is much later.
        # Inductor's own random numbers would differ from those of the uncaptured step.
        patches = {**list_mode_options(mode), **_KEEPING_DRAWS}
        run = compile_fx(
            graph_module, list(inputs), inner_compile=compile_one, config_patches=patches
        )
        return on_plain_tensors(cast(Callable[..., Any], run), inputs)


def _draw_once(graph: fx.Graph, of_forward: set[str]) -> None:
    """Remove from a backward graph the forward pass's random operators that nothing reads."""
    # With ``fallback_random`` torch (2.13) keeps every random operator whose inputs are saved, such
    # as an attention kernel: it would run in both passes, and draw its numbers twice.
    num_nodes = len(graph.nodes)
    drop_unread_draws(graph, of_forward)
    if len(graph.nodes) < num_nodes:
        graph.eliminate_dead_code()


def _as_uncaptured(partition: Callable[..., Any]) -> Callable[..., Any]:
    """Return a partitioner whose graphs draw once, and read inputs as an uncaptured step does."""

    def partition_and_mend(joint: fx.GraphModule, *args: Any, **options: Any) -> Any:
        forward, backward = partition(joint, *args, **options)
        _draw_once(backward.graph, {node.name for node in forward.graph.nodes})
        hold_inputs(forward.graph, backward.graph, options["num_fwd_outputs"])
        forward.recompile()
        backward.recompile()
        return forward, backward

    return partition_and_mend


def _run_op_by_op(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that runs a graph of AOTAutograd one operator at a time."""
    # A kernel's result may have another layout than its meta function returns, as the gradient of
    # softplus does. A view of it may then need a copy, as in an uncaptured backward pass.
    graph = graph_module.graph
    for view in (aten.view.default, aten._unsafe_view.default):
        for node in graph.find_nodes(op="call_function", target=view):
            node.target = aten.reshape.default
    keep_workspaces(graph)
    graph_module.recompile()
    return boxed_nop(graph_module, list(inputs))


def _rewriting(rewriter: GraphRewriter, partition_fn: Any) -> dict[str, Any]:
    """Return options that make AOTAutograd call the rewriter."""

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        rewriter.rewrite_joint(joint.graph)
        return partition_fn(joint, *args, **kwargs)

    def run_part(part: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        keep_workspaces(part.graph)
        rewriter.rewrite_part(part.graph)
        return _run_op_by_op(part, inputs)

    def run_alone(whole: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewriter.rewrite_joint(whole.graph)
        return run_part(whole, inputs)

    return {
        "partition_fn": partition,
        "fw_compiler": run_part,
        "bw_compiler": run_part,
        "inference_compiler": run_alone,
    }


def _restore_checkpointing(graph_module: fx.GraphModule) -> None:
    """Replace Dynamo's checkpoint operator by torch's, since run eagerly it saves everything."""
    for node in graph_module.graph.nodes:
        if is_checkpoint(node):
            body = getattr(graph_module, str(node.args[0].target))
            _restore_checkpointing(body)
            # The function itself, since a lazy graph module may compile its code once more.
            forward = compiled_forward(body)
            # The inputs that the body writes into by a method, such as a buffer that counts.
            written = frozenset(
                index
                for index, given in enumerate(body.graph.find_nodes(op="placeholder"))
                for user in given.users
                if user.op == "call_method"
                and user.args[0] is given
                and str(user.target).endswith("_")
            )
            stops_early = not any(map(_enters_context, body.graph.nodes))
            node.target = functools.partial(
                _checkpoint, forward=forward, written=written, stops_early=stops_early
            )
            node.target.__name__ = "checkpoint"


def _checkpoint(
    body: fx.GraphModule,
    *args: Any,
    forward: Callable[..., Any],
    written: frozenset[int],
    stops_early: bool,
    **kwargs: Any,
) -> Any:
    kwargs.pop("use_reentrant", None)

    # A buffer of the module is not an input of its checkpoint, which may write into it.
    def run(*others: Any) -> Any:
        left = iter(others)
        return forward(*(args[i] if i in written else next(left) for i in range(len(args))))

    others = [value for index, value in enumerate(args) if index not in written]
    with torch.utils.checkpoint.set_checkpoint_early_stop(stops_early):
        return torch.utils.checkpoint.checkpoint(run, *others, use_reentrant=False, **kwargs)


def _enters_context(node: fx.Node) -> bool:
    """Check whether a node of a captured graph enters a context, such as autocast."""
    # A later node leaves it. A recomputation that stops early would stay within it.
    return node.op == "call_function" and node.meta.get("example_value") is None


class CheckpointNotKept(Exception):
    """Error about a user's checkpoint that a plan would change."""


def refuse_checkpoints(graph_module: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Refuse a graph with a checkpoint whose behavior in torch a plan would change."""
    # A plan recomputes the same values as a checkpoint, but has none of its other effects. Torch
    # gives no gradient to a reentrant checkpoint whose inputs need none, updates BatchNorm's
    # statistics twice, and draws new random numbers if their state is not kept.
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    own = {
        node
        for node, described in zip(placeholders, inputs, strict=True)
        if described.kind in ("parameter", "buffer")
    }
    trained: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        is_kept = op_name(node) != "detach" and not trained.isdisjoint(node.all_input_nodes)
        if LETS_TRAIN in node.meta or requires_grad(node) or is_kept:
            trained.add(node)
        if is_checkpoint(node) and (reason := _why_not_kept(graph_module, node, own, trained)):
            line = line_of(node)
            where = f" at {line[0]}:{line[1]}" if line else ""
            raise CheckpointNotKept(f"the checkpoint{where} {reason}")


def _why_not_kept(
    graph_module: fx.GraphModule, node: fx.Node, own: set[fx.Node], trained: set[fx.Node]
) -> str:
    body: Any = node.args[0]
    region = getattr(graph_module, str(body.target)).graph
    given = [argument for argument in node.all_input_nodes if argument not in own | {body}]
    if node.kwargs.get("use_reentrant") and trained.isdisjoint(given):
        return "is reentrant and none of its inputs needs a gradient, so it has no gradients"
    writes = any(written.op == "placeholder" for written in aliased_by_mutation(region))
    if writes or any(map(_updates_statistics, region.nodes)):
        return "writes into a buffer, and a recomputation repeats the write"
    if node.kwargs.get("preserve_rng_state", True) is False and any(map(is_random, region.nodes)):
        return "draws other random numbers when recomputed (preserve_rng_state=False)"
    return ""


def _updates_statistics(node: fx.Node) -> bool:
    """Check whether a normalization updates running statistics, which its schema omits."""
    if op_name(node) not in ("batch_norm", "instance_norm"):
        return False
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    trains = given.get("training", given.get("use_input_stats", op_name(node) == "instance_norm"))
    return given.get("running_mean") is not None and bool(trains)
