"""Make the mean of the microbatches' losses the loss of the whole batch.

The stages of a step get values of the whole batch (:class:`WholeBatch`). Without the strategy,
means over classes that may not all count (labels of -100) get weights (:class:`BatchLoss`). For any
other loss whose mean is not that of the batch, the reason is reported. ``forward`` is captured for
one microbatch, and for two of them as the batch.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_unitscale.capture.dynamo_capture import static_shapes
from lightning_unitscale.capture.graph_nodes import (
    INTERNAL,
    example_tensor,
    replace_other_uses,
    tensor_name,
)
from lightning_unitscale.capture.graph_variants import GraphCall
from lightning_unitscale.capture.passes import StepGraph
from lightning_unitscale.pipeline.batch_rules import Coupled, Fact, Mean, Operation, Rows, Same
from lightning_unitscale.pipeline.batchwise import BatchFacts, CountedMean, compare_graph_modules
from lightning_unitscale.pipeline.captured_program import capture_program
from lightning_unitscale.pipeline.dataflow import find_sources
from lightning_unitscale.pipeline.program import LossSpec, Program

_COUNT = 2


class WholeBatch:
    """Values of the whole batch that the stages of a step need."""

    def __init__(self, facts: BatchFacts) -> None:
        self.facts = facts
        self._values: tuple[Tensor, ...] = ()
        self._compute: Callable[..., tuple[Tensor, ...]] | None = None

    def why_not(self, call: GraphCall, loss: int | None) -> str | None:
        """Return why the batch's loss does not follow from microbatches, ``None`` if it does."""
        positions = call.differentiable if loss is None else [loss]
        facts = (self.facts.outputs[position] for position in positions)
        return next((fact.reason for fact in facts if isinstance(fact, Coupled)), None)

    def relations(self, loss: int | None) -> list[Fact | None]:
        """Return how the results of the stages relate to those of the batch."""
        facts = list(self.facts.outputs)
        if loss is not None and isinstance(facts[loss], Mean):
            facts[loss] = Mean()
        return facts

    def note(self, call: GraphCall) -> None:
        """Compute the values of a batch that the stages need."""
        if self._compute is not None:
            with torch.no_grad():
                self._values = self._compute(*call.inputs)

    def rewrite(self, graph: StepGraph, loss: int | None) -> None:
        """Add the values of the batch to a microbatch's graph as inputs."""
        nodes = {tensor_name(node): node for node in graph.graph.nodes}
        nodes.update({node.name: node for node in graph.graph.nodes})
        wanted: list[fx.Node | CountedMean] = []

        def state(name: str, needed: fx.Node | CountedMean, example: Tensor) -> fx.Node:
            index = len(wanted)
            wanted.append(needed)
            return graph.add_state(name, lambda: self._values[index], example)

        for name, (ours, theirs) in self.facts.counted.items():
            example = example_tensor(ours.node)
            assert example is not None
            count = state("count", theirs, torch.empty((), device=example.device))
            of_loss = [ours.target, *([] if ours.weight is None else [ours.weight])]
            _divide_by(nodes[name], count, [nodes[each.name] for each in of_loss], ours)
        for name, (part, whole) in self.facts.of_batch.items():
            node = nodes.get(name) or nodes[tensor_name(part)]
            example = example_tensor(part)
            assert example is not None
            if not all(user.name in self.facts.of_batch for user in node.users):
                given = state(name, whole, example)
                node.replace_all_uses_with(given)
                _remove(graph.graph, node)
        for (sum_name, term), power in self.facts.term_powers.items():
            node = nodes[sum_name]
            scaled = _times(graph.graph, nodes[term], float(self.facts.count) ** power, node)
            node.replace_input_with(nodes[term], scaled)
        output = graph.graph.output_node()
        returned: Any = output.args[0]
        returned = list(returned)
        fact = None if loss is None else self.facts.outputs[loss]
        if loss is not None and isinstance(fact, Mean) and fact.power:
            factor = float(self.facts.count) ** fact.power
            returned[loss] = _times(graph.graph, returned[loss], factor, output)
            output.args = (tuple(returned),)
        self._compute = values_of_batch(self.facts.graph, wanted, self.facts.count)
        graph.graph_module.recompile()


