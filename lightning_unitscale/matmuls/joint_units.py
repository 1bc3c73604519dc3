"""Scale matmuls that the user compiles, in AOTAutograd's joint graph of both passes.

Compiled code does not call kernels from the module's own frames. So the matmuls of a module that
the user gave to ``torch.compile`` are scaled in its graphs. The partitioner saves a scaled copy in
place of its source if both passes read it, and saves the factors. So a backward pass has those of
its forward pass. On a CPU a gradient is written only scaled if its other readers are fused.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from lightning_unitscale.capture.graph_nodes import first_operation
from lightning_unitscale.capture.operators import UNREACHED, MatmulRule
from lightning_unitscale.compiling import compiles_frame
from lightning_unitscale.matmuls.compiled_graphs import GRAPHS, CompiledGraph
from lightning_unitscale.matmuls.compiled_runs import CompiledMatmul, PlainMatmul
from lightning_unitscale.matmuls.compiler_internals import InductorPass, note_compiled
from lightning_unitscale.matmuls.joint_graphs import (
    ARRANGED,
    CHECKPOINT,
    CONVERT,
    MATMUL,
    RECOMPUTE,
    JointMatmuls,
    NewNodes,
    arranged,
    flops_of,
    identity_of,
    matmul_rule_of,
    tangents_of,
    value_of,
)
from lightning_unitscale.matmuls.session import SESSION, MatmulSession
from lightning_unitscale.memory.costs import concrete

_ATEN = torch.ops.aten
_OURS = torch.ops.lightning_unitscale
_UNREACHED = {
    f"aten.{rule.operator}" + ("" if "." in rule.operator else ".default"): rule
    for rule in UNREACHED
}
# The reason for matmuls that formats cannot move, because of a number known only at run time.
_NUMBER = "a number among its arguments that is known only when it runs, in a compiled graph"
# Its strides fit either layout. Inductor decides by whether its input is saved for the backward
# pass, and a scaled copy is not.
_ONE_CHANNEL = "a convolution of one channel, whose layout Inductor chooses, in a compiled graph"
_Factor = tuple[fx.Node, int]
# The name of a unit within a graph: the forward matmul, and its operand or ``None`` (gradient).
_Name = tuple[int, int | None]


def _give_units(graph: fx.Graph) -> None:
    """Scale the matmuls of a graph that is compiled in a step of a session."""
    session = SESSION.get()
    if session is not None and compiles_frame():
        note_compiled()
        UnitsInGraph(graph, session).run()


PASS = InductorPass("joint_custom_post_pass", _give_units, identity_of)


class UnitsInGraph:
    """The scaling of the matmuls of one graph."""

    def __init__(self, graph: fx.Graph, session: MatmulSession, *, is_fused: bool = True) -> None:
        self._graph = graph
        self._session = session
        self._is_fused = is_fused
        self._matmuls = JointMatmuls(graph, session, guesses=True)
        code = hashlib.sha256(f"{is_fused} {graph}".encode()).hexdigest()
        self._compiled = CompiledGraph(self._matmuls.root, code)

    def run(self) -> None:
        """Rewrite the graph."""
        found: dict[fx.Node, int] = {}
        left: dict[fx.Node, int] = {}
        for node in list(self._graph.nodes):
            rule, unreached = matmul_rule_of(node), _UNREACHED.get(str(node.target))
            number = len(self._compiled.matmuls)
            has_one = self._is_fused and rule is not None and _reads_one_channel(rule, node)
            if rule is not None and not (self._session.numerics or has_one):
                matmul = self._matmuls.describe(node, rule, number)
                dtype = value_of(rule.operands_in(node.args)[0]).dtype
                self._compiled.add(CompiledMatmul(**vars(matmul), dtype=dtype))
                found[node] = number
            elif node.op == "call_function" and (plain := rule or unreached) is not None:
                reason = _ONE_CHANNEL if has_one else _NUMBER
                reason = reason if unreached is None else unreached.reason
                path, flops = self._matmuls.path_of(node), flops_of(plain, node)
                self._compiled.add(PlainMatmul(str(node.target), path, reason, flops))
                left[node] = number
        if not self._compiled.matmuls:
            return
        key, text = self._compiled.description
        # Another thread, or this one before a reset of Dynamo, may have compiled the same graph.
        matmuls: Any = GRAPHS.setdefault(key, self._compiled).matmuls
        for node, number in (found | left).items():
            node.meta[MATMUL] = key, number
        if found:
            self._rewrite([(node, matmuls[number]) for node, number in found.items()], key, text)

    def _rewrite(self, found: list[tuple[fx.Node, CompiledMatmul]], key: int, text: str) -> None:
        device = value_of(found[0][1].rule.operands_in(found[0][0].args)[0]).device
        in_units = {
            node
            for node, matmul in found
            if not (self._is_fused and _may_join_a_sum(node, matmul.rule))
        }
        # One for each pass. The backward pass reads copies that the forward pass has made.
        forward = Scaling(self._graph)
        fused = in_units if self._is_fused else ()
        backward = Scaling(self._graph, forward.copies, fused)
        tangents = [n for n in tangents_of(self._graph) if isinstance(value_of(n), Tensor)]
        with self._graph.inserting_before(first_operation(self._graph)):
            factors = forward.new(_OURS.compiled_factors.default, key, text, device, False)
            # Recomputed in the backward graph, they would be the factors of another run.
            factors.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
            parts_of = _OURS.parts_of_factors.default
            forward.parts = forward.new(parts_of, factors, None, key)
            if tangents:
                backward.parts = backward.new(parts_of, factors, tangents[0], key)
        for node, matmul in found:
            matmul.is_scaled = node in in_units
            if matmul.is_scaled:
                scaling = backward if node in self._matmuls.after_tangents else forward
                scaling.scale(node, matmul.rule, matmul)


def _reads_one_channel(rule: MatmulRule, node: fx.Node) -> bool:
    """Check for a convolution of images with one channel, or its backward matmul."""
    if not rule.operator.startswith("convolution"):
        return False
    # The gradient is the first argument, also if the input is not read.
    shape = value_of(node.args[1 if rule.sources else 0]).shape
    return len(shape) == 4 and shape[1] == 1


def _may_join_a_sum(node: fx.Node, rule: MatmulRule) -> bool:
    """Check whether Inductor may fuse a matmul and a sum, as it does without units."""
    # It decides later, in the forward and the backward graph (``aot_pass.py``).
    if rule.operator != "mm":
        return False
    return any(getattr(user.target, "overloadpacket", None) is _ATEN.add for user in node.users)


class Scaling(NewNodes):
    """Adds nodes to a graph that divide operands by units, and multiply results by them."""

    def __init__(
        self, graph: fx.Graph, copies: Any = None, in_units: Collection[fx.Node] = ()
    ) -> None:
        super().__init__(graph)
        self.parts: Any = None  # the node that gives the parts of the factors
        self._read_parts: dict[int, fx.Node] = {}  # by their number, the nodes that read one
        # By their source, and by the name of the unit.
        self.copies: dict[tuple[fx.Node, _Name | None], fx.Node] = {} if copies is None else copies
        self._of_inputs: dict[tuple[fx.Node, _Name | None], fx.Node] = {}
        self._in_units = in_units

    def _factor_of(self, matmul: CompiledMatmul, index: int) -> _Factor:
        number = matmul.part
        if number not in self._read_parts:
            with self._graph.inserting_after(self.parts):
                self._read_parts[number] = self.new(operator.getitem, self.parts, number)
        return self._read_parts[number], matmul.offset + index

    def scale(self, node: fx.Node, rule: MatmulRule, matmul: CompiledMatmul) -> None:
        """Scale a matmul."""
        args = list(node.args)
        names = matmul.names
        factor_of = functools.partial(self._factor_of, matmul)
        with self._graph.inserting_before(node):
            for index, position in enumerate(rule.operands):
                if not matmul.stays(index):
                    is_gradient = matmul.sources[index] is None
                    back = factor_of(matmul.num_factors - 1) if is_gradient else None
                    args[position] = self._scaled(
                        args[position], factor_of(index), node, names[index], back
                    )
            for position, index in rule.taking_factors(args):
                name = names[index] if index < len(names) else None
                args[position] = self._scaled(args[position], factor_of(index), node, name)
        node.args = tuple(args)
        results: list[tuple[Any, fx.Node]] = [(0, node)]
        if not isinstance(value_of(node), Tensor):
            results = [(user.args[1], user) for user in node.users]
        for index, result in results:
            if index < len(rule.results) and (powers := rule.results[index]) is not None:
                factor = factor_of(len(names) + 1 + index)
                (scaled,) = self._read_through(result, [factor], result.meta)
                if 1 in powers and powers.count(0) == len(powers) - 1:
                    # The operator's own result is the copy in that operand's unit.
                    self.copies[scaled, names[powers.index(1)]] = result

    def _read_through(
        self, node: fx.Node, factors: Sequence[_Factor], meta: dict[str, Any]
    ) -> list[fx.Node]:
        """Multiply a node by factors, one after the other, for all its readers."""
        users, scaled = list(node.users), [node]
        with self._graph.inserting_before(node.next):
            for factor in factors:
                scaled.append(self._times(scaled[-1], factor, meta))
        for user in users:
            user.replace_input_with(node, scaled[-1])
        return scaled[1:]

    def _scaled(
        self,
        node: Any,
        factor: _Factor,
        matmul: fx.Node,
        name: _Name | None = None,
        back: _Factor | None = None,
    ) -> fx.Node:
        """Multiply a tensor by a factor, in the same arrangement."""
        chain = list(arranged(node))
        copies = self._of_inputs if chain[-1].op == "placeholder" else self.copies
        # Inductor would write a copy of a permuted tensor twice: in order, and permuted.
        in_order = [k for k, node in enumerate(chain) if concrete(value_of(node)).is_contiguous()]
        *chain, node = chain[: max(in_order, default=len(chain)) + 1]
        result = copies.get((node, name)) if name is not None else None
        if result is None:
            meta = dict(matmul.meta)
            if RECOMPUTE in meta:
                # Also if a policy saves the matmul itself.
                meta[RECOMPUTE] = CheckpointPolicy.PREFER_RECOMPUTE
            if back is not None and copies is self.copies and self._may_stand_for(node):
                # Written once, as without units. If elements would be lost in its unit, its
                # matmuls run unscaled, and the factor is 1.
                result, gradient = self._read_through(node, [factor, back], meta)
                copies[gradient, name] = result
            else:
                result = self._times(node, factor, meta)
        if name is not None:
            copies[node, name] = result
        for view in reversed(chain):
            result = self.new(view.target, result, *view.args[1:], **view.kwargs)
        return result

    def _may_stand_for(self, node: fx.Node) -> bool:
        """Check whether a tensor's readers may read it from a scaled copy, fused and exact."""
        if not self._in_units:
            return False
        value = value_of(node)
        is_exact = value.dtype in (torch.float32, torch.float64)
        # A GPU may add a matmul that it has not rounded, but not with a scaling in between.
        is_rounded = value.device.type == "cpu"
        return is_exact and is_rounded and all(map(self._is_fused, node.users))

    def _is_fused(self, node: fx.Node) -> bool:
        if str(node.target) in ARRANGED:
            return all(map(self._is_fused, node.users))
        tags = getattr(node.target, "tags", ())
        is_sum = node.target is _ATEN.sum.dim_IntList
        return node in self._in_units or is_sum or torch.Tag.pointwise in tags

    def _times(self, node: fx.Node, factor: _Factor, meta: dict[str, Any]) -> fx.Node:
        number = self.new(_ATEN.select.int, factor[0], 0, factor[1])
        dtype = value_of(node).dtype
        if dtype is not torch.float16:
            nodes = [self.new(_ATEN.mul.Tensor, node, number)]
        else:
            # FP16 cannot represent all FP32 factors.
            nodes = [self.new(CONVERT, node, torch.float32)]
            nodes.append(self.new(_ATEN.mul.Tensor, nodes[-1], number))
            nodes.append(self.new(CONVERT, nodes[-1], dtype))
        for new in nodes:
            new.meta.update({k: meta[k] for k in (RECOMPUTE, CHECKPOINT) if k in meta})
        return nodes[-1]
