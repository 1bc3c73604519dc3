"""Export a module's ``forward`` as a separate graph module.

Uses ``torch.export._trace._export_to_torch_ir`` (checked on torch 2.13 and 2.11): the graph of a
strict export before it is lowered, with ``F.*`` nodes, the user's inputs and outputs, and
parameters under their own names; and ``_is_exporting_flag`` with the context that sets it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import functional_export
from torch.export._trace import _export_to_torch_ir

from lightning_unitscale.capture.aliasing import make_out_of_place
from lightning_unitscale.capture.answers import trace_one_graph
from lightning_unitscale.capture.breaks import is_of_dynamo, reason_raised, wants_dynamos_texts
from lightning_unitscale.capture.decompose import expand_composites
from lightning_unitscale.capture.dynamo_capture import CapturedGraph
from lightning_unitscale.capture.graph_nodes import Names
from lightning_unitscale.capture.patches import plain_libraries
from lightning_unitscale.capture.rollback import restoring_numbers
from lightning_unitscale.capture.step_messages import CaptureError
from lightning_unitscale.patching import shadowed

_STATE = "_compiling_state_context"


def export_forward(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    expand: bool = True,
    plain: bool = False,
) -> fx.GraphModule:
    """Export ``module.forward`` as a graph module with its signature and a step's node names."""

    def trace() -> fx.GraphModule:
        exported: fx.GraphModule = _export_to_torch_ir(module, args, kwargs)
        return exported

    try:
        graph_module = _trace_as_if_plain(trace, module, args, kwargs) if plain else trace()
    except Exception as error:
        raise CaptureError.of(
            f"{type(module).__name__}.forward", [reason_raised(error)], manner=" as one graph"
        ) from (error if wants_dynamos_texts() or not is_of_dynamo(error) else None)
    Names().assign(CapturedGraph(graph_module, (), 0, ()), graph_module)
    if expand:
        expand_composites(graph_module)
    make_out_of_place(graph_module.graph)
    return graph_module


def _trace_as_if_plain(
    trace: Callable[[], fx.GraphModule],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> fx.GraphModule:
    """Trace a call, and if that fails trace it again after a call."""
    with _as_if_plain():
        try:
            return trace_one_graph(trace)
        except Exception as error:
            if not is_of_dynamo(error):
                raise
        # A library's setup in a module's first call may be what breaks the graph: transformers
        # installs hooks then, under a lock.
        with restoring_numbers(module), torch.no_grad():
            module(*args, **kwargs)
        return trace_one_graph(trace)


@contextlib.contextmanager
def _as_if_plain() -> Iterator[None]:
    """Make an export answer traced code that nothing is exported.

    Hugging Face's models pass attention an explicit mask when exported, and so use another kernel,
    with other bits, than in a run.
    """
    usual = getattr(functional_export, _STATE)

    @contextlib.contextmanager
    def compiling() -> Iterator[None]:
        with usual():
            torch.compiler._is_exporting_flag = False
            yield

    not_exporting = shadowed(functional_export, **{_STATE: compiling})
    with not_exporting, plain_libraries(), warnings.catch_warnings():
        # transformers' collector of hidden states, which is set and reset in every call.
        collector = r"(?s)While compiling, we found certain side effects.*_active_collector"
        warnings.filterwarnings("ignore", collector)
        yield
