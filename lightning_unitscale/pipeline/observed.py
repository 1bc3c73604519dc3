"""Stages with probes, for the steps that are observed.

A graph is rewritten before it is cut, and probed after: what a probe records stays on the rank that
runs the stage. Every tensor is probed in one stage: the first that reads it, for a batch or a
buffer; the one that computes it, for a value that is relayed or recomputed. For a parameter of
several stages the parts of its gradient are kept, microbatch by microbatch, and added up on the
rank of the first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lightning_unitscale.capture.compiled_graph import Variant
from lightning_unitscale.dynamo.executors import execute_with
from lightning_unitscale.dynamo.graphs import copy_graph_module
from lightning_unitscale.graph.nodes import ELSEWHERE, tensor_name
from lightning_unitscale.graph.passes import GraphPass, Phase, StepGraph
from lightning_unitscale.graph.recorder import tap_gradient
from lightning_unitscale.pipeline.pipe import Pipe
from lightning_unitscale.pipeline.stage import StageModule


class ObservedStages:
    """Variants of a rank's stages with the probes of all passes.

    Attributes:
        run: What runs in the place of each of this rank's stages.
    """

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
        self._parts: dict[tuple[str, int], list[_GradientPart]] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self.run: dict[int, Callable[..., Any]] = {}
        seen: set[str] = set()
        for index, stage in enumerate(pipe.stages):
            if rank_of(index) == self._rank:
                self.run[index] = self._observed(index, stage, step_graph, seen)
            seen |= {tensor_name(node) for node in stage.graph.nodes if _is_read(node)}

    def begin(self) -> None:
        """Before a step."""
        for parts in self._parts.values():
            parts.clear()

    def finish(self) -> None:
        """After a step, on every rank: hand the passes the gradients of shared parameters."""
        for name, stages in self._shared.items():
            first = self._rank_of(stages[0])
            # As autograd adds them up: the last use first.
            for stage in reversed(stages):
                if self._rank_of(stage) != first:
                    self._bring(name, stage, first)
            if first == self._rank:
                self._tell(name, stages)
        self.begin()

    def _observed(
        self, index: int, stage: StageModule, step_graph: StepGraph, seen: set[str]
    ) -> Callable[..., Any]:
        copy = copy_graph_module(stage)
        for node in copy.graph.nodes:
            if _is_read(node) and tensor_name(node) in seen:
                node.meta[ELSEWHERE] = True
            if node.op == "get_attr" and tensor_name(node) in self._shared:
                parts = self._parts[tensor_name(node), index] = []
                self._parameters[tensor_name(node)] = stage.get_parameter(str(node.target))
                _keep_gradient(copy.graph, node, parts)
        graph = StepGraph(copy, observed=True, step=step_graph.step)
        graph.notes.update(step_graph.notes)
        for graph_pass in self._passes:
            graph_pass.observe_part(graph)
        graph.finish()
        return Variant(graph, execute_with("eager", graph.graph_module, ()))

    def _bring(self, name: str, stage: int, first: int) -> None:
        """Send a stage's parts to the first stage's rank."""
        owner = self._rank_of(stage)
        if self._rank not in (owner, first):
            return
        if self._rank == owner:
            gradients = [
                part.gradient if part.gradient is None else part.gradient.cpu()
                for part in self._parts[name, stage]
            ]
            dist.send_object_list([gradients], group=self._group, group_dst=first)
            return
        received: list[Any] = [None]
        dist.recv_object_list(received, group=self._group, group_src=owner)
        device = self._parameters[name].device
        self._parts[name, stage] = [
            _GradientPart(gradient if gradient is None else gradient.to(device))
            for gradient in received[0]
        ]

    def _tell(self, name: str, stages: tuple[int, ...]) -> None:
        for parts in zip(*(self._parts[name, stage] for stage in reversed(stages)), strict=True):
            total: Tensor | None = None
            for part in parts:
                if part.gradient is not None:
                    total = part.gradient if total is None else total + part.gradient
            for graph_pass in self._passes:
                graph_pass.see_shared(name, self._parameters[name].detach(), total)


@dataclass
class _GradientPart:
    """One stage's part of the gradient of a parameter, for one microbatch."""

    gradient: Tensor | None = None


def _keep_gradient(graph: fx.Graph, node: fx.Node, parts: list[_GradientPart]) -> None:
    def keep(tensor: Tensor) -> Tensor:
        part = _GradientPart()
        parts.append(part)

        def see(gradient: Tensor) -> None:
            # Dense, and a copy: autograd may add to the tensor that it hands on.
            dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
            part.gradient = dense.clone()

        return tap_gradient(tensor, None, see)

    with graph.inserting_after(node):
        kept = graph.call_function(keep, (node,))
    kept.meta.update(node.meta)
    node.meta[ELSEWHERE] = kept.meta[ELSEWHERE] = True
    node.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not kept)


def _is_read(node: fx.Node) -> bool:
    """Whether the node is an input of the call, or an attribute."""
    return node.op in {"placeholder", "get_attr"} and ELSEWHERE not in node.meta
