"""Peak and step time of this planner, torch's memory budgets, and a checkpoint per block.

Every variant runs the same training step op by op in FP32 on a CPU, for each of five models. Peaks
are measured by the allocator's events and, for ours, predicted; times are interleaved medians.
Results are kept in the JSON file model by model.

    python benchmarks/remat_pareto.py                   # the GPT of 6 blocks
    python benchmarks/remat_pareto.py --models all      # and of 48, ViT, ResNet, Llama with GQA
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import RESULTS, interleaved_medians, machine
from examples.gpt import GPT
from lightning_unitscale.memory.costs import aten_node_costs, concrete, operator_flops
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.remat import (
    Planner,
    RematPartitioner,
    RematPlan,
    aot_backend,
    pareto_front,
)

TORCH_BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.0)
PLOT = Path(__file__).parent.parent / "docs" / "images" / "remat_pareto.png"
Step = Callable[[], float]
# Operations that count as random, attention among them, run inside of these when they run again.
_REPLAYS = {run_and_save_rng_state: 0, run_with_rng_state: 1}


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


class _Chosen(RematPartitioner):
    """Partitions by a plan that was made before, of the same graph."""

    def __init__(self, plan: RematPlan) -> None:
        super().__init__("default")
        self._plan = plan

    def choose(self, planner: Planner) -> RematPlan:
        plan = self._plan
        return planner.plan_of(plan.name, plan.saved, plan.kept)


class _Counting:
    """A partitioner, and the operations that its backward graphs run again."""

    def __init__(self, partition_fn: Callable[..., Any]) -> None:
        self._partition_fn = partition_fn
        self.flops = 0.0

    def __call__(self, joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        before = sum(map(_matmul_flops, joint_module.graph.nodes))
        parts = self._partition_fn(joint_module, joint_inputs, **options)
        after = sum(_matmul_flops(node) for part in parts for node in part.graph.nodes)
        self.flops = after - before
        return parts


def _matmul_flops(node: fx.Node) -> float:
    """Operations of matmuls, convolutions and attention."""
    for wrapper, index in _REPLAYS.items():
        if node.target is wrapper:
            args = fx.node.map_arg(node.args[index + 1 :], lambda read: concrete(read.meta["val"]))
            result = concrete(node.meta.get("val"))
            return operator_flops(node.args[index], args, node.kwargs, result)
    return aten_node_costs(node).flops


def _torch_partition(budget: float) -> Callable[..., Any]:
    def partition(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return min_cut_rematerialization_partition(joint_module, joint_inputs, **options)

    return partition


@dataclass
class Subject:
    """A model, what a step computes from its inputs, and the lists that hold its blocks."""

    title: str
    model: nn.Module
    loss: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    blocks: list[nn.ModuleList]


def _gpt(depth: int, width: int, context: int, batch: int) -> Subject:
    model = GPT(width=width, depth=depth, num_heads=8, context=context)
    tokens, targets = torch.randint(0, 256, (2, batch, context))
    title = f"GPT, {depth} blocks of width {width}, {batch} sequences of {context}"
    return Subject(
        title, model, lambda x, y: model._loss((x, y)), (tokens, targets), [model.blocks]
    )


def _llama() -> Subject:
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 1024, (4, 256))
    title = "Llama, 6 blocks of width 256, 8 heads and 2 of keys, 4 sequences of 256"
    layers = cast(nn.ModuleList, model.model.layers)
    return Subject(title, model, lambda x: model(x, labels=x).loss, (tokens,), [layers])


def _vit() -> Subject:
    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=768,
        image_size=96,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)
    images, labels = torch.randn(8, 3, 96, 96), torch.randint(0, 10, (8,))
    title = "ViT, 6 blocks of width 192, 8 images of 96 x 96 in patches of 8"
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return Subject(title, model, lambda x, y: model(x, labels=y).loss, (images, labels), [layers])


def _resnet() -> Subject:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 256], depths=[3, 3, 3], num_labels=10
    )
    model = transformers.ResNetForImageClassification(config)
    images, labels = torch.randn(16, 3, 96, 96), torch.randint(0, 10, (16,))
    title = "ResNet, 3 stages of 3 bottlenecks, batch norm in training, 16 images of 96 x 96"
    blocks = [cast(nn.ModuleList, stage.layers) for stage in model.resnet.encoder.stages]
    return Subject(title, model, lambda x, y: model(x, labels=y).loss, (images, labels), blocks)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt6": lambda: _gpt(6, 256, 256, 4),
    "gpt48": lambda: _gpt(48, 64, 128, 4),
    "vit": _vit,
    "resnet": _resnet,
    "llama": _llama,
}


class Bench:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.model = subject.model
        self.loss = subject.loss
        self.inputs = subject.inputs
        self.steps: dict[str, Step] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, function: Callable[..., Any], **row: Any) -> None:
        def step() -> float:
            self.model.zero_grad()
            loss = function(*self.inputs)
            loss.backward()
            return loss.item()

        self.steps[name] = step
        self.rows[name] = {"variant": name, **row}

    def compiled(self, partition_fn: Any) -> tuple[Callable[..., Any], _Counting]:
        counting = _Counting(partition_fn)

        # A code object of its own for each variant: Dynamo's cache is per code.
        namespace: dict[str, Any] = {"loss": self.loss}
        exec("def step(*inputs):\n    return loss(*inputs)", namespace)
        return torch.compile(namespace["step"], backend=aot_backend(counting)), counting

    def measured_peak(self, step: Step) -> int:
        self.model.zero_grad()
        meter = PeakMeter(torch.device("cpu"))
        meter.start()
        meter.mark([list(self.model.parameters()), list(self.model.buffers()), self.inputs])
        step()
        peak = meter.stop()
        assert peak is not None
        return peak

    def gradients(self, step: Step) -> list[Tensor]:
        loss = step()
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        return [torch.tensor(loss), *(gradient.clone() for gradient in gradients)]

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Every block under ``torch.utils.checkpoint``."""
        blocks = [list(modules) for modules in self.subject.blocks]
        for modules in self.subject.blocks:
            for i, block in enumerate(modules):
                modules[i] = _Checkpointed(block)
        try:
            yield
        finally:
            for modules, plain in zip(self.subject.blocks, blocks, strict=True):
                for i, block in enumerate(plain):
                    modules[i] = block


