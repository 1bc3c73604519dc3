"""Time all features on a GPU: tables, and one JSON file with the device's name.

A GPT in BF16 autocast, forward, backward and AdamW:

- unit scaling over the plain step, in eager mode and by Inductor, with CUDA graphs too;
- ``ScaleMonitor`` over the plain step, event file included;
- its row of statistics: bytes read in a second, and its time over that of ``torch.aminmax``;
- memory budgets: the time and the allocator's peak of each, and the predicted peak;
- FP8 linears over BF16 and torchao's dynamic scales, in a block of width 4,096 (``fp8_matmul.py``).

A plain step is timed before the module is scaled, a budget has the device to itself, and what a
measurement has allocated is freed before the next: the script fails if more than 1 MiB is not.

Run: ``make bench-gpu``, or ``python benchmarks/gpu.py``; with ``--rehearse`` in a small size on a
CPU, to see that it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_step import NEVER, VOCABULARY, WatchedStep, training_step
from fp8_matmul import measure as measure_fp8
from fp8_matmul import without_fp8
from measure import RESULTS, interleaved, machine
from tabulate import tabulate
from torch import Tensor, nn

from examples.gpt import GPT
from lightning_unitscale.functional.low_precision import why_no_fp8
from lightning_unitscale.memory.real_memory import PeakMeter, storage_bytes
from lightning_unitscale.profiler import profile_graph
from lightning_unitscale.remat import remat
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import new_rows
from lightning_unitscale.transforms import compile as compile_graphs
from lightning_unitscale.transforms import lossless_unit_scale, unit_scale

_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"width": 1024, "depth": 4, "context": 512, "batch": 16, "rounds": 30, "warmup": 8},
        "budgets": (1.0, 0.85, 0.7),
        "elements": (2**20, 2**28),
    },
    "cpu": {
        **{"width": 32, "depth": 1, "context": 16, "batch": 2, "rounds": 2, "warmup": 1},
        "budgets": (1.0, 0.95),
        "elements": (2**12,),
    },
}
MIB = 2**20
# Rows between two readings of the clock, so that their launches overlap.
_MANY = 20
# Steps of a training loop, which does not wait for the device after each of them.
_STEPS = 5
Batch = tuple[Tensor, Tensor]
Step = Callable[[], object]


class Loss(nn.Module):
    """``(tokens, targets) -> loss`` in BF16 autocast."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(width=width, depth=depth, num_heads=max(width // 64, 1), context=context)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = self.gpt(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _compiled(module: nn.Module, mode: str = "default") -> nn.Module:
    return torch.compile(module, mode=mode)  # type: ignore[return-value]


def _by_rules(module: nn.Module, batch: Batch) -> nn.Module:
    scaled = unit_scale(module)
    scaled(*batch)  # decides
    return scaled


def _graphs(module: nn.Module) -> nn.Module:
    return _compiled(module, "reduce-overhead")


# By what each is compared with, the plain module in another way of running it.
PLAIN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda module: module,
    "Inductor": _compiled,
    "CUDA graphs": _graphs,
}
VARIANTS: dict[str, Callable[[nn.Module, Batch], nn.Module]] = {
    "eager, plain once more": lambda module, batch: module,
    "eager, lossless": lambda module, batch: lossless_unit_scale(module, *batch),
    "eager, by rules": _by_rules,
    "Inductor, lossless": lambda module, batch: _compiled(lossless_unit_scale(module, *batch)),
    "Inductor, by rules": lambda module, batch: compile_graphs(_by_rules(module, batch)),
    "CUDA graphs, lossless": lambda module, batch: _graphs(lossless_unit_scale(module, *batch)),
}


