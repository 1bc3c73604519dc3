"""Units and formats in the captured steps of a module, whose graphs run op by op."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx

from lightning_unitscale.dispatch.aot_pass import finish_graph, note_products
from lightning_unitscale.dispatch.compiled_sites import PRODUCT
from lightning_unitscale.dispatch.joint_formats import FormatsInGraph
from lightning_unitscale.dispatch.joint_units import UnitsInGraph
from lightning_unitscale.dispatch.session import ProductSession, run_inside
from lightning_unitscale.dispatch.torch_internals import Kernel
from lightning_unitscale.graph.passes import StepGraph
from lightning_unitscale.lossless.held import GAUGE, HELD, held_units


class SessionRewriter:
    """Gives the matmuls of captured graphs their units and formats, as Inductor's passes do."""

    def __init__(self, session: ProductSession) -> None:
        self._session = session

    def describe(self, graph: StepGraph) -> None:
        """Note in which units matmuls read the tensors of a captured graph."""
        units = self._session.units
        graph.notes[GAUGE] = lambda: units.gauge
        # Asked for once rules have rewritten it, and before it is cut into parts.
        graph.notes[HELD] = functools.cache(lambda: held_units(graph))

    def rewrite_joint(self, graph: fx.Graph) -> None:
        """Scale the matmuls of the graph of both passes, or of the only one."""
        if self._session.numerics:
            FormatsInGraph(graph, self._session).run()
        UnitsInGraph(graph, self._session, is_fused=False).run()

    def rewrite_part(self, graph: fx.Graph) -> None:
        """Let the matmuls of one pass be looked at, and call torch's own kernels for them."""
        note_products(graph)
        finish_graph(graph)
        for node in graph.nodes:
            # What is saved for the backward pass keeps its meta there, as an input.
            if node.op == "call_function" and PRODUCT in node.meta:
                node.target = _unwatched(node.target)


def _unwatched(operator: Any) -> Kernel:
    """Return an operator whose kernel belongs to no session: its graph has scaled it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_inside(operator, *args, **kwargs)

    return run