def _times(graph: fx.Graph, node: fx.Node, factor: float, user: fx.Node) -> fx.Node:
    with graph.inserting_before(user):
        product = graph.call_function(operator.mul, (node, factor))
    product.meta[INTERNAL] = True
    return product


def _remove(graph: fx.Graph, node: fx.Node) -> None:
    """Erase an unused operation, and its inputs that become unused."""
    if node.op not in {"call_function", "call_method"} or node.users or node.is_impure():
        return
    reads = node.all_input_nodes
    graph.erase_node(node)
    for read in reads:
        _remove(graph, read)


def _divide_by(
    loss: fx.Node, count: fx.Node, of_loss: Sequence[fx.Node], mean: CountedMean
) -> None:
    """Make a mean over classes divide by ``count`` instead of the microbatch's own number."""
    if loss.target in (F.cross_entropy, F.nll_loss):
        given = Operation(loss, loss, {}, 1).bound()
        assert given is not None
        loss.target, loss.args, loss.kwargs = counted, (loss.target.__name__, count), given
        return
    # Rules may have replaced the function by another one with the same loss.
    with loss.graph.inserting_after(loss):
        weighted = loss.graph.call_function(_reweighted, (loss, count, mean.ignore_index, *of_loss))
    weighted.meta[INTERNAL] = True
    replace_other_uses(loss, weighted)


def counted(name: str, count: Tensor, **kwargs: Any) -> Tensor:
    """Return the sum of the losses of a microbatch's targets, divided by ``count``."""
    function = getattr(F, name)
    total: Tensor = function(**{**kwargs, "reduction": "sum"})
    if total.dtype in {torch.float16, torch.bfloat16}:
        # A sum of many losses overflows or loses precision in these types.
        losses: Tensor = function(**{**kwargs, "reduction": "none"})
        return (losses.float().sum() / count).to(losses.dtype)
    return total / count