def examine(
    subject: Subject, num_plans: int, rounds: int, torch_budgets: Sequence[float]
) -> list[dict[str, Any]]:
    """One row for each variant."""
    torch._dynamo.reset()
    bench = Bench(subject)
    bench.add("eager", bench.loss)
    chosen = _spread(pareto_front(bench.loss, *bench.inputs), num_plans)
    counts = {}
    for plan in chosen:
        name = f"ours {plan.peak_bytes / 1e6:.1f} MB ({plan.name})"
        function, counts[name] = bench.compiled(_Chosen(plan))
        bench.add(name, function, predicted_mb=plan.peak_bytes / 1e6, kind="ours")
    for budget in torch_budgets:
        name = f"torch budget {budget}"
        function, counts[name] = bench.compiled(_torch_partition(budget))
        bench.add(name, function, kind="torch")

    def checkpointed(*inputs: Tensor) -> Tensor:
        with bench.checkpointed():
            return bench.loss(*inputs)

    bench.add("eager, checkpoint per block", checkpointed, kind="checkpoint")

    reference = bench.gradients(bench.steps["eager"])
    default: list[Tensor] | None = None
    for name, step in bench.steps.items():
        row = bench.rows[name]
        try:
            found = bench.gradients(step)
        except RuntimeError as error:
            assert row.get("kind") == "torch", f"{name} fails"
            row["error"] = str(error).splitlines()[0]
            print(f"{name}: {row['error']}")
            continue
        if row.get("kind") == "ours":
            default = default or found
            row["like default"] = all(map(torch.equal, found, default))
            assert row["like default"], f"{name} changed a gradient"
        row["like eager"] = all(map(torch.equal, found, reference))
        row["peak_mb"] = bench.measured_peak(step) / 1e6
        if name in counts:
            row["recomputed_gflop"] = max(0.0, counts[name].flops) / 1e9
    # Ours and torch's in turn, so that a burst of other load does not meet one kind alone.
    kinds: dict[str, int] = {}
    turns = {}
    for name, row in bench.rows.items():
        if "error" in row:
            del bench.steps[name]
        kind = str(row.get("kind"))
        turns[name] = kinds[kind] = kinds.get(kind, 0) + 1
    mixed = {name: bench.steps[name] for name in sorted(bench.steps, key=lambda name: turns[name])}
    seconds = interleaved_medians(mixed, rounds=rounds, warmup=1)
    for name, value in seconds.items():
        bench.rows[name]["ms"] = 1e3 * value
    return [_rounded(row) for row in bench.rows.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["gpt6"], choices=["all", *SUBJECTS])
    parser.add_argument("--plans", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch-budgets", type=float, nargs="*", default=TORCH_BUDGETS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = RESULTS / "remat_pareto.json"
    results = json.loads(file.read_text())["models"] if file.exists() else {}
    for name in SUBJECTS if "all" in options.models else options.models:
        torch.manual_seed(0)
        subject = SUBJECTS[name]()
        rows = examine(subject, options.plans, options.rounds, options.torch_budgets)
        print(f"{subject.title}\n{tabulate(rows, headers='keys')}\n", flush=True)
        results[name] = {"title": subject.title, "rows": rows}
        file.write_text(json.dumps({"machine": machine(), "models": results}, indent=1) + "\n")
    _plot(results)


def _spread(plans: list[RematPlan], count: int) -> list[RematPlan]:
    """Plans at even distances in their peak, the first and the last among them."""
    top, bottom = plans[0].peak_bytes, plans[-1].peak_bytes
    aims = [top - (top - bottom) * i / (count - 1) for i in range(count)]
    nearest = [min(plans, key=lambda plan: abs(plan.peak_bytes - aim)) for aim in aims]
    return list({plan.hash: plan for plan in nearest}.values())


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    measured = ("predicted_mb", "peak_mb", "recomputed_gflop", "ms")
    order = ("variant", "kind", *measured, "like default", "like eager", "error")
    values = {key: row.get(key) for key in order}
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}


def _plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in SUBJECTS if name in results]
    styles = {"ours": "o-", "torch": "s--", "checkpoint": "^", None: "x"}
    labels = {
        "ours": "this planner",
        "torch": "torch's activation_memory_budget",
        "checkpoint": "checkpoint per block",
        None: "eager",
    }
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(5.5 * columns, 4.2 * lines), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.remove()
    for name, axes in zip(names, grid.flat, strict=False):
        rows = results[name]["rows"]
        for kind, style in styles.items():
            alike = [row for row in rows if row["kind"] == kind and row["error"] is None]
            points = [(row["peak_mb"], row["ms"]) for row in alike]
            axes.plot(*zip(*sorted(points), strict=True), style, label=labels[kind])
        axes.set_title(results[name]["title"].split(",")[0] + f" ({name})")
        axes.set_xlabel("peak of all tensor bytes, MB")
        axes.set_ylabel("step, ms")
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    main()
