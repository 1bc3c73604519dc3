"""Round matmuls that the user compiles: replace them by operators that act as eager kernels do.

Each run decides whether a matmul runs in a format, and in which units. So these decisions need no
recompilation. A graph begins with one operator that finds the session and returns the number of the
run. The number is saved for the backward pass. By it a backward matmul finds its forward run, with
its units, its step and its random numbers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import register_flop_formula

from lightning_unitscale.capture.graph_nodes import first_operation
from lightning_unitscale.capture.operators import MatmulRule
from lightning_unitscale.compiling import define_operator
from lightning_unitscale.matmuls.calls import CALLS, Call, record
from lightning_unitscale.matmuls.compiled_fp8 import (
    OUTSIDE,
    FP8Layers,
    Layer,
    empty_numbers,
    layer_of,
    modes_of,
    numbers_of,
)
from lightning_unitscale.matmuls.compiled_runs import GraphMatmul, GraphRun, GraphRuns, note_caller
from lightning_unitscale.matmuls.compiler_internals import InductorPass, guard_by, note_strides
from lightning_unitscale.matmuls.fp8_linear import Mode, is_weight
from lightning_unitscale.matmuls.joint_graphs import (
    ARRANGED,
    CAST,
    RECOMPUTE,
    JointMatmuls,
    arrangements,
    identity_of,
    matmul_rule_of,
    value_of,
)
from lightning_unitscale.matmuls.owners import running_session
from lightning_unitscale.matmuls.session import MatmulSession, run_inside
from lightning_unitscale.matmuls.torch_internals import Kernel, plain_functions

_MAX_BEGUN = 2**6  # limits the runs that go on, one in a thread
# The number of a run that belongs to no session.
_NOBODY = 0
_OURS = torch.ops.lightning_unitscale


@dataclass(frozen=True)
class Changing:
    """A stand-in for a tensor or a number among the arguments of a matmul."""

    index: int  # among the tensors, and the numbers that follow them


@dataclass(eq=False)
class RoundedMatmul(GraphMatmul):
    """A matmul of a compiled graph, forward or backward."""

    operator: Kernel  # of its rule, as torch calls it
    args: tuple[Any, ...]  # with :class:`Changing` in place of tensors and numbers
    kwargs: dict[str, Any]
    # Positions of its results that are tensors; ``None`` for a single result.
    results: tuple[int, ...] | None
    is_weight: bool = False  # its second operand is made of a parameter of its layer
    input: int | None = None  # the input of the graph that this operand is an arrangement of

    def arguments(
        self, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one run."""
        values = (*tensors, *sizes)
        return pytree.tree_map(
            lambda leaf: values[leaf.index] if isinstance(leaf, Changing) else leaf,
            (self.args, self.kwargs),
        )

    def listed(self, result: Any) -> list[Tensor]:
        """Return the tensors of its result."""
        return [result] if self.results is None else [result[index] for index in self.results]


