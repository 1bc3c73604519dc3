"""Show and prune a ``ScalesGraph``, an FX graph with the scale of every tensor.

The prune functions do not change their argument. They return a new graph, built in one pass over
the nodes. A node that read a removed node then reads its replacement, or ``None``.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tabulate import tabulate
from torch import Tensor, fx
from torch.fx.node import Target

from lightning_unitscale.capture.graph_nodes import MODULE, op_name, tensor_name
from lightning_unitscale.scales.layout import MOMENTS
from lightning_unitscale.scales.statistics import statistics_row

_FULL_NAMES: Final = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
}


class Metrics:
    """Scale of a tensor in the forward pass and of its gradient in the backward pass.

    Args:
        fwd_tensor: A real floating-point tensor of any shape, or its numbers.
        bwd_tensor: Its gradient, or the numbers of its gradient. ``None`` if there is no gradient
            yet.

    Attributes:
        fwd: Numbers of the tensor.
        bwd: Numbers of its gradient, or ``None`` if no backward pass has reached it.

    Raises:
        ValueError: If a tensor is not a real floating-point one.
    """

    @dataclass
    class Data:
        """Numbers of one tensor, as torch computes them from all of its elements.

        Attributes:
            mean_abs: Mean magnitude.
            abs_mean: Magnitude of the mean.
            std: Standard deviation with Bessel's correction; NaN for fewer than two elements.
            abs_max: Largest magnitude.
            abs_min: Smallest magnitude; 0 if any element is 0.
            numel: Number of elements.
        """

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int

    def __init__(self, fwd_tensor: Tensor | Data, bwd_tensor: Tensor | Data | None = None) -> None:
        self.fwd = self._data(fwd_tensor)
        self.bwd: Metrics.Data | None = None if bwd_tensor is None else self._data(bwd_tensor)

    def set_bwd(self, bwd_tensor: Tensor | Data) -> None:
        """Replace the gradient's numbers."""
        self.bwd = self._data(bwd_tensor)

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """Compute the numbers of a real floating-point tensor of any shape, which may be empty.

        Raises:
            ValueError: If the tensor is of another type.
        """
        return Metrics.from_row(statistics_row(t, MOMENTS).tolist())

    @staticmethod
    def from_row(row: Sequence[float]) -> Metrics.Data:
        """Read the numbers from a statistics row.

        Its first columns are the moments of ``RowLayout``. If an element is NaN, every number is
        NaN. If an element is infinite, the means are infinite. The moments of only the finite
        elements would hide the problem.
        """
        numel, zeros, nans, infs, total, magnitudes, squares, largest, smallest = row[:9]
        if not numel or nans:
            nan = math.nan
            return Metrics.Data(nan, nan, nan, nan, nan, int(numel))
        abs_min = 0.0 if zeros else smallest
        if infs:
            return Metrics.Data(math.inf, math.inf, math.nan, math.inf, abs_min, int(numel))
        mean = total / numel
        is_constant = abs_min == largest and abs(total) == magnitudes
        variance = 0.0 if is_constant else max(squares / numel - mean * mean, 0.0)
        std = math.sqrt(variance * numel / (numel - 1)) if numel > 1 else math.nan
        return Metrics.Data(magnitudes / numel, abs(mean), std, largest, abs_min, int(numel))

    @staticmethod
    def names() -> list[str]:
        """Return the names of the numbers, the attributes of :class:`Metrics.Data`."""
        return [field.name for field in dataclasses.fields(Metrics.Data)]

    @staticmethod
    def full_names() -> list[str]:
        """Return the descriptive names, in the same order."""
        return [Metrics.get_full_name(name) for name in Metrics.names()]

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """Return the descriptive name of a number.

        Raises:
            KeyError: If there is no such number.
        """
        return _FULL_NAMES[short_name]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metrics):
            return NotImplemented
        return self.fwd == other.fwd and self.bwd == other.bwd

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def _data(value: Tensor | Metrics.Data) -> Metrics.Data:
        return Metrics.from_tensor(value) if isinstance(value, Tensor) else value


# Keys of ``node.meta``: the ``Metrics`` or None; whether there are any; the node's name without
# what Dynamo puts around it; whether the node is a trained parameter.
METRICS: Final = "metrics"
FLOAT_TENSOR: Final = "outputs_float_tensor"
CLEAN_NAME: Final = "clean_name"
TRAINED: Final = "requires_grad"

_HEADERS: Final = ("name", "op", "module", "mean |x|", "std", "mean |grad|", "std of grad")
# Powers of two from 1 at which a color is at its strongest: FP16's normal numbers end near there.
_FULL_COLOR: Final = 14.0
_LARGE, _SMALL = (214, 69, 65), (52, 120, 214)


