"""Decomposed attention is bit-identical to torch's, and its matmuls are visible."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_unitscale.capture import decompose as expand
from lightning_unitscale.capture import dynamo_capture as capture
from lightning_unitscale.capture.copy_graphs import copy_graph_module
from lightning_unitscale.capture.decompose import (
    SizeNodes,
    UnknownSize,
    attention_matmul,
    expand_composites,
)
from lightning_unitscale.capture.graph_matmuls import matmul_of
from lightning_unitscale.capture.graph_nodes import Names, tensor_name
from tests.helpers import assert_same_bits, captured, run, sampled


def _expanded(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    graph_module = captured(function, *inputs)
    expand_composites(graph_module)
    graph_module.graph.lint()
    return graph_module


def _targets(graph_module: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph_module.graph.nodes]


def _num_matmuls(graph_module: fx.GraphModule) -> int:
    targets = _targets(graph_module)
    return sum(targets.count(one) for one in (attention_matmul, torch.bmm, torch.baddbmm))


def _assert_same_as(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Runs ``function`` and its opened-up graph; returns the graph."""
    graph_module = _expanded(function, *inputs)
    names = [tensor_name(node) for node in graph_module.graph.nodes]
    assert len(set(names)) == len(names)
    values = _values_of_inputs(function, inputs)
    parameters = [one for one in values if isinstance(one, nn.Parameter)]

    def replay(*given: Tensor) -> Any:
        fresh = {id(one): new for one, new in zip(inputs, given, strict=True)}
        result = graph_module(*(fresh.get(id(one), one) for one in values))
        return result[0] if len(result) == 1 else result

    outcomes = []
    for one in (function, replay):
        for parameter in parameters:
            parameter.grad = None
        outcome = run(one, *inputs)
        outcomes.append((outcome["output"], outcome["inputs"], [one.grad for one in parameters]))
    assert_same_bits(*outcomes)
    return graph_module


def _values_of_inputs(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Any]:
    """Return the inputs of the graph of ``function``, in the order of its placeholders."""
    seen: list[list[Any]] = []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        def record(*values: Any) -> Any:
            seen.append(list(values))
            return graph_module.forward(*values)

        return record

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    assert len(seen) == 1
    return seen[0]


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


_MHA = [
    {},
    {"batch_first": True},
    {"bias": False},
    {"dropout": 0.3},
    {"add_bias_kv": True, "add_zero_attn": True},
    {"kdim": 6, "vdim": 10},
    {"kdim": 6, "vdim": 10, "batch_first": True, "dropout": 0.2},
]


@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("need_weights", sampled([False, True], 2))
@pytest.mark.parametrize("options", _MHA, ids=lambda one: "+".join(one) or "plain")
def test_multi_head_attention(options: dict[str, Any], need_weights: bool) -> None:
    module = nn.MultiheadAttention(8, 2, **options)
    if options.get("batch_first"):
        query, key, value = _tensor(3, 5, 8), _tensor(3, 4, 8), _tensor(3, 4, 8)
    else:
        query, key, value = _tensor(5, 3, 8), _tensor(4, 3, 8), _tensor(4, 3, 8)
    if "kdim" in options:
        key, value = _tensor(*key.shape[:2], 6), _tensor(*key.shape[:2], 10)
    padding = torch.tensor([[False] * 4, [False, False, True, True], [False] * 3 + [True]])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        result = module(q, k, v, key_padding_mask=padding, need_weights=need_weights)
        return result if need_weights else result[0]

    graph_module = _assert_same_as(function, query, key, value)
    assert F.multi_head_attention_forward not in _targets(graph_module)
    fused = not need_weights and "dropout" not in options
    assert _num_matmuls(graph_module) == (0 if fused else 2)


@pytest.mark.parametrize("need_weights", sampled([True, False], 2))
@pytest.mark.parametrize("mask", [None, "bool", "float", "per_head", "causal"])
def test_multi_head_self_attention_with_masks(mask: str | None, need_weights: bool) -> None:
    module = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
    masks = {
        None: None,
        "bool": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "float": torch.randn(5, 5),
        "per_head": torch.randn(6, 5, 5),
        "causal": torch.ones(5, 5, dtype=torch.bool).triu(1),
    }

    def function(x: Tensor) -> Any:
        result = module(
            x, x, x, attn_mask=masks[mask], is_causal=mask == "causal", need_weights=need_weights,
            average_attn_weights=mask != "bool",
        )  # fmt: skip
        return result if need_weights else result[0]

    # The packed projection of self-attention depends on ``query is key``.
    graph_module = _assert_same_as(function, _tensor(3, 5, 8))
    assert _num_matmuls(graph_module) == 2
    assert _targets(graph_module).count(F.linear) == 2


def _attention(**options: Any) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, **options)

    return function


_MASKS: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: (torch.rand(5, 4) > 0.3).requires_grad_(False),
    "bool_with_empty_rows": lambda: torch.tensor([[True] * 4] * 4 + [[False] * 4]),
    "float": lambda: torch.randn(5, 4),
    "float_per_head": lambda: torch.randn(2, 2, 5, 4),
    "learned": lambda: torch.randn(5, 4, requires_grad=True),
}


