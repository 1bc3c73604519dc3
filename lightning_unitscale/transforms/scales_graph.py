"""``ScalesGraph``: an FX graph whose nodes know their scales, and how it is shown to people."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import Any, Final

from tabulate import tabulate
from torch import fx

from lightning_unitscale.graph.nodes import MODULE, op_name, tensor_name
from lightning_unitscale.transforms.metrics import Metrics

# Keys of ``node.meta``: the ``Metrics`` or None; whether there are any; the node's name without
# what Dynamo puts around it; whether the node is a trained parameter.
METRICS: Final = "metrics"
FLOAT_TENSOR: Final = "outputs_float_tensor"
CLEAN_NAME: Final = "clean_name"
TRAINED: Final = "requires_grad"

_HEADERS: Final = ("name", "op", "module", "mean |x|", "std", "mean |grad|", "std of grad")
# Powers of two from 1 at which a colour is at its strongest: FP16's normal numbers end near there.
_FULL_COLOUR: Final = 14.0
_LARGE, _SMALL = (214, 69, 65), (52, 120, 214)


class ScalesGraph(fx.Graph):
    """The tensors of a step in the order in which they were made, with their scales.

    Every node has ``meta["metrics"]``, a :class:`Metrics` or ``None`` (no floating-point tensor, or
    one that cannot be looked at), and with it ``meta["outputs_float_tensor"]``,
    ``meta["clean_name"]`` (the node's name for people), ``meta["requires_grad"]`` (a trained
    parameter), ``meta["tensor_name"]`` and ``meta["module_path"]``. A notebook shows it as a table.
    """

    def tabulate(self, tablefmt: str = "simple") -> str:
        """The graph as a text table, one line per node.

        Args:
            tablefmt: A format of the ``tabulate`` package: ``"simple"``, ``"github"``, ....
        """
        rows = [(*texts, *map(_number, numbers)) for texts, numbers in self._rows()]
        return tabulate(rows, headers=_HEADERS, tablefmt=tablefmt, disable_numparse=True)

    def _repr_html_(self) -> str:
        """The table for a notebook, with numbers coloured by ``log2`` of the scale.

        Red is above 1 and blue below; colours are laid over whatever background there is.
        """
        style = 'style="text-align:left;padding:2px 8px"'
        head = "".join(f"<th {style}>{html.escape(one)}</th>" for one in _HEADERS)
        lines = []
        for texts, numbers in self._rows():
            cells = [f"<td {style}>{html.escape(one)}</td>" for one in texts]
            cells += [f'<td style="{_cell_style(one)}">{_number(one)}</td>' for one in numbers]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        body = "\n".join(lines)
        return (
            '<table style="color:inherit;background:transparent;border-collapse:collapse">\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> ScalesGraph:
        new = type(self)()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            copies[node] = new.node_copy(node, lambda old: copies[old])
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
            numbers = [(None, None) if one is None else (one.mean_abs, one.std) for one in parts]
            yield texts, (*numbers[0], *numbers[1])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cell_style(value: float | None) -> str:
    style = "text-align:right;padding:2px 8px;font-variant-numeric:tabular-nums"
    if value is None or math.isnan(value):
        return style
    log2 = math.log2(value) if 0.0 < value < math.inf else math.copysign(math.inf, value - 0.5)
    red, green, blue = _LARGE if log2 > 0 else _SMALL
    # At most half covered: the text keeps its contrast on white and on black.
    opacity = 0.5 * min(abs(log2) / _FULL_COLOUR, 1.0)
    return f"{style};background-color:rgba({red},{green},{blue},{opacity:.2f})"
