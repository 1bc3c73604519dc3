"""Where a user wants the cuts: a call in the model's code, or the edge of a named module.

Both become the same node of the captured graph, torch's own mark, which has neither arguments nor
a result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split
from torch.utils.hooks import RemovableHandle

# A capture records the operator, and a split policy may insert the function or the operator.
_MARKS = (pipe_split, torch.ops.pippy._pipe_split, torch.ops.pippy._pipe_split.default)


def is_mark(node: fx.Node) -> bool:
    """Whether the node is a wanted cut."""
    return node.op == "call_function" and node.target in _MARKS


def insert_mark(graph: fx.Graph, before: fx.Node) -> fx.Node:
    """Put a cut in front of a node; for split policies."""
    with graph.inserting_before(before):
        return graph.call_function(pipe_split)


def annotate_split_points(
    module: nn.Module, spec: Mapping[str, SplitPoint]
) -> tuple[RemovableHandle, ...]:
    """Mark the edges of submodules as cuts, by hooks that do nothing when the module runs.

    Args:
        module: Root of the paths.
        spec: Path of a submodule to the edge that is a cut.

    Returns:
        Handles whose ``remove()`` takes the marks away.

    Raises:
        ValueError: If a path names no submodule.
        TypeError: If an edge is no :class:`SplitPoint`.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> handles = annotate_split_points(model, {"1": SplitPoint.BEGINNING})
        >>> handles[0].remove()
    """
    _check(module, spec)
    handles = []
    for path, edge in spec.items():
        target = module.get_submodule(path)
        if edge is SplitPoint.BEGINNING:
            handles.append(target.register_forward_pre_hook(_before))
        else:
            handles.append(target.register_forward_hook(_after))
    return tuple(handles)


@contextlib.contextmanager
def marked(module: nn.Module, spec: Mapping[str, SplitPoint] | None) -> Iterator[None]:
    """Within this context the edges of ``spec`` are cuts."""
    handles = annotate_split_points(module, spec) if spec else ()
    try:
        yield
    finally:
        for one in handles:
            one.remove()


def _before(module: nn.Module, args: Any) -> None:
    pipe_split()


def _after(module: nn.Module, args: Any, output: Any) -> None:
    pipe_split()


def _check(module: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    paths = dict(module.named_modules())
    for path, edge in spec.items():
        if not path or path not in paths:
            near = [one for one in paths if one.rpartition(".")[2] == path.rpartition(".")[2]]
            example = next(iter(near or [one for one in paths if one]), "layers.1")
            raise ValueError(
                f"split_spec={dict(spec)!r}: {type(module).__name__} has no submodule {path!r}; "
                f"expected paths of named_modules(), such as {example!r}; correct the path."
            )
        if not isinstance(edge, SplitPoint):
            raise TypeError(
                f"split_spec[{path!r}]={edge!r}: expected SplitPoint.BEGINNING or SplitPoint.END."
            )
