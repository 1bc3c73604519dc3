"""Time of FP8 linear layers on a GPU: BF16, torchao's dynamic scales, constant scales.

One linear layer forward and backward at hidden sizes 1024 to 8192, and a transformer block, with
BF16 parameters and 16,384 tokens, compiled by Inductor but for what is called eager:

- "BF16": the plain module;
- "torchao": ``convert_to_float8_training``, tensorwise: a scale is found for each of three tensors
  in every step (left out where torchao is not installed);
- "dynamic": ``transforms.fp8_linears(scaling="dynamic")``, the same by this package's kernels;
- "constant": ``transforms.fp8_linears`` on ``lossless_unit_scale``: scales are known beforehand,
  with a moving grid and gradients in E4M3, as ``UnitScaleCallback(precision="fp8")`` has them;
- "constant, eager": the same without Inductor; it keeps FP8 alone for the backward pass.

It fails if anything that should run in FP8 has an error of 0, or no more error than BF16.

    python benchmarks/fp8_matmul.py --sizes 1024 2048 4096 8192
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.measure import RESULTS, machine
from lightning_unitscale.functional.low_precision import why_no_fp8
from lightning_unitscale.transforms import compile, fp8_linears, lossless_unit_scale

# The step runs on the GPU's own clock, between two of its events; the machine is not waited for.
WARMUP, ROUNDS = 10, 30
HEAD = 128
PLAIN = "BF16"


class Layer(nn.Module):
    """One linear layer of a square weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention and a feed-forward of four widths."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, width // HEAD, HEAD)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def variants(module: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, nn.Module]:
    """The module in every way, compiled."""
    made = {PLAIN: torch.compile(copy.deepcopy(module))}
    if find_spec("torchao") is not None:
        from torchao.float8 import convert_to_float8_training

        made["torchao"] = torch.compile(convert_to_float8_training(copy.deepcopy(module)))
    made["dynamic"] = compile(fp8_linears(module, scaling="dynamic", gradient_format="E5M2"))
    scaled = lossless_unit_scale(module, x)
    # Units of gradients are measured in the first backward pass.
    scaled(x).backward(gradient)
    scaled(x)
    made["constant, eager"] = fp8_linears(scaled, grid="moving")
    made["constant"] = compile(made["constant, eager"])
    return made


def medians(modules: dict[str, nn.Module], x: Tensor, gradient: Tensor) -> dict[str, float]:
    """Median milliseconds of a step of each, taken in turn."""

    def timed(module: Callable[[Tensor], Tensor]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        module(x).backward(gradient)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    samples: dict[str, list[float]] = {name: [] for name in modules}
    for index in range(WARMUP + ROUNDS):
        for name, module in modules.items():
            elapsed = timed(module)
            if index >= WARMUP:
                samples[name].append(elapsed)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def saved_bytes(modules: dict[str, nn.Module], x: Tensor) -> dict[str, int]:
    """Bytes that a forward pass leaves allocated for the backward pass."""
    found = {}
    for name, module in modules.items():
        before = torch.cuda.memory_allocated()
        result = module(x)
        found[name] = torch.cuda.memory_allocated() - before - result.nbytes
        del result
    return found


def errors(
    module: nn.Module, reference: nn.Module, x: Tensor, gradient: Tensor
) -> tuple[float, float]:
    """Relative errors of the result and of the gradient, in a step like those that were timed."""

    def step(module: nn.Module) -> tuple[Tensor, Tensor]:
        result = module(x)
        (of_input,) = torch.autograd.grad(result, x, gradient)
        return result.detach().float(), of_input.float()

    pairs = zip(step(module), step(reference), strict=True)
    forward, backward = (float((one - other).norm() / other.norm()) for one, other in pairs)
    return forward, backward


def without_fp8(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was to run in FP8 and did not: its error is none, or that of BF16.

    Args:
        rows: Of :func:`measure`.
    """
    plain = {(row["module"], row["hidden size"]): row for row in rows if row["matmuls"] == PLAIN}
    return [
        f"{row['matmuls']} ({row['module']}, {row['hidden size']})"
        for row in rows
        if row["matmuls"] != PLAIN
        and any(
            row[error] <= plain[row["module"], row["hidden size"]][error]
            for error in ("error", "gradient error")
        )
    ]


def measure(kind: str, width: int, tokens: int) -> list[dict[str, object]]:
    """Rows of the table for one module."""
    torch.manual_seed(0)
    make, shape = {"linear": (Layer, (tokens, width)), "block": (Block, (8, tokens // 8, width))}[
        kind
    ]
    module = make(width).to("cuda", torch.bfloat16)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = 1e-5 * torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    modules = variants(module, x, gradient)
    milliseconds = medians(modules, x, gradient)
    kept = saved_bytes(modules, x)
    found = {name: errors(modules[name], module, x, gradient) for name in modules}
    rows: list[dict[str, object]] = [
        {
            "module": kind,
            "hidden size": width,
            "matmuls": name,
            "ms": round(milliseconds[name], 3),
            "speed-up": round(milliseconds[PLAIN] / milliseconds[name], 3),
            "MiB kept": round(kept[name] / 2**20, 1),
            "error": float(f"{found[name][0]:.1e}"),
            "gradient error": float(f"{found[name][1]:.1e}"),
        }
        for name in modules
    ]
    torch._dynamo.reset()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--tokens", type=int, default=16384)
    args = parser.parse_args()
    reason = why_no_fp8(torch.device("cuda")) if torch.cuda.is_available() else "no CUDA device"
    if reason is not None:
        print(f"no FP8 GPU: {reason}")
        return
    rows = []
    for kind in ("linear", "block"):
        for width in args.sizes:
            measured = measure(kind, width, args.tokens)
            print(tabulate(measured, headers="keys"))
            rows += measured
    print(f"\n{args.tokens} tokens, forward and backward\n{tabulate(rows, headers='keys')}")
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    RESULTS.mkdir(exist_ok=True)
    content = {"tokens": args.tokens, "machine": about, "rows": rows}
    (RESULTS / "fp8_matmul.json").write_text(json.dumps(content, indent=1) + "\n")
    if lost := without_fp8(rows):
        sys.exit(f"These ran without FP8: {', '.join(lost)}.")


if __name__ == "__main__":
    main()
