"""Which of its kernels torch takes for an attention.

A file of its own for the names it takes from torch (checked on torch 2.13 and 2.11):
``_fused_sdp_choice``, and ``_sdpa_kernel``, which Dynamo leaves of ``sdpa_kernel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, _sdpa_kernel, sdpa_kernel


def chosen_kernels(graph: fx.Graph) -> dict[fx.Node, list[SDPBackend]]:
    """For each node within ``sdpa_kernel`` the kernels that it leaves to choose from."""
    chosen: dict[fx.Node, list[SDPBackend]] = {}
    now: list[SDPBackend] | None = None
    for node in graph.nodes:
        if node.target is _sdpa_kernel:
            # Each is the node of a function of its name.
            now = [getattr(SDPBackend, str(one.args[0])) for one in node.all_input_nodes]
        elif now is not None:
            chosen[node] = now
    return chosen


def attention_is_composite(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    *,
    kernels: Sequence[SDPBackend] | None = None,
) -> bool:
    """Whether torch runs this attention as two products and a softmax, not as one kernel."""
    with nullcontext() if kernels is None else sdpa_kernel(list(kernels)):
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return int(choice) == 0
