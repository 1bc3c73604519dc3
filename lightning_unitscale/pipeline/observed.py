"""Probe the stages of observed steps.

A graph is rewritten before it is cut and probed afterwards. So the records of a probe stay on the
rank that runs the stage. Every tensor is probed in one stage. For a batch or a buffer it is the
first stage that reads it, for other values the stage that computes it. If several stages use a
parameter, the parts of its gradient are kept per microbatch. The rank of the first stage adds them
up.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from lightning_unitscale.capture.compiled_graph import Variant
from lightning_unitscale.capture.copy_graphs import copy_graph_module
from lightning_unitscale.capture.executors import execute_with
from lightning_unitscale.capture.graph_nodes import ELSEWHERE, tensor_name
from lightning_unitscale.capture.graph_recorder import tap_gradient
from lightning_unitscale.capture.passes import GraphPass, Phase, StepGraph
from lightning_unitscale.loops.ranks import gathered_on
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.stage import StageModule


class ObservedStages:
    """Variants of a rank's stages with the probes of all passes."""

    def __init__(
        self,
        pipe: Pipe,
        step_graph: StepGraph,
        passes: Sequence[GraphPass],
        rank_of: Callable[[int], int],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._passes = [graph_pass for graph_pass in passes if graph_pass.phase is Phase.OBSERVE]
        self._rank_of = rank_of
        self._group = group
        self._rank = dist.get_rank(group)
        wanted = frozenset[str]().union(
            *(graph_pass.before_cut(step_graph) for graph_pass in self._passes)
        )
        trainable = {name for name, param in pipe.named_parameters() if param.requires_grad}
        shared = pipe.shared_parameters()
        self._shared = {name: shared[name] for name in sorted(wanted & trainable & shared.keys())}
        # The gradients of shared parameters in this rank's stages, one per microbatch.
        self._parts: dict[tuple[str, int], list[Tensor | None]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        # The functions that replace this rank's stages.
        self.run: dict[int, Callable[..., Any]] = {}
        seen: set[str] = set()
        for index, stage in enumerate(pipe.stages):
            if rank_of(index) == self._rank:
                self.run[index] = self._observed(index, stage, step_graph, seen)
            seen |= {tensor_name(node) for node in stage.graph.nodes if _is_read(node)}

    def begin(self) -> None:
        """Drop the gradients of the last step before a new one."""
        for parts in self._parts.values():
            parts.clear()

    def finish(self) -> None:
        """Pass the gradients of shared parameters to the passes after a step. All ranks call it."""
        for name, stages in self._shared.items():
            own = {stage: parts for (key, stage), parts in self._parts.items() if key == name}
            on_cpu = tree_map_only(Tensor, lambda gradient: gradient.cpu(), own)
            gathered = gathered_on(self._rank_of(stages[0]), on_cpu, self._group)
            if gathered is not None:
                parts = {stage: own for each in gathered for stage, own in each.items()}
                # In autograd's order of addition: the last use first.
                self._show(name, [parts[stage] for stage in reversed(stages)])
        self.begin()

    def _observed(
        self, index: int, stage: StageModule, step_graph: StepGraph, seen: set[str]
    ) -> Callable[..., Any]:
        copy = copy_graph_module(stage)
        for node in copy.graph.nodes:
            name = tensor_name(node)
            if _is_read(node) and name in seen:
                node.meta[ELSEWHERE] = True
            if node.op == "get_attr" and name in self._shared:
                self._parameters[name] = stage.get_parameter(str(node.target))
                parts = self._parts[name, index] = []
                _keep_gradient(copy.graph, node, parts)
        graph = StepGraph(copy, observed=True, step=step_graph.step)
        graph.notes.update(step_graph.notes)
        for graph_pass in self._passes:
            graph_pass.observe_part(graph)
        graph.finish()
        return Variant(graph, execute_with("eager", graph.graph_module, ()))

    def _show(self, name: str, parts: Sequence[Sequence[Tensor | None]]) -> None:
        """Add up the parts of a gradient for each microbatch, and pass it to the passes."""
        parameter = self._parameters[name].detach()
        for of_microbatch in zip(*parts, strict=True):
            present = [part.to(parameter.device) for part in of_microbatch if part is not None]
            total = functools.reduce(operator.add, present) if present else None
            for graph_pass in self._passes:
                graph_pass.see_shared(name, parameter, total)


def _keep_gradient(graph: fx.Graph, node: fx.Node, parts: list[Tensor | None]) -> None:
    def keep(tensor: Tensor) -> Tensor:
        index = len(parts)
        parts.append(None)

        def see(gradient: Tensor) -> None:
            # A dense copy, because autograd may add to the tensor that it passes on.
            dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
            parts[index] = dense.clone()

        return tap_gradient(tensor, None, see)

    with graph.inserting_after(node):
        kept = graph.call_function(keep, (node,))
    kept.meta.update(node.meta)
    node.meta[ELSEWHERE] = kept.meta[ELSEWHERE] = True
    node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _is_read(node: fx.Node) -> bool:
    """Check whether a node is an input of the call or an attribute."""
    return node.op in {"placeholder", "get_attr"} and ELSEWHERE not in node.meta
