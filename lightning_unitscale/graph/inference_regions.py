"""Regions in inference mode, as regions without gradients.

AOTAutograd cannot trace a view of an ordinary tensor that is made in inference mode: the view has
no version counter, which functionalization asks for. What its graphs return is no inference tensor
anyway.

Private names used here were checked on torch 2.13 and 2.11: ``_enter_inference_mode`` and
``_exit_inference_mode``, which Dynamo puts into its graphs.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode


def drop_inference_mode(graph_module: fx.GraphModule) -> None:
    """Turn gradients off where the user turns inference mode on, in nested graphs as well."""
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=_enter_inference_mode):
            node.target = _turn_gradients
        for node in module.graph.find_nodes(op="call_function", target=_exit_inference_mode):
            node.target = torch.set_grad_enabled
        module.recompile()


def _turn_gradients(inference: bool = True) -> bool:
    """Off in inference mode, and on where it is lifted again; returns what they were before."""
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(not inference)
    return before
