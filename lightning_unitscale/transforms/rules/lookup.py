"""The scale rule of a node of a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from lightning_unitscale.functional.rule import ScaleRule, rule_of_function, rule_of_method
from lightning_unitscale.graph.nodes import op_name

# What a captured graph calls by another name than people do.
_ALIASES = {"attention_product": torch.matmul, "safe_softmax": torch.softmax}


def rule_of(node: fx.Node) -> ScaleRule | None:
    """The scale rule of an operation, in whichever form it is called."""
    if node.op == "call_method":
        return rule_of_method(str(node.target))
    if node.op != "call_function":
        return None
    alias = _ALIASES.get(op_name(node))
    return rule_of_function(node.target if alias is None else alias)
