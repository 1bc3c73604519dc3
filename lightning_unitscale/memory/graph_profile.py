"""Hold the profile of a step: costs of nodes and modules, bytes by purpose, and the peak."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
import torch
from tabulate import tabulate
from torch import nn

from lightning_unitscale.memory import profile_report as report
from lightning_unitscale.memory.profile_report import format_bytes, format_flops
from lightning_unitscale.memory.reserved import AllocatorPeak, serve_steps
from lightning_unitscale.memory.step_record import (
    ALWAYS_THERE,
    Kind,
    MemoryTimeline,
    ModuleCosts,
    NodeCosts,
    Peak,
    Phase,
    StepRecord,
    field_names,
    memory_timeline,
    module_costs,
    node_costs,
    peak_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class GraphProfile:
    """Memory and operations of one training step.

    All sizes are bytes of whole storages, each counted once.

    Attributes:
        device: Type of the simulated device, ``"cpu"`` or ``"cuda"``.
        batch_size: First dimension of most inputs, or ``None`` without one.
        nodes: Costs of the forward graph's nodes, in their order.
        modules: Costs of the modules, each with its submodules, in the order of definition.
        parameter_bytes: Parameters.
        buffer_bytes: Buffers.
        input_bytes: Inputs of the step.
        gradient_bytes: Gradients of parameters.
        optimizer_bytes: State of the optimizer between steps.
        unsharded_bytes: Peak bytes of the parameters that FSDP has gathered, and of its gather
            buffers.
        saved_bytes: Bytes that autograd saves for the backward pass, without parameters and
            buffers.
        peak: The moment at which the most bytes are alive. On a GPU this and the timeline count
            the blocks of torch's caching allocator.
        timeline: Live bytes over the step.
        phases: Phase of the step at each moment of the timeline.
        num_ranks: Number of ranks that the module is sharded over. Sizes are those of rank 0, which
            has the largest shard.
        gpu: Name of the simulated GPU, empty for a CPU.
        library_bytes: Workspaces that cuBLAS and cublasLt keep on a GPU.
        allocator: Bytes that a GPU's caching allocator takes for the step, or ``None`` for a CPU.
        batch_fit: Live bytes as lines over the batch size, after :meth:`fit_batch`.
    """

    device: str
    batch_size: int | None
    nodes: tuple[NodeCosts, ...] = field(repr=False)
    modules: tuple[ModuleCosts, ...] = field(repr=False)
    parameter_bytes: int
    buffer_bytes: int
    input_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    unsharded_bytes: int
    saved_bytes: int
    peak: Peak
    timeline: MemoryTimeline = field(repr=False)
    phases: tuple[Phase, ...] = field(repr=False)
    num_ranks: int = 1
    gpu: str = ""
    library_bytes: int = 0
    allocator: AllocatorPeak | None = None
    batch_fit: BatchFit | None = field(default=None, repr=False)
    _profile_at: Callable[[int], GraphProfile] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that are alive at once."""
        return self.peak.num_bytes

    @property
    def fwd_flops(self) -> int:
        """Count the floating-point operations of the matmuls of the forward pass."""
        return sum(node.fwd_flops for node in self.nodes)

    @property
    def bwd_flops(self) -> int:
        """Count the floating-point operations of the matmuls of the backward pass."""
        return sum(node.bwd_flops for node in self.nodes)

    def node(self, name: str) -> NodeCosts:
        """Return the costs of one node.

        Raises:
            KeyError: If there is no node of this name.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"`name={name!r}`: no node has it. Expected one of profile.nodes.")

    def fit_batch(self) -> GraphProfile:
        """Profile the step at twice the batch size, and return this profile with ``batch_fit``.

        Raises:
            ValueError: If the inputs have no batch size, or the profile came from a file that was
                saved without a fit.
        """
        if self.batch_fit is not None:
            return self
        if self._profile_at is None or not self.batch_size:
            raise ValueError(
                "`max_batch_size`: the step cannot be profiled again. Expected a profile that "
                "profile_graph returned for inputs with a batch dimension. Call fit_batch() before "
                "you save it."
            )
        sizes = (self.batch_size, 2 * self.batch_size)
        low, high = self, self._profile_at(sizes[1])
        if len(low.phases) != len(high.phases):
            # Other operators run at this size (one sample needs no copies), so compare larger ones.
            sizes = (sizes[1], 3 * self.batch_size)
            low, high = high, self._profile_at(sizes[1])
        lines = fit(sizes, low.timeline.live_bytes, high.timeline.live_bytes)
        return replace(self, batch_fit=lines)

    def max_batch_size(self, budget_bytes: int) -> int:
        """Return the largest batch whose peak is within the budget, or 0 if none is.

        Every input tensor whose first dimension is the batch size is assumed to grow. If the module
        still exists, the answer is checked by profiling the step at that size.

        Args:
            budget_bytes: Bytes that may be alive at once.

        Raises:
            ValueError: If the budget is not positive, or there is no fit.
        """
        if budget_bytes <= 0:
            raise ValueError(
                f"`budget_bytes={budget_bytes}`: not a budget. Expected a positive number. Pass "
                "the bytes of the device, such as 79 * 2**30."
            )
        lines = self.fit_batch().batch_fit
        assert lines is not None
        again = self._profile_at
        peak_at = lines.peak_bytes if again is None else lambda size: again(size).peak_bytes
        return largest_batch(lines, budget_bytes, peak_at)

    def table(self, sort_by: str = "saved_bytes", limit: int | None = 20) -> str:
        """Return the nodes as a table, the largest first.

        Args:
            sort_by: A field of :class:`NodeCosts` that is a number, or ``"order"``.
            limit: Number of rows, or ``None`` for all.

        Raises:
            ValueError: If there is no such field.
        """
        return report.node_table(self.nodes, sort_by, limit)

    def module_table(self, depth: int | None = None) -> str:
        """Return the modules as a table down to a depth: 0 is the root alone, ``None`` is all."""
        return report.module_table(self.modules, depth)

    def totals(self) -> str:
        """Return the bytes by purpose, over the step and at its peak, and the operations."""
        peak, names = self.peak, {"activation": "saved_bytes"}
        rows = [
            # Temporaries have no total over the step.
            (kind, "" if total is None else format_bytes(total), format_bytes(size))
            for kind, size in peak.by_kind.items()
            if (total := getattr(self, names.get(kind, f"{kind}_bytes"), None))
            or kind not in ("unsharded", "library")
        ]
        where = f" of {peak.node}" if peak.node else ""
        operator = f" ({peak.operator})" if peak.operator else ""
        ranks = f"each of {self.num_ranks} {self.device} ranks"
        device = self.device if self.num_ranks == 1 else ranks
        device += f" ({self.gpu})" if self.gpu else ""
        lines = [
            f"Peak {format_bytes(peak.num_bytes)} on {device} in the {peak.phase} pass"
            f"{where}{operator}, batch size {self.batch_size}"
        ]
        if self.allocator is not None:
            reserved, allocated = self.allocator.reserved_bytes, self.allocator.allocated_bytes
            lines.append(
                f"The caching allocator reserves {format_bytes(reserved)} for it, "
                f"{format_bytes(allocated)} in blocks"
            )
        lines += [
            f"Matmuls: {format_flops(self.fwd_flops)}FLOP forward, "
            f"{format_flops(self.bwd_flops)}FLOP backward; {len(self.nodes)} nodes",
            "",
            tabulate(rows, headers=("bytes", "in the step", "at the peak"), disable_numparse=True),
        ]
        return "\n".join(lines)

    def summary(self, limit: int | None = 20) -> str:
        """Return totals, the peak, and a row per node, the largest first."""
        return f"{self.totals()}\n\n{self.table(limit=limit)}"

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the live bytes by purpose over the step, with the peak marked.

        Args:
            path: File for the picture, if any.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        figure = report.draw(self.timeline, self.peak, self.phases)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def to_networkx(self) -> nx.DiGraph:
        """Return the forward graph of the step, with an edge to each node from those it reads.

        Returns:
            A graph of networkx with the totals of the step. A node has the attributes of
            :class:`NodeCosts`, and the ``num_bytes`` of its first result. Parameters, buffers and
            inputs have only the ``op`` ``"placeholder"``. An edge has the ``num_bytes`` of the
            tensor, if they are known, and ``saved`` (whether autograd saves it for this reader).
        """
        totals = ("device", "peak_bytes", "fwd_flops", "bwd_flops", *field_names(GraphProfile))
        graph = nx.DiGraph(**{name: getattr(self, name) for name in totals})
        shown = ("op", "module", "dtype", *field_names(NodeCosts))
        for node in self.nodes:
            given = [read for read in node.inputs if read not in graph]
            graph.add_nodes_from(given, op="placeholder")
            numbers = {name: getattr(node, name) for name in shown}
            item_bytes = getattr(torch, node.dtype).itemsize if node.dtype else 0
            num_bytes = math.prod(node.shape) * item_bytes
            graph.add_node(node.name, shape=str(node.shape), num_bytes=num_bytes, **numbers)
            for read in node.inputs:
                graph.add_edge(read, node.name, saved=read in node.save_fwd_in)
                if "num_bytes" in graph.nodes[read]:
                    graph.edges[read, node.name]["num_bytes"] = graph.nodes[read]["num_bytes"]
        return graph

    def to_json(self) -> str:
        """Return the profile as JSON."""
        values = {name: value for name, value in asdict(self).items() if name != "_profile_at"}
        return json.dumps({"version": report.VERSION, **values})

    @staticmethod
    def from_json(text: str) -> GraphProfile:
        """Return a profile from the JSON of :meth:`to_json`.

        Raises:
            ValueError: If the text is not a profile.
        """
        return report.load(text, GraphProfile)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> GraphProfile:
        """Read a profile that :meth:`save` wrote."""
        return GraphProfile.from_json(Path(path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class BatchFit:
    """Live bytes at every moment of a step as a line over the batch size.

    The peak is the upper envelope of the lines, so it may move to another moment: from the
    optimizer at small batches to the backward pass at large ones.
    """

    fixed_bytes: tuple[float, ...] = field(repr=False)  # bytes of each moment at batch size 0
    bytes_per_sample: tuple[float, ...] = field(repr=False)

    def peak_bytes(self, batch_size: int) -> int:
        """Return the highest of all moments at a batch size."""
        lines = zip(self.fixed_bytes, self.bytes_per_sample, strict=True)
        return int(max(fixed + slope * batch_size for fixed, slope in lines))

    def largest(self, budget_bytes: int) -> int:
        """Return the largest batch size whose peak is within the budget, or 0 if there is none."""
        fixed, slopes = np.array(self.fixed_bytes), np.array(self.bytes_per_sample)
        grows = slopes > 0
        if not grows.any():
            raise ValueError(
                "`max_batch_size`: the peak does not grow with the batch. Expected inputs whose "
                "first dimension is the batch. Give tensors of that shape to profile_graph."
            )
        if (fixed[~grows] > budget_bytes).any():
            return 0
        limit = ((budget_bytes - fixed[grows]) / slopes[grows]).min()
        return max(0, int(limit + 1e-6))


def fit(batch_sizes: tuple[int, int], first: Sequence[int], second: Sequence[int]) -> BatchFit:
    """Return the lines through two profiles."""
    if len(first) != len(second):
        first, second = [max(first)], [max(second)]
    low, high = batch_sizes
    slopes = tuple((b - a) / (high - low) for a, b in zip(first, second, strict=True))
    fixed = tuple(a - slope * low for a, slope in zip(first, slopes, strict=True))
    return BatchFit(fixed, slopes)


def largest_batch(lines: BatchFit, budget_bytes: int, peak_at: Callable[[int], int]) -> int:
    """Return the largest batch whose own profile is within the budget, or 0 if there is none."""
    size, peak = lines.largest(budget_bytes), 0
    while size > 0 and (peak := peak_at(size)) > budget_bytes:
        # If the step is not linear in the batch, correct by the share of the deviation.
        size = min(size - 1, int(size * budget_bytes / peak))
    if size == 0 or abs(peak - lines.peak_bytes(size)) <= 1:
        return size
    # The blocks of a GPU's allocator grow in steps, so a larger batch may fit as well.
    step = max(1, int(size * (budget_bytes - peak) / peak))
    while peak_at(size + step) <= budget_bytes:
        size, step = size + step, 2 * step
    above = size + step
    while above - size > 1:
        middle = (size + above) // 2
        size, above = (middle, above) if peak_at(middle) <= budget_bytes else (size, middle)
    return size


def make_profile(
    record: StepRecord,
    module: nn.Module,
    *,
    batch_size: int | None = None,
    num_ranks: int = 1,
    profile_at: Callable[[int], GraphProfile] | None = None,
) -> GraphProfile:
    """Return the profile of a recorded step."""
    costs = node_costs(record)
    allocator = blocks = None
    if record.device == "cuda":
        allocator, blocks = serve_steps(record)
    timeline, peak = memory_timeline(record, blocks)
    by_kind: Counter[Kind] = Counter()
    for life in record.storages:
        by_kind[life.kind] += life.num_bytes
    # A loss outside of the graph makes autograd save as well, so the nodes lack some bytes.
    saved = [record.storages[index] for index in {index for index, _ in record.saved}]
    kinds = [life.kind for life in record.storages]
    unsharded = (event for event in record.events if kinds[event.storage] == "unsharded")
    return GraphProfile(
        record.device,
        batch_size,
        costs,
        module_costs(costs, module),
        parameter_bytes=by_kind["parameter"],
        buffer_bytes=by_kind["buffer"],
        input_bytes=by_kind["input"],
        gradient_bytes=by_kind["gradient"],
        optimizer_bytes=by_kind["optimizer"],
        unsharded_bytes=peak_of(unsharded),
        saved_bytes=sum(life.num_bytes for life in saved if life.kind not in ALWAYS_THERE),
        peak=peak,
        timeline=timeline,
        phases=tuple(call.phase for call in record.operators),
        num_ranks=num_ranks,
        gpu="" if record.gpu is None else record.gpu.title,
        library_bytes=by_kind["library"],
        allocator=allocator,
        _profile_at=profile_at,
    )