class RoundedGraph(GraphRuns):
    """The matmuls of one compiled graph, forward and backward."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.matmuls: list[RoundedMatmul] = []
        # The latest runs, since another thread may run the graph meanwhile.
        self._begun: dict[int, GraphRun] = {}
        self._are_parameters: tuple[bool, ...] = ()
        self._has_backward = False
        self.layers: dict[int, Layer] = {}  # by the number of a forward matmul
        self.modes: dict[int, Mode] = {}  # how the layers run that this graph casts itself

    def add(self, matmul: RoundedMatmul) -> None:
        """Append a matmul."""
        self.add_names(matmul)
        self._has_backward |= matmul.is_backward
        self.matmuls.append(matmul)

    def modes_now(self) -> dict[int, Mode]:
        """Return how its layers would run in FP8 in a run that began now."""
        return modes_of(self.layers, self.sites_ahead(self.layers))

    def begin(self, inputs: Sequence[Tensor]) -> int:
        """Begin a run, and return its number; ``_NOBODY`` if it belongs to no session."""
        note_caller()
        run = self.begin_run()
        if run is None:
            return _NOBODY
        self._are_parameters = tuple(isinstance(tensor, nn.Parameter) for tensor in inputs)
        if len(self._begun) >= _MAX_BEGUN:
            del self._begun[next(iter(self._begun))]
        self._begun[run.number] = run
        session = run.session()
        if self.modes and session is not None and session.counter is not None:
            for matmul in self.matmuls:
                if matmul.forward in self.modes:
                    module = run.sites[matmul.forward].module
                    session.counter.add(module, "format", "", matmul.flops)
        return run.number

    def numbers(self, run: int, device: torch.device) -> list[Tensor]:
        """Return the factors and scales of its layers in FP8, in a run."""
        begun = self._begun.get(run)
        session = None if begun is None else begun.session()
        if begun is None or session is None or not session.is_open:
            raise RuntimeError(OUTSIDE)
        return numbers_of(session, [begun.sites[number] for number in self.modes], device)

    def run(
        self, index: int, run: int, tensors: Sequence[Tensor], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Run a matmul."""
        matmul = self.matmuls[index]
        if matmul.is_backward:
            note_caller()
        args, kwargs = matmul.arguments(tensors, sizes)
        with plain_functions():
            return matmul.listed(self._run(matmul, run, args, kwargs))

    def _run(
        self, matmul: RoundedMatmul, run: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not matmul.rule.multiplies(args, kwargs):
            return run_inside(matmul.operator, *args, **kwargs)
        number = run + matmul.forward
        recorded, begun = CALLS.get(number), self._begun.get(run)
        session = None
        if recorded is not None:
            session = recorded[0]()
        elif begun is not None and not matmul.is_backward:
            session = begun.session()
        if session is None or not session.is_open:
            return run_inside(matmul.operator, *args, **kwargs)
        if matmul.is_backward and recorded is not None:
            run_as = session.backward_matmul(matmul.rule, args, recorded[1], matmul.sources)
        elif recorded is not None:
            # A checkpoint recomputes it.
            run_as = recorded[1].matmul
        else:
            assert begun is not None, "a session was found by it"
            site = begun.sites[matmul.number]
            run_as, extents = session.forward_matmul(matmul.rule, site, args)
            if self._has_backward:  # there is a backward graph
                record(number, session.ref, Call(run_as, extents=extents))
        run_as.reads_weight = matmul.is_weight
        if matmul.input is not None:
            run_as.reads_weight = matmul.is_weight or self._are_parameters[matmul.input]
        return session.execute(run_as, matmul.operator, args, kwargs)


GRAPHS: list[RoundedGraph] = []


def _fake_matmul(
    tensors: Sequence[Tensor], sizes: Sequence[int], run: Tensor, graph: int, matmul: int
) -> list[Tensor]:
    rounded = GRAPHS[graph].matmuls[matmul]
    args, kwargs = rounded.arguments(tensors, sizes)
    return rounded.listed(rounded.operator(*args, **kwargs))


define_operator(
    "begin(Tensor[] inputs, int graph) -> Tensor",
    lambda inputs, graph: torch.tensor(GRAPHS[graph].begin(inputs), dtype=torch.int64),
    lambda inputs, graph: torch.empty((), dtype=torch.int64),
    torch.Tag.cudagraph_unsafe,
    torch.Tag.flexible_layout,
)
define_operator(
    "fp8_numbers(Tensor run, Device device, int graph) -> Tensor[]",
    lambda run, device, graph: GRAPHS[graph].numbers(int(run), device),
    lambda run, device, graph: empty_numbers(len(GRAPHS[graph].modes), device),
    torch.Tag.cudagraph_unsafe,
    torch.Tag.flexible_layout,
)
define_operator(
    "matmul(Tensor[] tensors, SymInt[] sizes, Tensor run, int graph, int matmul) -> Tensor[]",
    lambda tensors, sizes, run, graph, matmul: GRAPHS[graph].run(matmul, int(run), tensors, sizes),
    _fake_matmul,
    # BLAS may sum in another order for another stride.
    torch.Tag.cudagraph_unsafe,
    torch.Tag.needs_exact_strides,
)
# For a plan, recomputing it costs as much as the matmul itself.
register_flop_formula(_OURS.matmul)(
    lambda tensors, sizes, run, graph, matmul, out_val: GRAPHS[graph].matmuls[matmul].flops
)


def _round(graph: fx.Graph) -> None:
    """Round the matmuls of a graph, if it is compiled in a step whose matmuls are rounded."""
    session = running_session()
    if session is not None and session.numerics:
        FormatsInGraph(graph, session).run()


PASS = InductorPass("joint_custom_pre_pass", _round, identity_of)


class FormatsInGraph:
    """The rounding of one graph's matmuls, before Inductor fuses any of them."""

    def __init__(self, graph: fx.Graph, session: MatmulSession, *, is_fused: bool = True) -> None:
        self._graph = graph
        self._session = session
        self._is_fused = is_fused
        self._matmuls = JointMatmuls(graph, session, guesses=False)
        self._compiled = RoundedGraph(self._matmuls.root)
        self._index = len(GRAPHS)
        self._inputs: list[fx.Node] = []

    def run(self) -> None:
        """Rewrite the graph."""
        found = [
            (node, rule)
            for node in self._graph.nodes
            if (rule := matmul_rule_of(node)) is not None and _can_move(node)
        ]
        if not found:
            return
        matmuls = self._compiled.matmuls
        for node, rule in found:
            self._compiled.add(self._matmul(rule, node))
        GRAPHS.append(self._compiled)
        nodes = [node for node, _ in found]
        if self._is_fused:
            self._find_layers(nodes)
        modes, layers = self._compiled.modes, FP8Layers(self._graph, self._matmuls.after_tangents)
        with self._graph.inserting_before(first_operation(self._graph)):
            begin = layers.new(_OURS.begin.default, self._inputs, self._index)
            # Recomputed in the backward graph, it would be another run.
            kept = [begin]
            if modes:
                device = next(iter(self._compiled.layers.values())).weight.device
                kept.append(layers.new(_OURS.fp8_numbers.default, begin, device, self._index))
                for position, number in enumerate(modes):
                    kept.append(layers.new(operator.getitem, kept[1], position))
                    layers.numbers[number] = kept[-1]
            for node in kept:
                node.meta[RECOMPUTE] = CheckpointPolicy.MUST_SAVE
        for index, (node, matmul) in enumerate(zip(nodes, matmuls, strict=True)):
            if (mode := modes.get(matmul.forward)) is None:
                self._replace(index, node, matmul, begin)
            else:
                layers.replace(node, matmul, mode)
        layers.finish()

    def _find_layers(self, nodes: Sequence[fx.Node]) -> None:
        """Choose the layers that the graph casts itself while the guard holds."""
        compiled, families = self._compiled, defaultdict[int, list[Any]](list)
        for matmul, node in zip(compiled.matmuls, nodes, strict=True):
            families[matmul.forward].append((matmul, node))
        for number, ((forward, node), *backward) in families.items():
            is_forward = node not in self._matmuls.after_tangents
            if is_forward and forward.is_weight and (layer := layer_of(forward, node, backward)):
                compiled.layers[number] = layer
        modes = compiled.modes_now()
        text = "FP8 layers of lightning_unitscale are those that were compiled"
        if compiled.layers and guard_by(lambda: compiled.modes_now() == modes, text):
            compiled.modes = modes

    def _matmul(self, rule: MatmulRule, node: fx.Node) -> RoundedMatmul:
        """Describe a matmul before it runs."""
        value, operands = value_of(node), rule.operands_in(node.args)
        results = None
        if not isinstance(value, Tensor):
            results = tuple(k for k, item in enumerate(value) if isinstance(item, Tensor))
        matmul = self._matmuls.describe(node, rule, len(self._compiled.matmuls))
        tensors, sizes = _reads(node)
        changing: dict[fx.Node, Any]
        changing = {read: Changing(index) for index, read in enumerate([*tensors, *sizes])}
        args, kwargs = fx.map_arg((node.args, node.kwargs), changing.__getitem__)
        operation: Any = node.target
        matmul = RoundedMatmul(
            **vars(matmul), operator=operation, args=args, kwargs=kwargs, results=results
        )
        if len(operands) == 2 and not matmul.is_backward:
            self._look_for_weight(matmul, operands[1])
        return matmul

    def _look_for_weight(self, matmul: RoundedMatmul, node: fx.Node) -> None:
        """Find out whether the second operand of a matmul is a weight or an input."""
        module = self._session.sites.module
        layer = None if module is None else module.get_submodule(matmul.matmul_names.path)
        matmul.is_weight = is_weight(matmul.matmul_names.word, value_of(node), layer)
        for source in arrangements(node):
            if source.op == "placeholder" and not matmul.is_weight:
                if source not in self._inputs:
                    self._inputs.append(source)
                matmul.input = self._inputs.index(source)
            if str(source.target) not in ARRANGED | {CAST}:
                break

    def _replace(self, index: int, node: fx.Node, matmul: RoundedMatmul, begin: fx.Node) -> None:
        with self._graph.inserting_before(node):
            new = self._graph.call_function(
                _OURS.matmul.default, (*_reads(node), begin, self._index, index)
            )
            new.meta = dict(node.meta)
            new.meta["val"] = matmul.listed(value_of(node))
            note_strides(new, fx.map_arg(new.args, value_of))
            if node in self._matmuls.after_tangents:
                self._matmuls.after_tangents.add(new)
            if matmul.results is None:
                node.replace_all_uses_with(self._item(new, 0, node))
        for user in list(node.users):
            with self._graph.inserting_before(user):
                assert matmul.results is not None
                item = self._item(new, matmul.results.index(user.args[1]), user)
            user.replace_all_uses_with(item)
            self._graph.erase_node(user)
        self._graph.erase_node(node)

    def _item(self, results: fx.Node, index: int, like: fx.Node) -> fx.Node:
        item = self._graph.call_function(operator.getitem, (results, index))
        item.meta = dict(like.meta)
        return item


def _can_move(node: fx.Node) -> bool:
    """Check whether an operator can take a matmul's arguments and return its results."""
    values = map(value_of, node.all_input_nodes)
    if not all(isinstance(value, (Tensor, int, torch.SymInt)) for value in values):
        return False
    if isinstance(value_of(node), Tensor):
        return True
    return all(
        user.target is operator.getitem and isinstance(user.meta.get("val"), Tensor)
        for user in node.users
    )


def _reads(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the tensors and the numbers that a node reads."""
    reads = node.all_input_nodes
    tensors = [read for read in reads if isinstance(value_of(read), Tensor)]
    return tensors, [read for read in reads if read not in tensors]
