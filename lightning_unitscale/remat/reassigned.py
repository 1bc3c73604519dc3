"""Parameters that a step gives other data, ``p.data = ...``, after it has read them."""

from __future__ import annotations

import torch
from torch import fx

_SET = torch.ops.aten.set_.source_Tensor


def keep_old_data(joint_module: fx.GraphModule) -> None:
    """Copy the data of a reassigned parameter where the backward pass reads what it was before.

    A saved input is the caller's own tensor, which has the new data by then.
    """
    graph = joint_module.graph
    for node in graph.find_nodes(op="call_function", target=_SET):
        given = node.args[0]
        if not isinstance(given, fx.Node) or given.op != "placeholder" or not _is_kept(given):
            continue
        readers = [user for user in given.users if user.op != "output" and user.target is not _SET]
        with graph.inserting_before(min(readers)):
            old = graph.call_function(torch.ops.aten.clone.default, (given,))
        old.meta["val"] = given.meta["val"].clone()
        for reader in readers:
            reader.replace_input_with(given, old)


def _is_kept(node: fx.Node) -> bool:
    """Whether the backward pass reads a node, or a view of it."""
    return any(
        user.meta.get("partitioner_tag") == "is_backward" or (_is_view(user) and _is_kept(user))
        for user in node.users
    )


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(one.alias_info is not None for one in schema.returns)
