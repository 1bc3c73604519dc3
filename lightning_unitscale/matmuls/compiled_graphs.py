"""Supply scale factors to the graphs that Inductor compiled with scaled matmuls.

An operator without inputs returns a graph's factors in one tensor in each run. Inductor cannot
fold it, and new units need no recompilation. The tensor is saved for the backward pass, because
some of its operands were divided by the units of the forward pass.

Inductor caches compiled code on disk. So the first operator of each run contains the description
of the graph's matmuls, from which another process makes the graph's object.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lightning_unitscale.capture.operators import COMPILED_BEFORE
from lightning_unitscale.compiling import define_operator
from lightning_unitscale.matmuls.compiled_runs import (
    CompiledMatmul,
    GraphRun,
    GraphRuns,
    LookedAt,
    PlainMatmul,
    block_of,
    matmul_of,
    note_caller,
    row_of,
)
from lightning_unitscale.matmuls.coverage import Kind
from lightning_unitscale.matmuls.measurement import Extent
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.matmuls.torch_internals import current_node
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.transfer import numbers_on


@dataclass(eq=False)
class _UnitFactors:
    """The factors of a graph for the units of some sites."""

    exponents: list[int]
    known: list[tuple[Any, ...]] = field(default_factory=list)  # the units behind them
    are_all_known: bool = False  # no operand is still to be measured
    # By device: the factors, and their exponents.
    written: dict[torch.device, tuple[Tensor, list[int]]] = field(default_factory=dict)

    def on(self, device: torch.device) -> Tensor:
        """Return the factors, FP32 of shape ``(factors,)``, at a fixed address of each device."""
        factors, exponents = self.written.get(device, (None, None))
        if factors is None or exponents != self.exponents:
            # An evaluation may come first, and training cannot write into inference tensors.
            with torch.inference_mode(False):
                values = numbers_on(device, [2.0**e for e in self.exponents], torch.float32)
                factors = values if factors is None else factors.copy_(values)
            self.written[device] = factors, self.exponents
        return factors


class _Now(threading.local):
    """This thread's run of a graph: its factors, and the operators that began it."""

    def __init__(self) -> None:
        self.run: GraphRun | None = None
        self.factors = _UnitFactors([])
        self.operators: set[str] = set()


class CompiledGraph(GraphRuns):
    """The matmuls of one compiled graph and their factors."""

    def __init__(self, root: str, code: str = "") -> None:
        super().__init__(root)
        self._code = code  # of the graph, by which graphs with equal matmuls differ
        self.matmuls: list[CompiledMatmul | PlainMatmul] = []
        self.num_factors = 0
        # Consecutive matmuls of a block read their factors from one part of them.
        self._part_sizes: list[int] = []
        self._block: str | None = None  # of the last matmul
        # The matmuls that are measured together, by their text.
        self.looks: dict[str, tuple[LookedAt, ...]] = {}
        # By the sites of a session, since several blocks of a model may share the graph.
        self._factors: WeakKeyDictionary[MatmulSession, dict[tuple[int, ...], _UnitFactors]]
        self._factors = WeakKeyDictionary()
        self._ones = _UnitFactors([])
        self._now = _Now()

    def add(self, matmul: CompiledMatmul | PlainMatmul) -> None:
        """Append a matmul."""
        if isinstance(matmul, CompiledMatmul):
            self.add_names(matmul)
            matmul.start = self.num_factors
            first = self.matmuls[matmul.forward] if matmul.is_backward else matmul
            assert isinstance(first, CompiledMatmul), "it has backward matmuls"
            matmul.kin = first.kin
            matmul.kin.append(matmul)
            self.num_factors += matmul.num_factors
            if self._block != (block := block_of(matmul.matmul_names.path)):
                self._part_sizes.append(0)
                self._block = block
            matmul.part, matmul.offset = len(self._part_sizes) - 1, self._part_sizes[-1]
            self._part_sizes[-1] += matmul.num_factors
        self.matmuls.append(matmul)

    @functools.cached_property
    def description(self) -> tuple[int, str]:
        """The number of the complete graph, and the text that describes its matmuls."""
        rows = [row_of(matmul) for matmul in self.matmuls]
        text = json.dumps({"root": self._root, "code": self._code, "matmuls": rows})
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:7], "big"), text

    def begin(self, operator: str) -> _UnitFactors:
        """Fix the units in force for a run of the forward graph and for its backward pass."""
        now = self._now
        if not now.operators or operator in now.operators:
            now.operators = set()
            now.run = self.begin_run()
            now.factors = self._factors_of(now.run)
            if now.run is not None:
                now.run.exponents = now.factors.exponents
                now.run.are_all_known = now.factors.are_all_known
        now.operators.add(operator)
        return now.factors

    def resume(self) -> GraphRun | None:
        """Return the run of the forward graph whose backward pass begins."""
        now, node = self._now, current_node()
        found = None if node is None else self.of_node(node)
        now.run, now.operators = found or now.run, set()
        return now.run

    def _factors_of(self, run: GraphRun | None) -> _UnitFactors:
        session = None if run is None else run.session()
        if run is None or session is None:
            if len(self._ones.exponents) != self.num_factors:
                self._ones = _UnitFactors([0] * self.num_factors)
            return self._ones
        sites = run.sites
        factors = self._factors.setdefault(session, {}).setdefault(
            tuple(map(id, sites.values())), _UnitFactors([0] * self.num_factors)
        )
        known = [(s.log2_units, s.log2_gamma, *s.plain.values()) for s in sites.values()]
        if known != factors.known:
            factors.known = known
            scaled = [matmul for matmul in self.matmuls if isinstance(matmul, CompiledMatmul)]
            of_each = [(matmul, sites[matmul.forward]) for matmul in scaled]
            factors.exponents = [e for matmul, site in of_each for e in matmul.exponents(site)]
            factors.are_all_known = all(None not in matmul.known(site) for matmul, site in of_each)
        return factors

    def factors(self, device: torch.device, *, is_backward: bool) -> Tensor:
        """Return all factors of the run that begins, FP32 of shape ``(factors,)``."""
        note_caller()
        if is_backward:
            run = self.resume()
            factors = _UnitFactors([0] * self.num_factors if run is None else run.exponents)
        else:
            factors = self.begin("compiled_factors")
        # Inductor may reuse the memory of an operator's result after its last read.
        return factors.on(device).clone()

    def parts(self, factors: Tensor) -> list[Tensor]:
        """Return the parts of the factors, each in its own memory."""
        # An offset is part of a kernel's code. Within parts they are equal, and so equal blocks
        # share kernels.
        parts = [factors.new_empty(size) for size in self._part_sizes]
        torch.split_with_sizes_copy(factors, self._part_sizes, out=parts)
        return parts

    def look(self, tensors: Sequence[Tensor], text: str) -> None:
        """Count matmuls, and measure their operands and addends."""
        run = self._now.run
        session = None if run is None else run.session()
        if run is None or session is None or not session.is_open:
            return
        if run.are_all_known and session.counter is None and not session.units.is_looking:
            return
        # Keyed by the tensor's index and the exponent of its unit.
        extents: dict[tuple[int, int], Extent] = {}
        if text not in self.looks:
            self.looks[text] = tuple(LookedAt(*row) for row in json.loads(text))
        for looked_at in self.looks[text]:
            matmul = self.matmuls[looked_at.index]
            if isinstance(matmul, PlainMatmul):
                if session.counter is not None:
                    session.counter.add(matmul.module, "plain", matmul.reason, matmul.flops)
                continue
            site = run.sites[matmul.forward]
            if session.counter is not None:
                # A graph that was compiled without rounding cannot round.
                reason = COMPILED_BEFORE if session.numerics else matmul.why_plain(site)
                kind: Kind = "plain" if reason else "units"
                session.counter.add(site.module, kind, reason, matmul.flops)
            if None in matmul.known(site) or session.units.is_looking:
                self._measure(session, run, matmul, looked_at, tensors, extents)

    def _measure(
        self,
        session: MatmulSession,
        run: GraphRun,
        matmul: CompiledMatmul,
        looked_at: LookedAt,
        tensors: Sequence[Tensor],
        extents: dict[tuple[int, int], Extent],
    ) -> None:
        site = run.sites[matmul.forward]
        known = matmul.known(site)
        count = len(known)
        # The units of the beginning of the forward pass, as in the factors.
        *units, common = (-exponent for exponent in run.exponents[matmul.start :][: count + 1])
        units += [common] * (len(looked_at.reads) - count)

        def extent_of(index: int) -> Extent:
            which, in_units = looked_at.reads[index]
            key = which, units[index] if in_units else 0
            if key not in extents:
                extents[key] = Extent.of(tensors[which], key[1])
            return extents[key]

        names, num_addends = site.names_of(matmul.sources), len(units) - count
        session.units.measure(site, matmul.slot, names, known, matmul.dtype, extent_of, num_addends)