@pytest.mark.parametrize("mask", _MASKS)
@pytest.mark.parametrize("scale", sampled([0.37, None, -0.5], 3))
def test_attention_with_a_mask_and_dropout(mask: str, scale: float | None) -> None:
    function = _attention(dropout_p=0.25, scale=scale)
    inputs = _tensor(2, 2, 5, 8), _tensor(2, 2, 4, 8), _tensor(2, 2, 4, 6), _MASKS[mask]()
    graph_module = _assert_same_as(function, *inputs)
    assert _num_matmuls(graph_module) == 2


_KINDS = list(
    itertools.product([torch.float32, torch.bfloat16, torch.float64], [False, True], [False, True])
)


@pytest.mark.parametrize("kind", sampled(_KINDS, 5))
def test_attention_dtypes_causal_and_grouped_query(kind: tuple[torch.dtype, bool, bool]) -> None:
    dtype, causal, gqa = kind
    function = _attention(dropout_p=0.1, is_causal=causal, enable_gqa=gqa)
    heads = 2 if gqa else 4
    key, value = _tensor(2, heads, 5, 8, dtype=dtype), _tensor(2, heads, 5, 8, dtype=dtype)
    graph_module = _assert_same_as(function, _tensor(2, 4, 5, 8, dtype=dtype), key, value)
    assert _num_matmuls(graph_module) == 2


@pytest.mark.parametrize("mask", [None, "float", "bool"])
def test_attention_under_autocast(mask: str | None) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, *given, dropout_p=0.2) * 3

    masks = [] if mask is None else [_MASKS[mask]()]
    inputs = _tensor(2, 2, 5, 8), _tensor(2, 2, 4, 8), _tensor(2, 2, 4, 8)
    graph_module = _assert_same_as(function, *inputs, *masks)
    assert _num_matmuls(graph_module) == 2


def test_attention_that_torch_fuses_stays_one_node() -> None:
    inputs = _tensor(2, 2, 5, 8), _tensor(2, 2, 5, 8), _tensor(2, 2, 5, 8)
    targets = _targets(_expanded(_attention(), *inputs))
    assert targets.count(F.scaled_dot_product_attention) == 1
    assert attention_matmul not in targets


def test_attention_in_a_checkpoint_is_expanded_too() -> None:
    attention = _attention(dropout_p=0.1)

    def function(q: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(attention, q, q, q, use_reentrant=False)

    graph_module = _expanded(function, _tensor(2, 2, 5, 8))
    (body,) = [one for _, one in graph_module.named_children()]
    assert _targets(body).count(attention_matmul) == 2


def test_decomposed_result_keeps_name_of_attention() -> None:
    inputs = _tensor(2, 2, 5, 8), _tensor(2, 2, 5, 8), _tensor(2, 2, 5, 8)
    graph_module = _expanded(_attention(dropout_p=0.1), *inputs)
    names = [tensor_name(node) for node in graph_module.graph.nodes]
    assert "scaled_dot_product_attention" in names
    assert "scaled_dot_product_attention.attention_matmul" in names
    assert names.count("scaled_dot_product_attention") == 1


class _Attending(nn.Module):
    """Self-attention by torch's module, and by the function with another temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        causal = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(heads, heads, heads * 1.5, causal, 0.1)


@pytest.mark.slow
def test_dynamic_shape_graphs_are_decomposed() -> None:
    module, graphs = _Attending(), []

    def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Any:
        opened = copy_graph_module(graph_module)
        Names().assign(capture.describe(graph_module, example_inputs, module), opened)
        expand_composites(opened)
        opened.graph.lint()
        graphs.append(opened)
        return opened.forward

    opened = torch.compile(module, backend=backend)
    for length in (5, 7, 3, 9, 6, 11, 8):
        x = _tensor(2, length, 8)
        assert_same_bits(run(lambda x: opened(x), x), run(lambda x: module(x), x))
    if torch.__version__ >= "2.13":  # 2.11 captures every length anew
        assert len(graphs) <= 2
    assert any(one.graph.find_nodes(op="placeholder", sort=False) for one in graphs)
    dynamic = _targets(graphs[-1])
    assert F.multi_head_attention_forward not in dynamic
    assert F.scaled_dot_product_attention not in dynamic
    assert dynamic.count(attention_matmul) == 4


def test_attention_of_unknown_size_is_not_decomposed() -> None:
    graph_module = captured(_attention(dropout_p=0.1), *(_tensor(2, 2, 5, 8) for _ in range(3)))
    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(UnknownSize):
        SizeNodes(graph_module.graph).node_of(size)
    (node,) = graph_module.graph.find_nodes(
        op="call_function", target=F.scaled_dot_product_attention
    )
    before = [one.name for one in graph_module.graph.nodes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expand, "attention_matmul", _refused)
        expand_composites(graph_module)
    assert [one.name for one in graph_module.graph.nodes] == before
    assert matmul_of(node) is None


def _refused(*_: Any) -> Any:
    raise UnknownSize("u0")


@pytest.mark.parametrize("kernels", [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION]])
def test_attention_with_user_selected_kernel(kernels: list[SDPBackend]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernels):
            first = F.scaled_dot_product_attention(q, k, v)
        return first + F.scaled_dot_product_attention(k, q, v)

    inputs = _tensor(2, 2, 5, 8), _tensor(2, 2, 5, 8), _tensor(2, 2, 5, 8)
    graph_module = _assert_same_as(function, *inputs)
    assert _num_matmuls(graph_module) == (2 if kernels == [SDPBackend.MATH] else 0)


def test_attention_matmul_ignores_autocast() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_matmul(a, b).dtype == torch.float32
        assert (a @ b).dtype == torch.bfloat16
