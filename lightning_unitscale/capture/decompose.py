"""Expand composite operations whose matmuls the passes could not reach otherwise.

Dynamo does not split multi-head attention. Scaled dot-product attention may run as two matmuls and
a softmax. Both are replaced by the operations torch would run, in the same order, so every bit
stays the same. Attention that torch runs as one fused kernel stays one node.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.proxy import GraphAppendingTracer
from torch.nn.attention import SDPBackend, _sdpa_kernel, sdpa_kernel
from torch.overrides import TorchFunctionMode, wrap_torch_function
from torch.utils._pytree import tree_map
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from lightning_unitscale.capture.copy_graphs import autocast_dtypes, fake_mode_of
from lightning_unitscale.capture.graph_nodes import (
    MODULE,
    NAME,
    TRANSFORMED,
    example_tensor,
    op_name,
    tensor_name,
    tensors_in,
    without_frame,
    without_number,
)
from lightning_unitscale.functional.rules import concrete_size


class UnknownSize(Exception):
    """Error for a size that cannot be computed from the graph's inputs."""


class SizeNodes:
    """Symbolic sizes written into a graph as arithmetic on its inputs."""

    def __init__(self, graph: fx.Graph) -> None:
        tracer = GraphAppendingTracer(graph)
        self._inputs: dict[Any, fx.Proxy] = {}
        for node in graph.find_nodes(op="placeholder"):
            example = node.meta.get("example_value")
            if isinstance(example, torch.SymInt):
                self._inputs[example.node.expr] = fx.Proxy(node, tracer)

    def node_of(self, size: torch.SymInt) -> fx.Node | int:
        """Return the node of a size, made at the insertion point, or a number if it is static."""
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if not expression.free_symbols <= self._inputs.keys():
            raise UnknownSize(str(expression))
        found = sympy_interp(PythonReferenceAnalysis, self._inputs, expression)
        node: fx.Node = found.node
        if "example_value" not in node.meta:
            node.meta["example_value"] = size
        return node


@wrap_torch_function(lambda input, other: (input, other))
def attention_matmul(input: Tensor, other: Tensor) -> Tensor:
    """Run ``input @ other`` as attention does: below autocast, in the given type."""
    with torch.autocast(input.device.type, enabled=False):
        return torch.matmul(input, other)