GRAPHS: dict[int, CompiledGraph] = {}  # by the number of :attr:`CompiledGraph.description`


def _graph(number: int, text: str) -> CompiledGraph:
    """Return a graph, which another process may have compiled."""
    if (graph := GRAPHS.get(number)) is None:
        content = json.loads(text)
        graph = CompiledGraph(content["root"], content["code"])
        for index, row in enumerate(content["matmuls"]):
            graph.add(matmul_of(row, index))
        graph = GRAPHS.setdefault(number, graph)
    return graph


def _factors(number: int, text: str, device: torch.device, is_backward: bool) -> Tensor:
    return _graph(number, text).factors(device, is_backward=is_backward)


def _parts(factors: Tensor, gradient: Tensor | None, number: int) -> list[Tensor]:
    note_caller()
    return GRAPHS[number].parts(factors)


def _order(number: int, text: str, device: torch.device, is_backward: bool) -> Tensor:
    graph = _graph(number, text)
    # Matmuls may be measured before any of them reads a factor.
    graph.resume() if is_backward else graph.begin("compiled_order")
    note_caller()
    return torch.zeros(1, device=device)


define_operator(
    "compiled_factors(int graph, str matmuls, Device device, bool is_backward) -> Tensor",
    _factors,
    lambda graph, text, device, _: torch.empty(_graph(graph, text).num_factors, device=device),
    torch.Tag.cudagraph_unsafe,
)
define_operator(
    # It does not read the gradient, which only assigns it to the backward pass.
    "parts_of_factors(Tensor factors, Tensor? gradient, int graph) -> Tensor[]",
    _parts,
    lambda factors, gradient, graph: GRAPHS[graph].parts(factors),
    torch.Tag.cudagraph_unsafe,
    torch.Tag.flexible_layout,
)
define_operator(
    "compiled_order(int graph, str matmuls, Device device, bool is_backward) -> Tensor",
    _order,
    lambda graph, text, device, is_backward: torch.empty(1, device=device),
    torch.Tag.cudagraph_unsafe,
)
define_operator(
    # It writes nothing. The declared mutation keeps Inductor from removing the call.
    "look(Tensor[] tensors, Tensor(a!) order, int graph, str matmuls) -> ()",
    lambda tensors, order, graph, text: GRAPHS[graph].look(tensors, text),
    nothing,
    torch.Tag.cudagraph_unsafe,
    torch.Tag.flexible_layout,
)
