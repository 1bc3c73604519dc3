"""How the forward and backward graphs that AOTAutograd makes are split, and run op by op.

Private names used here were checked on torch 2.13: ``_BoxedCodeGen``, Inductor's
``custom_partitioner_fn``, and the switches of the two caches of compiled graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen


@contextlib.contextmanager
def partitioned_by(partition_fn: Any) -> Iterator[None]:
    """Inductor's settings for a partitioner; one without an identity is asked every time."""
    if partition_fn is None:
        yield
        return
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    cached = partition_fn.uuid() is not None
    with (
        config.patch(
            custom_partitioner_fn=partition_fn, fx_graph_cache=cached and config.fx_graph_cache
        ),
        functorch_config.patch(
            enable_autograd_cache=cached and functorch_config.enable_autograd_cache
        ),
    ):
        yield


def run_boxed(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler for AOTAutograd that runs a graph op by op."""
    # AOTAutograd hands its inputs over in a list. Code that empties the list frees each of them
    # when nothing reads it any more; otherwise all saved tensors live to the end of the backward.
    graph_module.graph.set_codegen(_BoxedCodeGen())
    graph_module.recompile()
    forward = graph_module.forward

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
