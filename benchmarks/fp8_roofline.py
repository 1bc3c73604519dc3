"""Compute the least time of a transformer block on a GPU, in BF16 and in FP8.

Counted, not measured: the graph of a forward and backward pass is made of tensors without data, so
this runs anywhere. A matmul and attention take the larger of two times: operations over the GPU's
peak, and bytes over its bandwidth. Everything else is fused as far as it can be: operations that
follow one another read what comes from outside once, and write what others read once.

The FP8 block runs the package's own layer, with constant scales and Inductor's casts. What is left
beside its matmuls, in the last table, is what better kernels could still save. Peaks are those of
NVIDIA's data sheet for an H100 SXM, dense; other GPUs are given by arguments.

    python benchmarks/fp8_roofline.py --sizes 2048 4096 8192
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.fp8_matmul import Block
from benchmarks.measure import RESULTS
from lightning_unitscale.functional.low_precision import fp8_linear

aten = torch.ops.aten
MATMULS, ATTENTION, REST = "matmuls", "attention", "the rest"
_ONES = (1.0,) * 3
# Operators that only change how memory is read.
_VIEWS = ("view", "t", "transpose", "permute", "select", "unbind", "reshape", "slice", "detach")


@dataclass(frozen=True)
class GPU:
    """What a GPU can do at most.

    Attributes:
        bf16: BF16 operations in a second, in units of 1e12.
        fp8: The same in FP8.
        bandwidth: Bytes in a second, in units of 1e12.
    """

    bf16: float = 989.0
    fp8: float = 1979.0
    bandwidth: float = 3.35


@dataclass
class Work:
    """What a kind of operation has to do in a step.

    Attributes:
        tflops: Operations, in units of 1e12.
        gigabytes: Bytes that it reads and writes, in units of 1e9.
        milliseconds: The least time that this takes.
    """

    tflops: float = 0.0
    gigabytes: float = 0.0
    milliseconds: float = 0.0


class FP8Linear(nn.Linear):
    """A linear layer in FP8 with constant scales."""

    def forward(self, input: Tensor) -> Tensor:
        return fp8_linear(input, self.weight, self.bias, input.dtype, *_ONES)


def graph_of(width: int, tokens: int, *, is_fp8: bool) -> fx.Graph:
    """The operations of a block's forward and backward pass."""
    with torch.device("meta"):
        block = Block(width)
    if is_fp8:
        for layer in (block.qkv, block.out, block.up, block.down):
            layer.__class__ = FP8Linear
    with FakeTensorMode():
        parameters = {
            name: torch.empty(parameter.shape, dtype=torch.bfloat16, requires_grad=True)
            for name, parameter in block.named_parameters()
        }
        x = torch.empty(8, tokens // 8, width, dtype=torch.bfloat16, requires_grad=True)

        def step(parameters: dict[str, Tensor], x: Tensor, gradient: Tensor) -> Any:
            result = torch.func.functional_call(block, parameters, (x,))
            return torch.autograd.grad(result, [*parameters.values(), x], gradient)

        return make_fx(step)(parameters, x, torch.empty_like(x)).graph


def work_of(graph: fx.Graph, gpu: GPU) -> dict[str, Work]:
    """The work of each kind of operation in a graph."""
    found: dict[str, Work] = defaultdict(Work)
    rest: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or _is_view(node):
            continue
        flops, is_attention = _flops(node)
        if flops == 0:
            rest.append(node)
            continue
        is_fp8 = any(value.dtype.itemsize == 1 for value in _values(node.all_input_nodes))
        num_bytes = _bytes(node.all_input_nodes) + _bytes([node])
        seconds = max(
            flops / (gpu.fp8 if is_fp8 else gpu.bf16) / 1e12, num_bytes / gpu.bandwidth / 1e12
        )
        _add(found[ATTENTION if is_attention else MATMULS], flops, num_bytes, seconds)
    for group in _fused(rest):
        inputs = {_source(read) for node in group for read in node.all_input_nodes} - group
        outputs = {node for node in group if not _readers(node) <= group}
        num_bytes = _bytes(inputs) + _bytes(outputs)
        _add(found[REST], 0, num_bytes, num_bytes / gpu.bandwidth / 1e12)
    return dict(found)


def _add(work: Work, flops: float, num_bytes: float, seconds: float) -> None:
    work.tflops += flops / 1e12
    work.gigabytes += num_bytes / 1e9
    work.milliseconds += seconds * 1e3


def _flops(node: fx.Node) -> tuple[float, bool]:
    """Operations of a node, and whether it is attention, of which a causal mask leaves half."""
    name = str(node.target)
    values = [arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in node.args]
    if "scaled_dot_product" in name:
        shapes = [value.shape for value in values[:4] if isinstance(value, Tensor)]
        is_backward = "backward" in name
        count = sdpa_backward_flop_count(*shapes) if is_backward else sdpa_flop_count(*shapes[:3])
        return count / 2, True
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0, False
    return float(flop_registry[packet](*values, out_val=node.meta["val"])), False


def _is_view(node: fx.Node) -> bool:
    name = str(node.target).split(".")[1] if "." in str(node.target) else "getitem"
    return name in ("getitem", "_unsafe_view", "expand", "alias", *_VIEWS)


def _source(node: fx.Node) -> fx.Node:
    """What a view is one of."""
    while node.op == "call_function" and _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node) -> set[fx.Node]:
    readers: set[fx.Node] = set()
    for user in node.users:
        is_view = user.op == "call_function" and _is_view(user)
        readers |= _readers(user) if is_view else {user}
    return readers