def _reweighted(
    loss: Tensor, count: Tensor, ignore_index: int, target: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Return a microbatch's part of the batch's mean, with the gradients of ``loss``."""
    # A rule scales the gradient of every target by the same factor, whatever their number.
    with torch.no_grad():
        own = number_of_targets(target, weight, ignore_index)
        correction = torch.where(own > 0, loss * (own / count) - loss, -loss).nan_to_num()
    return loss.nan_to_num() + correction


def number_of_targets(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the number, or the total weight, of the targets that count."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum().float()
    return (weight[target.where(counts, 0)] * counts).sum()


def values_of_batch(
    graph_module: fx.GraphModule, wanted: Sequence[fx.Node | CountedMean], count: int
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that computes some values of a graph from its inputs."""
    outputs_of = [want.counts_by if isinstance(want, CountedMean) else [want] for want in wanted]
    needed = find_sources(graph_module.graph, itertools.chain(*outputs_of))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = []
    for want in wanted:
        if isinstance(want, CountedMean):
            weight = None if want.weight is None else copies[want.weight]
            arguments = (copies[want.target], weight, want.ignore_index)
            total = graph.call_function(number_of_targets, arguments)
            outputs.append(graph.call_function(operator.truediv, (total, count)))
        else:
            outputs.append(copies[want])
    graph.output(tuple(outputs))
    return fx.GraphModule(graph_module, graph)


def joined(values: Sequence[Any], fact: Fact | None) -> Any:
    """Join the values of the microbatches into the value of the batch."""
    first, count = values[0], len(values)
    if not isinstance(first, Tensor) or count == 1:
        return first
    if isinstance(fact, Same):
        return _times_power(first, count, fact.power)
    if isinstance(fact, Rows):
        # Blocks of each microbatch alternate in the batch.
        blocks = [value.unflatten(fact.dim, (max(fact.blocks, 1), -1)) for value in values]
        ordered = torch.cat(blocks, fact.dim + 1).flatten(fact.dim, fact.dim + 1)
        return _times_power(ordered, count, fact.power)
    if isinstance(fact, Mean) or not first.ndim:
        is_whole = not (first.is_floating_point() or first.is_complex())
        power = fact.power if isinstance(fact, Mean) else int(is_whole)
        stacked = torch.stack(list(values))
        if is_whole and power == 1:
            return stacked.sum(0)
        return _times_power((stacked.double() if is_whole else stacked).mean(0), count, power)
    return torch.cat(list(values))


def _times_power(value: Tensor, count: int, power: int) -> Tensor:
    # Without a power integers stay integers.
    return value * float(count) ** power if power else value


@dataclass(frozen=True)
class BatchLoss:
    """The relation of the loss of a batch to the losses of its microbatches."""

    # Why it is not their mean, with or without weights. Empty if it is.
    reason: str = ""
    # Computes the loss's divisor from a microbatch's flat inputs, if the divisors differ.
    counts: Callable[..., tuple[Tensor, ...]] | None = None

    def weighted(self, microbatches: Sequence[Sequence[Any]]) -> Callable[[int, Tensor], Tensor]:
        """Return a function that weights a microbatch's loss, given its index."""
        if self.counts is None:
            return lambda index, loss: loss
        with torch.no_grad():
            counts = torch.stack([self.counts(*inputs)[0] for inputs in microbatches])
            weights = len(microbatches) * counts / counts.sum()

        def weigh(index: int, loss: Tensor) -> Tensor:
            weight = weights[index].to(loss)
            # Without targets the mean is NaN and the weight 0, or NaN if no microbatch has any.
            return torch.where(weight > 0, loss * weight, weight)

        return weigh


def batch_loss_of(
    module: nn.Module,
    program: Program,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_spec: LossSpec,
) -> BatchLoss:
    """Compare a captured module with a capture for two microbatches."""
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    sizes = [len(tensor) for tensor in tensors if tensor.ndim]
    if program.loss is None or not sizes:
        return BatchLoss()

    def doubled(leaf: Any) -> Any:
        is_divided = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == sizes[0]
        return torch.cat([leaf.detach()] * _COUNT) if is_divided else leaf

    twice_args, twice_kwargs = tree_map(doubled, (tuple(args), dict(kwargs)))
    try:
        with warnings.catch_warnings(), static_shapes():
            warnings.simplefilter("ignore")  # the first capture has raised them
            whole = capture_program(module, twice_args, twice_kwargs, loss_spec=loss_spec)
    except (RuntimeError, ValueError):
        return BatchLoss("it cannot be captured for a batch of another size")
    are_data = [True] * len(program.inputs)
    facts = compare_graph_modules(program.graph_module, whole.graph_module, _COUNT, are_data)
    return _of_facts(facts, program, program.loss)


def _of_facts(facts: BatchFacts, program: Program, position: int) -> BatchLoss:
    loss, fact = program.outputs[position], facts.outputs[position]
    if isinstance(fact, Coupled):
        return BatchLoss(fact.reason)
    if isinstance(fact, Rows):
        return BatchLoss("each sample has its own loss")
    if not isinstance(fact, Mean):
        return BatchLoss()
    above = {node.name for node in find_sources(program.graph_module.graph, [loss])}
    of_batch = [name for name in facts.of_batch if name in above]
    counted = [name for name in facts.counted if name in above]
    if of_batch or any(sum_name in above for sum_name, _ in facts.term_powers):
        what = of_batch[0] if of_batch else loss.name
        return BatchLoss(f"{what} is another number for the batch")
    if fact.power:
        return BatchLoss("it is not a mean over samples or tokens")
    if not counted:
        return BatchLoss()
    if counted != [loss.name]:
        return BatchLoss(f"{counted[0]}, a mean over the targets that count, is only a part of it")
    ours, _ = facts.counted[loss.name]
    return BatchLoss(counts=values_of_batch(program.graph_module, [ours], 1))