class Bench:
    """A device, the sizes for it and a batch on it.

    Args:
        device: Where everything runs.

    Attributes:
        left: By measurement, bytes that it has left allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.sizes = device, _SIZES[device.type]
        self.left: dict[str, int] = {}
        generator = torch.Generator().manual_seed(1)
        shape = (self.sizes["batch"], self.sizes["context"] + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def module(self) -> nn.Module:
        """The plain module, always with the same parameters."""
        sizes = self.sizes
        return Loss(sizes["width"], sizes["depth"], sizes["context"]).to(self.device)

    def clock(self) -> float:
        """The time at which the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Note what is left on the device of what is made within."""
        before = self._allocated()
        yield
        torch._dynamo.reset()
        self.left[name] = self._allocated() - before

    def _allocated(self) -> int:
        gc.collect()
        if self.device.type == "cuda":
            # Each thread that has multiplied has a workspace, for good.
            torch._C._cuda_clearCublasWorkspaces()
            return torch.cuda.memory_allocated()
        tensors = (Tensor, nn.Parameter)  # and no fake ones, of what was compiled
        return storage_bytes([one for one in gc.get_objects() if type(one) in tensors])


def eager(bench: Bench) -> Iterator[dict[str, Any]]:
    """A row for each variant in eager mode, and for the monitor."""
    yield from _overheads(bench, ("eager",))
    for name, every_n_steps in {"not sampled": NEVER, "every step": 1}.items():
        name = f"eager, monitor, {name}"
        with bench.alone(name), tempfile.TemporaryDirectory() as folder:
            plain = _plain(bench, name)
            to = None if every_n_steps == NEVER else folder
            with contextlib.closing(
                WatchedStep(bench.module(), bench.batch, every_n_steps, to)
            ) as watched:
                row = _row(bench, name, watched, plain)
            del watched
        yield row


def compiled(bench: Bench) -> Iterator[dict[str, Any]]:
    """A row for each variant under Inductor, and in CUDA graphs."""
    yield from _overheads(bench, ("Inductor", "CUDA graphs"))


def _overheads(bench: Bench, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    for name, make in VARIANTS.items():
        if name.partition(",")[0] in ways:
            with bench.alone(name):
                plain = _plain(bench, name)
                step = training_step(make(bench.module(), bench.batch), bench.batch)
                row = _row(bench, name, step, plain)
                del step
            yield row


def _plain(bench: Bench, name: str) -> tuple[float, float]:
    """Milliseconds of the plain step of a variant, before anything is attached to a module."""
    # While the default method is attached to one module, matmuls of all modules take longer.
    way = name.partition(",")[0]
    return _milliseconds(bench, training_step(PLAIN[way](bench.module()), bench.batch))


def _milliseconds(bench: Bench, step: Step) -> tuple[float, float]:
    """Median milliseconds of a step after which the host waits, and of one in a row."""
    rounds, warmup = bench.sizes["rounds"], bench.sizes["warmup"]
    one = interleaved({"": step}, rounds=rounds, warmup=warmup, clock=bench.clock)
    several = interleaved(
        {"": _in_a_row(step)}, rounds=max(1, rounds // _STEPS), warmup=1, clock=bench.clock
    )
    return 1e3 * statistics.median(one[""]), 1e3 * statistics.median(several[""]) / _STEPS


def _row(bench: Bench, name: str, step: Step, plain: tuple[float, float]) -> dict[str, Any]:
    one, in_a_row = _milliseconds(bench, step)
    return {
        "variant": name,
        "ms per step": round(one, 3),
        "plain, ms": round(plain[0], 3),
        "ratio": round(one / plain[0], 3),
        "in a row, ms": round(in_a_row, 3),
        "ratio in a row": round(in_a_row / plain[1], 3),
    }


def _in_a_row(step: Step) -> Step:
    """Several steps between two readings of the clock: the host need not wait for the device."""

    def steps() -> None:
        for _ in range(_STEPS):
            step()

    return steps


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time the monitor's statistics and aminmax for each type and number of elements."""
    for dtype, numel in itertools.product((torch.bfloat16, torch.float32), bench.sizes["elements"]):
        with bench.alone(f"row of {numel} elements, {dtype}"):
            tensor = torch.randn(numel, device=bench.device, dtype=dtype)
            taken = interleaved(
                {
                    "row": functools.partial(_many_rows, tensor),
                    "aminmax": lambda tensor=tensor: [torch.aminmax(tensor) for _ in range(_MANY)],
                },
                rounds=bench.sizes["rounds"],
                warmup=bench.sizes["warmup"],
                clock=bench.clock,
            )
            row, aminmax = (statistics.median(times) / _MANY for times in taken.values())
            size = tensor.nbytes
            del tensor
        yield {
            "type": str(dtype).removeprefix("torch."),
            "elements": numel,
            "µs per row": round(1e6 * row, 1),
            "aminmax, µs": round(1e6 * aminmax, 1),
            "ratio": round(row / aminmax, 3),
            "TB/s": round(size / row / 1e12, 3),
        }