class ScalesGraph(fx.Graph):
    """The tensors of a step, in the order of computation, with their scales.

    Every node has ``meta["metrics"]``, a :class:`Metrics` or ``None`` (no floating-point tensor, or
    one that cannot be measured), and with it ``meta["outputs_float_tensor"]``,
    ``meta["clean_name"]`` (the node's name for people), ``meta["requires_grad"]`` (a trained
    parameter), ``meta["tensor_name"]`` and ``meta["module_path"]``. A notebook shows it as a table.
    """

    def tabulate(self, tablefmt: str = "simple") -> str:
        """Return the graph as a text table, one line per node.

        Args:
            tablefmt: A format of the ``tabulate`` package: ``"simple"``, ``"github"``, ....
        """
        rows = [(*texts, *map(_number, numbers)) for texts, numbers in self._rows()]
        return tabulate(rows, headers=_HEADERS, tablefmt=tablefmt, disable_numparse=True)

    def _repr_html_(self) -> str:
        """Return the table for a notebook, with numbers colored by ``log2`` of the scale.

        Red is above 1 and blue below; colors are laid over whatever background there is.
        """
        style = 'style="text-align:left;padding:2px 8px"'
        head = "".join(f"<th {style}>{html.escape(header)}</th>" for header in _HEADERS)
        lines = []
        for texts, numbers in self._rows():
            cells = [f"<td {style}>{html.escape(text)}</td>" for text in texts]
            cells += [
                f'<td style="{_cell_style(number)}">{_number(number)}</td>' for number in numbers
            ]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        body = "\n".join(lines)
        return (
            '<table style="color:inherit;background:transparent;border-collapse:collapse">\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ScalesGraph:
        new = _without(self, lambda node: (False, None))
        if memo is not None:
            memo[id(self)] = new
        return new

    def _rows(self) -> Iterator[tuple[tuple[str, str, str], tuple[float | None, ...]]]:
        for node in self.nodes:
            if node.op == "output":
                continue
            op = "input" if node.op == "placeholder" else op_name(node)
            texts = (tensor_name(node), op, str(node.meta.get(MODULE, "")))
            metrics: Metrics | None = node.meta.get(METRICS)
            parts = (None, None) if metrics is None else (metrics.fwd, metrics.bwd)
            numbers = [
                (None, None) if data is None else (data.mean_abs, data.std) for data in parts
            ]
            yield texts, (*numbers[0], *numbers[1])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cell_style(value: float | None) -> str:
    style = "text-align:right;padding:2px 8px;font-variant-numeric:tabular-nums"
    if value is None or math.isnan(value):
        return style
    log2 = math.log2(value) if 0.0 < value < math.inf else math.copysign(math.inf, value - 0.5)
    red, green, blue = _LARGE if log2 > 0 else _SMALL
    # At most half opaque, so that text stays readable on white and on black.
    opacity = 0.5 * min(abs(log2) / _FULL_COLOR, 1.0)
    return f"{style};background-color:rgba({red},{green},{blue},{opacity:.2f})"


# A decision about a node of the new graph: whether to remove it, and the earlier node that replaces
# it.
_Decide = Callable[[fx.Node], tuple[bool, fx.Node | None]]


def prune_non_float_tensors(graph: fx.Graph) -> ScalesGraph:
    """Keep only the output and the nodes that compute a floating-point tensor.

    A node that read a pruned node reads its input instead, if the pruned node had exactly one
    floating-point input. Otherwise it reads ``None``.

    Args:
        graph: What ``scales_graph()`` of a tracked module returns, pruned before or not.

    Raises:
        RuntimeError: If the graph was not tracked.
    """
    _require_tracked(graph)

    def decide(node: fx.Node) -> tuple[bool, fx.Node | None]:
        if node.meta.get(FLOAT_TENSOR):
            return False, None
        return True, _only_float_input(node)

    return _without(graph, decide)


def prune_same_scale_tensors(graph: fx.Graph, rtol: float = 2**-16) -> ScalesGraph:
    """Remove the nodes whose tensor has the same scale as their input, such as views.

    The scale is the mean magnitude of the tensor and, if both have one, of its gradient. A node
    stays if it reads several floating-point tensors, or if only one of node and input has a
    gradient.

    Args:
        graph: What ``scales_graph()`` of a tracked module returns, pruned before or not.
        rtol: Relative difference up to which two scales count as equal.

    Raises:
        RuntimeError: If the graph was not tracked.
        ValueError: If ``rtol`` is negative or not a number.
    """
    if not rtol >= 0.0:
        raise ValueError(
            f"rtol={rtol}: not a tolerance. Expected a number of at least 0. The default is 2**-16."
        )
    _require_tracked(graph)

    def decide(node: fx.Node) -> tuple[bool, fx.Node | None]:
        source = _only_float_input(node) if node.meta.get(FLOAT_TENSOR) else None
        if source is None:
            return False, None
        return _have_same_scale(node.meta[METRICS], source.meta[METRICS], rtol), source

    return _without(graph, decide)


def prune_selected_nodes(graph: fx.Graph, targets: Iterable[Target]) -> ScalesGraph:
    """Remove the nodes with the given targets. The nodes that read them then read ``None``.

    Args:
        graph: Any graph.
        targets: Functions, and names of methods, inputs or attributes, as in ``node.target``.
    """
    selected = frozenset(targets)
    return _without(graph, lambda node: (node.target in selected, None))


def _without(graph: fx.Graph, decide: _Decide) -> ScalesGraph:
    pruned = ScalesGraph()
    stands_for: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        # Copied first, so that the decision sees the remaining inputs.
        copied = pruned.node_copy(node, lambda old: stands_for[old])
        stands_for[node] = copied
        if node.op == "output":
            continue
        goes, replacement = decide(copied)
        if goes:
            pruned.erase_node(copied)
            stands_for[node] = replacement
    return pruned


def _only_float_input(node: fx.Node) -> fx.Node | None:
    floats = [source for source in node.all_input_nodes if source.meta.get(FLOAT_TENSOR)]
    return floats[0] if len(floats) == 1 else None


def _have_same_scale(first: Metrics, second: Metrics, rtol: float) -> bool:
    pairs = [(first.fwd, second.fwd)]
    if first.bwd is not None and second.bwd is not None:
        pairs.append((first.bwd, second.bwd))
    elif first.bwd is not second.bwd:
        return False
    return all(math.isclose(a.mean_abs, b.mean_abs, rel_tol=rtol) for a, b in pairs)


def _require_tracked(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if FLOAT_TENSOR not in node.meta:
            raise RuntimeError(
                f"graph: node {node.name!r} does not say whether it makes a floating-point tensor. "
                "Expected a graph that was tracked. Pass the result of scales_graph() of a module "
                "that track_scales made."
            )