def expand_composites(
    graph_module: fx.GraphModule, decided: Mapping[str, bool] = MappingProxyType({})
) -> None:
    """Expand attention in the graph and in the graphs nested in it.

    ``decided`` says of scaled dot-product attentions, by name, whether to expand them.
    """
    for node in list(graph_module.graph.nodes):
        nested = getattr(graph_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(nested, fx.GraphModule):
            expand_composites(nested, decided)
    sizes = SizeNodes(graph_module.graph)
    for node in graph_module.graph.find_nodes(
        op="call_function", target=F.multi_head_attention_forward
    ):
        _expand(graph_module, node, open_function(F.multi_head_attention_forward), sizes)
    autocast, kernels = autocast_dtypes(graph_module.graph), _chosen_kernels(graph_module.graph)
    for node in graph_module.graph.find_nodes(
        op="call_function", target=F.scaled_dot_product_attention
    ):
        name = without_frame(tensor_name(node))
        # A step may call a module more often than the step that decided, to generate for example.
        is_expanded = decided.get(name, decided.get(without_number(name)))
        dtype = autocast.get(node)
        if _runs_as_matmuls(node, dtype, kernels.get(node), is_expanded):
            _expand(graph_module, node, attention_as_matmuls(dtype), sizes)
    graph_module.recompile()


def attention_as_matmuls(
    autocast_dtype: torch.dtype | None, dropout: Callable[..., Tensor] | None = None
) -> Callable[..., Tensor]:
    """Return a function that runs attention as separate operations, with this dropout."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run the operations of torch's composite attention, in its order (checked on 2.13)."""
        if autocast_dtype is not None:
            query, key, value = (tensor.to(autocast_dtype) for tensor in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(autocast_dtype)
        dtype = query.dtype
        if is_causal:
            length, num_keys = query.size(-2), key.size(-2)
            attn_mask = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zeros = torch.zeros(attn_mask.shape, dtype=dtype, device=query.device)
            attn_mask = zeros.masked_fill(attn_mask.logical_not(), -math.inf)
        in_16_bits = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        if dtype in {torch.float16, torch.bfloat16} and not in_16_bits:
            query, key, value = query.float(), key.float(), value.float()
        logit_scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
        root = math.sqrt(abs(logit_scale))
        query = query * (-root if logit_scale < 0 else root)
        if enable_gqa:
            heads = query.size(-3)
            key = key.repeat_interleave(heads // key.size(-3), -3)
            value = value.repeat_interleave(heads // value.size(-3), -3)
        scores = attention_matmul(query, key.transpose(-2, -1) * root)
        if attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.ops.aten._safe_softmax.default(scores, -1)
        if dropout_p > 0.0:
            weights = (dropout or torch.dropout)(weights, dropout_p, True)
        return attention_matmul(weights, value).to(dtype)

    return attention


def _chosen_kernels(graph: fx.Graph) -> dict[fx.Node, list[SDPBackend]]:
    """Return the kernels that ``sdpa_kernel`` allows for each node within it."""
    chosen: dict[fx.Node, list[SDPBackend]] = {}
    now: list[SDPBackend] | None = None
    for node in graph.nodes:
        if node.target is _sdpa_kernel:
            # Each is a node of a function with this name.
            now = [getattr(SDPBackend, str(argument.args[0])) for argument in node.all_input_nodes]
        elif now is not None:
            chosen[node] = now
    return chosen


def _runs_as_matmuls(
    node: fx.Node,
    autocast_dtype: torch.dtype | None,
    kernels: list[SDPBackend] | None,
    decided: bool | None,
) -> bool:
    """Check whether torch runs attention of these shapes and types as matmuls and a softmax."""
    bound = inspect.signature(attention_as_matmuls(None)).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    numbers = (given["dropout_p"], given["scale"] or 0.0)
    examples = [example_tensor(given[name]) for name in ("query", "key", "value")]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return False
    if any(example is None or example.is_nested for example in examples):
        return False
    if decided is not None:
        return decided
    mask = example_tensor(given["attn_mask"])
    with torch.enable_grad(), nullcontext() if kernels is None else sdpa_kernel(kernels):
        query, key, value = (_real_like(example, autocast_dtype) for example in examples)
        given["attn_mask"] = None if mask is None else _real_like(mask, autocast_dtype)
        given.update(query=query, key=key, value=value)
        return int(torch._fused_sdp_choice(**given)) == 0


def _real_like(fake: Tensor | None, autocast_dtype: torch.dtype | None) -> Tensor:
    """Allocate uninitialized memory of the fake tensor's layout, which the choice depends on."""
    assert fake is not None
    dtype = fake.dtype
    if autocast_dtype is not None and dtype.is_floating_point and dtype != torch.float64:
        dtype = autocast_dtype
    size = [concrete_size(length) for length in fake.size()]
    stride = [concrete_size(length) for length in fake.stride()]
    real = torch.empty_strided(size, stride, dtype=dtype, device=fake.device)
    return real.requires_grad_(fake.requires_grad and dtype.is_floating_point)


def open_function(function: Any) -> Callable[..., Any]:
    """Copy a functional so that a torch function mode sees the operations in it."""
    scope = {
        **function.__globals__,
        "has_torch_function": lambda *_: False,
        "has_torch_function_unary": lambda *_: False,
        "has_torch_function_variadic": lambda *_: False,
    }
    opened = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _expand(
    graph_module: fx.GraphModule, node: fx.Node, function: Callable[..., Any], sizes: SizeNodes
) -> None:
    """Replace ``node`` by the operations that ``function`` makes of its arguments."""
    graph = graph_module.graph
    recorder = _NodeRecorder(graph, node, sizes)
    before = node.prev
    example = node.meta.get("example_value")
    differentiable = any(tensor.requires_grad for tensor in tensors_in(example))
    args, kwargs = tree_map(recorder.value_of, (tuple(node.args), dict(node.kwargs)))
    try:
        with (
            fake_mode_of(graph),
            graph.inserting_before(node),
            torch.set_grad_enabled(differentiable),
            recorder,
        ):
            result = function(*args, **kwargs)
    except UnknownSize:
        while node.prev is not before:
            graph.erase_node(node.prev)
        # Units cannot be changed inside the composite. Around it, they would change its path: the
        # choice depends on whether query and key are the same tensor, and the root of the
        # temperature is not exact.
        node.meta[TRANSFORMED] = True
        return
    replacement = recorder.node_of(result)
    if isinstance(replacement, fx.Node):
        # The result keeps the composite's name, which users know.
        replacement.meta[NAME] = tensor_name(node)
        node.replace_all_uses_with(replacement)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(replacement[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


class _NodeRecorder(TorchFunctionMode):
    """Mode that runs torch functions on example tensors and records each as a node."""

    def __init__(self, graph: fx.Graph, origin: fx.Node, sizes: SizeNodes) -> None:
        super().__init__()
        self.graph = graph
        self.origin = origin
        self.sizes = sizes
        self._nodes: dict[int, fx.Node] = {}
        self._values: dict[fx.Node, Tensor] = {}
        # Tensors are identified by their id, so they must outlive the recording.
        self._alive: list[Tensor] = []
        self._count: Counter[str] = Counter()

    def value_of(self, argument: Any) -> Any:
        """Return the example value of a node argument, and remember it as that node's."""
        if not isinstance(argument, fx.Node):
            return argument
        value = argument.meta["example_value"]
        if argument in self._values:
            # ``query is key`` decides how multi-head attention projects its inputs.
            return self._values[argument]
        if isinstance(value, Tensor):
            # Two nodes may share one example (an in-place operation). A view separates them.
            value = value.detach().requires_grad_(value.requires_grad)
            self._values[argument] = value
            self._remember(value, argument)
        return value

    def node_of(self, result: Any) -> Any:
        """Replace the tensors, and the sizes that may change, in ``result`` by nodes."""
        return tree_map(self._node_of_one, result)

    def _node_of_one(self, value: Any) -> Any:
        if isinstance(value, torch.Size):
            return tuple([self._node_of_one(size) for size in value])
        if isinstance(value, torch.SymInt):
            return self.sizes.node_of(value)
        return self._nodes[id(value)] if isinstance(value, Tensor) else value

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = tensors_in(result)
        if not tensors or all(id(tensor) in self._nodes for tensor in tensors):
            return result
        node = self._create(func, self.node_of(tuple(args)), self.node_of(kwargs))
        node.meta["example_value"] = result
        self._name(node)
        if isinstance(result, Tensor):
            self._remember(result, node)
        else:
            for index, tensor in enumerate(result):
                item = self.graph.call_function(operator.getitem, (node, index))
                item.meta["example_value"] = tensor
                self._name(item)
                self._remember(tensor, item)
        return result

    def _create(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if getattr(Tensor, name, None) is func:
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _name(self, node: fx.Node) -> None:
        for key in ("nn_module_stack", "stack_trace", MODULE):
            if key in self.origin.meta:
                node.meta[key] = self.origin.meta[key]
        base = f"{tensor_name(self.origin)}.{op_name(node)}"
        count = self._count[base]
        self._count[base] += 1
        node.meta[NAME] = f"{base}_{count}" if count else base

    def _remember(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