def _many_rows(tensor: Tensor) -> None:
    collected = new_rows(RowLayout().measured, tensor.device)
    for _ in range(_MANY):
        collected.add(tensor)
    collected.finish()


def budgets(bench: Bench) -> Iterator[dict[str, Any]]:
    """A row for each budget: predicted and measured peak, and the time of a step."""
    for budget in bench.sizes["budgets"]:
        with bench.alone(f"budget {budget}"):
            row = _with_budget(bench, budget)
        yield row


def _with_budget(bench: Bench, budget: float) -> dict[str, Any]:
    row: dict[str, Any] = {"budget": budget}
    module = bench.module()
    if budget == 1.0:
        profile = profile_graph(
            module, *bench.batch, device=bench.device.type, optimizer=torch.optim.AdamW
        )
        row["predicted peak, MiB"] = round(profile.peak_bytes / MIB, 1)
    else:
        module = remat(module, budget)
    gc.collect()  # the plain module, in whose place there is a copy
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        module(*bench.batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    meter = PeakMeter(bench.device)
    meter.start()
    step()
    state = [dict(values) for values in optimizer.state.values()]
    meter.mark([*module.parameters(), *module.buffers(), state, *bench.batch])
    del state
    step()
    row["measured peak, MiB"] = round((meter.stop() or 0) / MIB, 1)
    rounds = bench.sizes["rounds"]
    taken = interleaved({"step": step}, rounds=rounds, warmup=1, clock=bench.clock)["step"]
    return {**row, "ms per step": round(1e3 * statistics.median(taken), 3)}


def fp8(bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows of ``fp8_matmul.py``; none where the device has no such matmuls."""
    if bench.device.type == "cuda" and why_no_fp8(bench.device) is None:
        with bench.alone("fp8"):
            rows = measure_fp8("block", 4096, 16384)
        yield from rows


PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    "eager": eager,
    "rows": rows,
    "compiled": compiled,
    "budgets": budgets,
    "fp8": fp8,
}


def main() -> int:
    """Measure, print the tables and write the JSON, after each row; 1 if memory was not freed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="in a small size on the CPU")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; pass --rehearse to see that this starts.")
    if options.rehearse:
        # Compiled graphs call torch's own kernels, which need no C++ compiler.
        importlib.import_module("torch._inductor.config").fallback_by_default = True
    bench = Bench(torch.device("cpu" if options.rehearse else "cuda"))
    results: dict[str, Any] = {"machine": machine(), "sizes": bench.sizes, "left": bench.left}
    training_step(bench.module(), bench.batch)()  # what libraries keep for good
    options.output.parent.mkdir(exist_ok=True)
    for name in options.only:
        for row in PARTS[name](bench):
            results.setdefault(name, []).append(row)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
        if name in results:
            print(f"{name}\n{tabulate(results[name], headers='keys')}\n", flush=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    left = {name: size for name, size in bench.left.items() if size > MIB}
    if left:
        print(f"still allocated, in bytes: {left}", file=sys.stderr)
    lost = without_fp8(results.get("fp8", []))
    if lost:
        print(f"These ran without FP8: {', '.join(lost)}.", file=sys.stderr)
    return bool(left or lost)


if __name__ == "__main__":
    sys.exit(main())