def _fused(nodes: list[fx.Node]) -> list[set[fx.Node]]:
    """Groups of operations that read one another's results."""
    groups: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        group = {node}
        for read in map(_source, node.all_input_nodes):
            group |= groups.get(read, set())
        groups.update(dict.fromkeys(group, group))
    return [set(group) for group in {frozenset(group) for group in groups.values()}]


def _values(nodes: Iterable[fx.Node]) -> list[Tensor]:
    found = []
    for node in nodes:
        value = node.meta.get("val")
        found += [one for one in (value if isinstance(value, (list, tuple)) else [value])]
    return [value for value in found if isinstance(value, Tensor)]


def _bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(math.prod(value.shape) * value.dtype.itemsize for value in _values(nodes))


def rows_of(width: int, tokens: int, gpu: GPU) -> list[dict[str, Any]]:
    """A row for each kind of operation, and for all of them."""
    works = {
        name: work_of(graph_of(width, tokens, is_fp8=name == "FP8"), gpu)
        for name in ("BF16", "FP8")
    }
    rows = []
    for kind in (MATMULS, ATTENTION, REST):
        row: dict[str, Any] = {"width": width, "of": kind}
        for name, work in works.items():
            row |= {f"{name} {key}": value for key, value in asdict(work[kind]).items()}
        rows.append(row)
    total = {"width": width, "of": "all"}
    rows.append(total | {key: sum(row[key] for row in rows) for key in rows[0] if " " in key})
    for row in rows:
        row["BF16 / FP8"] = row["BF16 milliseconds"] / row["FP8 milliseconds"]
    return rows


def main() -> None:
    """Print the tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=16384)
    for name, value in asdict(GPU()).items():
        parser.add_argument(f"--{name}", type=float, default=value)
    args = parser.parse_args()
    gpu = GPU(args.bf16, args.fp8, args.bandwidth)
    rows = [row for width in args.sizes for row in rows_of(width, args.tokens, gpu)]
    print(f"{args.tokens} tokens, forward and backward, at least; {gpu}")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    content = {"tokens": args.tokens, "gpu": asdict(gpu), "torch": torch.__version__, "rows": rows}
    (RESULTS / "fp8_roofline.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
