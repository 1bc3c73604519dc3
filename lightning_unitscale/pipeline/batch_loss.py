"""Weights that make the losses of microbatches the loss of their batch, for a plain module.

A module's ``forward`` is captured for one microbatch, and for two of them as the batch. A mean over
classes that may not all count, such as tokens with labels of -100, gets weights. For any other loss
whose mean over microbatches is not that of the batch, the reason is reported.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_unitscale.pipeline.batch_facts import Coupled, Mean, Rows
from lightning_unitscale.pipeline.batchwise import BatchFacts, compare_graph_modules
from lightning_unitscale.pipeline.capture import capture_program, static_shapes
from lightning_unitscale.pipeline.dataflow import find_sources
from lightning_unitscale.pipeline.program import LossSpec, Program
from lightning_unitscale.pipeline.whole_batch import values_of_batch

_COUNT = 2


@dataclass(frozen=True)
class BatchLoss:
    """How the loss of a batch follows from those of its microbatches."""

    # Why it is not their mean, with or without weights; empty if it is.
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
        return BatchLoss("each sample has a loss of its own")
    if not isinstance(fact, Mean):
        return BatchLoss()
    above = {node.name for node in find_sources(program.graph_module.graph, [loss])}
    of_batch = [name for name in facts.of_batch if name in above]
    counted = [name for name in facts.counted if name in above]
    if of_batch or any(sum_name in above for sum_name, _ in facts.alignment.powers):
        what = of_batch[0] if of_batch else loss.name
        return BatchLoss(f"{what} is another number for the batch")
    if fact.power:
        return BatchLoss("it is no mean over samples or tokens")
    if not counted:
        return BatchLoss()
    if counted != [loss.name]:
        return BatchLoss(f"{counted[0]}, a mean over the targets that count, is only a part of it")
    ours, _ = facts.counted[loss.name]
    return BatchLoss(counts=values_of_batch(program.graph_module, [ours], 1))
