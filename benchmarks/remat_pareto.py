"""Peak and step time of this planner, of torch's memory budgets, and of a checkpoint per block.

Every variant runs the same training step op by op: a GPT of 6 blocks in FP32 on a CPU. Peaks are
measured by the allocator's events and, for ours, predicted; times are interleaved medians.

    python benchmarks/remat_pareto.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, interleaved_medians, machine
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from examples.gpt import GPT
from lightning_unitscale.remat import (
    Planner,
    RematPartitioner,
    RematPlan,
    aot_backend,
    pareto_front,
)
from lightning_unitscale.remat.costs import node_flops, size_of, tensors_of
from lightning_unitscale.remat.measure import PeakMeter
from lightning_unitscale.remat.report import new_figure

TORCH_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.0)
Step = Callable[[], float]


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class _Chosen(RematPartitioner):
    """Partitions by a plan that was made before, of the same graph."""

    def __init__(self, plan: RematPlan) -> None:
        super().__init__("default")
        self._plan = plan

    def choose(self, planner: Planner) -> RematPlan:
        plan = self._plan
        return planner.made(plan.name, plan.saved, plan.kept, plan.segments)


class _Counting:
    """A partitioner, and the operations that its backward graphs run again."""

    def __init__(self, partition_fn: Callable[..., Any]) -> None:
        self._partition_fn = partition_fn
        self.flops = 0.0

    def __call__(self, joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        before = sum(map(_product_flops, joint_module.graph.nodes))
        parts = self._partition_fn(joint_module, joint_inputs, **options)
        after = sum(_product_flops(node) for part in parts for node in part.graph.nodes)
        self.flops = after - before
        return parts


def _product_flops(node: fx.Node) -> float:
    """Operations of matrix products and attention; one per element is what all others cost."""
    flops = node_flops(node)
    elements = sum(size_of(one) // one.element_size() for one in tensors_of(node.meta.get("val")))
    return flops if flops > 4 * elements else 0.0


def _torch_partition(budget: float) -> Callable[..., Any]:
    def partition(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return min_cut_rematerialization_partition(joint_module, joint_inputs, **options)

    return partition


class Bench:
    def __init__(self, width: int, depth: int, context: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(width=width, depth=depth, num_heads=8, context=context)
        self.tokens = torch.randint(0, 256, (2, batch, context))
        self.steps: dict[str, Step] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model._loss((x, y))

    def add(self, name: str, function: Callable[..., Any], **row: Any) -> None:
        def step() -> float:
            self.model.zero_grad()
            loss = function(*self.tokens)
            loss.backward()
            return loss.item()

        self.steps[name] = step
        self.rows[name] = {"variant": name, **row}

    def compiled(self, partition_fn: Any) -> tuple[Callable[..., Any], _Counting]:
        counting = _Counting(partition_fn)

        # A code object of its own for each variant: Dynamo's cache is per code.
        namespace: dict[str, Any] = {"loss": self.loss}
        exec("def step(x, y):\n    return loss(x, y)", namespace)
        return torch.compile(namespace["step"], backend=aot_backend(counting)), counting

    def measured_peak(self, step: Step) -> int:
        self.model.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        meter.start()
        meter.mark([list(self.model.parameters()), self.tokens])
        step()
        peak = meter.stop()
        assert peak is not None
        return peak

    def gradients(self, step: Step) -> list[Tensor]:
        loss = step()
        return [torch.tensor(loss), *(one.grad.clone() for one in self.model.parameters())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--plans", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plot", type=Path, default=Path("docs/images/remat_pareto.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.width, options.depth, options.context, options.batch)

    bench.add("eager", bench.loss)
    plans = pareto_front(bench.loss, *bench.tokens)
    chosen = _spread(plans, options.plans)
    counts = {}
    for plan in chosen:
        name = f"ours {plan.peak_bytes / 1e6:.0f} MB ({plan.name})"
        function, counts[name] = bench.compiled(_Chosen(plan))
        bench.add(name, function, predicted_mb=plan.peak_bytes / 1e6, kind="ours")
    for budget in TORCH_BUDGETS:
        name = f"torch budget {budget}"
        function, counts[name] = bench.compiled(_torch_partition(budget))
        bench.add(name, function, kind="torch")

    blocks = bench.model.blocks
    wrapped = nn.ModuleList(_Checkpointed(block) for block in blocks)

    def checkpointed(x: Tensor, y: Tensor) -> Tensor:
        bench.model.blocks = wrapped
        try:
            return bench.loss(x, y)
        finally:
            bench.model.blocks = blocks

    bench.add("eager, checkpoint per block", checkpointed, kind="checkpoint")

    reference = bench.gradients(bench.steps["eager"])
    for name, step in bench.steps.items():
        found = bench.gradients(step)
        same = all(map(torch.equal, found, reference))
        row = bench.rows[name]
        row["same_bits"] = same
        row["peak_mb"] = bench.measured_peak(step) / 1e6
        if name in counts:
            row["recomputed_gflop"] = max(0.0, counts[name].flops) / 1e9
        assert same or row.get("kind") != "ours", f"{name} changed a gradient"
    # Ours and torch's in turn, so that a burst of other load does not meet one kind alone.
    kinds: dict[str, int] = {}
    turns = {}
    for name, row in bench.rows.items():
        kind = str(row.get("kind"))
        turns[name] = kinds[kind] = kinds.get(kind, 0) + 1
    mixed = {name: bench.steps[name] for name in sorted(bench.steps, key=lambda one: turns[one])}
    seconds = interleaved_medians(mixed, rounds=options.rounds, warmup=1)
    for name, value in seconds.items():
        bench.rows[name]["ms"] = 1e3 * value
    rows = [_rounded(row) for row in bench.rows.values()]
    print(tabulate(rows, headers="keys"))
    title = (
        f"GPT, {options.depth} blocks of width {options.width}, {options.batch} sequences of "
        f"{options.context}: peak of a step and its time"
    )
    content = {"title": title, "machine": machine(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "remat_pareto.json").write_text(json.dumps(content, indent=1) + "\n")
    _plot(rows, options.plot)


def _spread(plans: list[RematPlan], count: int) -> list[RematPlan]:
    """Plans at even distances in their peak, the first and the last among them."""
    top, bottom = plans[0].peak_bytes, plans[-1].peak_bytes
    aims = [top - (top - bottom) * i / (count - 1) for i in range(count)]
    nearest = [min(plans, key=lambda one: abs(one.peak_bytes - aim)) for aim in aims]
    return list({one.hash: one for one in nearest}.values())


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    order = ("variant", "kind", "predicted_mb", "peak_mb", "recomputed_gflop", "ms", "same_bits")
    values = {key: row.get(key) for key in order}
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = new_figure()
    styles = {"ours": "o-", "torch": "s--", "checkpoint": "^", None: "x"}
    labels = {
        "ours": "this planner",
        "torch": "torch's activation_memory_budget",
        "checkpoint": "checkpoint per block",
        None: "eager",
    }
    for kind, style in styles.items():
        points = [(row["peak_mb"], row["ms"]) for row in rows if row["kind"] == kind]
        if kind == "ours":
            points.sort()
        axes.plot(*zip(*points, strict=True), style, label=labels[kind])
    axes.set_xlabel("peak of all tensor bytes, MB")
    axes.set_ylabel("step, ms")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
