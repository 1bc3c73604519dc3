"""Time to plan a joint graph, from hundreds to tens of thousands of nodes.

Joint graphs of the demo's GPT of growing depth. Ours: reading the graph, then the whole front of
plans from the fastest to the smallest; and one partition, plan and split together. Beside it one
partition by torch's planner at a memory budget of 0.5. The extraction by Dynamo and AOTAutograd
that comes before is timed on its own. All times are of the processor and of one thread, so that
other programs on the machine count little.

    python benchmarks/planning_time.py                   # up to 84 blocks, 10,000 nodes
    python benchmarks/planning_time.py --depths 420      # 50,000 nodes: minutes, mostly extraction
    python benchmarks/planning_time.py --depths --llama 126  # Llama 3.1 405B on ``meta``
    python benchmarks/planning_time.py --depths --residual 420  # with and without offload

``--llama`` profiles one sequence of 8,192 tokens in BF16 with AdamW for an H100, traces the joint
graph on fake tensors without Dynamo, and plans it for the middle of the range. Its sizes are those
of Llama 3.1 405B's ``config.json``. ``--residual`` plans residual MLP blocks for an H100 and 0.3 of
the range, on the device alone and with copies to the host.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tabulate import tabulate
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)

from benchmarks.measure import RESULTS, machine
from examples.gpt import GPT
from lightning_unitscale.memory.costs import default_cost_model
from lightning_unitscale.memory.gpus import GPUS
from lightning_unitscale.memory.joint_graph import JointGraphReader
from lightning_unitscale.memory.offload import described_link, gpu_cost_model
from lightning_unitscale.memory.traced_planner import traced_problem
from lightning_unitscale.profiler import profile_graph
from lightning_unitscale.remat import Planner, RematPartitioner, aot_backend

FILE = RESULTS / "planning_time.json"
PLOT = Path(__file__).parent.parent / "docs" / "images" / "planning_time.png"
DEPTHS = (6, 24, 48, 84)
# Torch's planner takes longer than the benchmark is worth beyond this many nodes.
TORCH_UP_TO = 12_000


class Timed:
    """A ``partition_fn`` that times the planners on one graph, and then partitions plainly."""

    def __init__(self, *, with_torch: bool) -> None:
        self.with_torch = with_torch
        self.entered = 0.0
        self.row: dict[str, Any] = {}

    def __call__(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        self.entered = time.process_time()
        outputs = options["num_fwd_outputs"]
        model = default_cost_model("cpu", fused=False)

        def read() -> Any:
            return JointGraphReader(joint.graph, outputs, model).read()

        problem, reading = _timed(read)
        repeated = [_timed(lambda: Planner(read_again(problem)).front()) for _ in range(3)]
        self.row = {
            "nodes": len(problem),
            "read s": reading,
            "front s": min(seconds for _, seconds in repeated),
            "plans": len(repeated[0][0]),
        }
        names = ("num_fwd_outputs", "static_lifetime_input_indices")
        ours_options = {name: options[name] for name in names if name in options}
        ours = RematPartitioner(0.7)
        _, self.row["partition s"] = _timed(
            lambda: ours(copy.deepcopy(joint), joint_inputs, **ours_options)
        )
        if self.with_torch and len(problem) <= TORCH_UP_TO:
            with functorch_config.patch(activation_memory_budget=0.5):
                _, self.row["torch's partition s"] = _timed(
                    lambda: min_cut_rematerialization_partition(
                        copy.deepcopy(joint), joint_inputs, **options
                    )
                )
        return default_partition(joint, joint_inputs, **options)


def read_again(problem: Any) -> Any:
    """The same problem without anything that was derived from it."""
    return type(problem)(problem.nodes, problem.forward_outputs, problem.backward_outputs)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def measure(depth: int, *, with_torch: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(width=32, depth=depth, num_heads=4, context=64)
    tokens, targets = torch.randint(0, 256, (2, 4, 64))
    timed = Timed(with_torch=with_torch)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model._loss((x, y))

    start = time.process_time()
    torch.compile(step, backend=aot_backend(timed))(tokens, targets)
    return {"blocks": depth, "extraction s": timed.entered - start, **timed.row}


def measure_llama(num_layers: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=num_layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(1, 8192, dtype=torch.long)
    step = {"input_ids": tokens, "labels": tokens}
    started = time.perf_counter()
    profile, profiling = _timed(
        lambda: profile_graph(model, device="cuda:h100", optimizer=torch.optim.AdamW, **step)
    )
    problem, tracing = _timed(lambda: traced_problem(model, device="cuda:h100", **step))
    plan, planning = _timed(lambda: Planner(problem).plan(0.5))
    return {
        "layers": num_layers,
        "nodes": len(problem),
        "profile s": profiling,
        "trace s": tracing,
        "plan s": planning,
        "wall s": time.perf_counter() - started,
        "resident GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "profiled peak GiB": profile.peak_bytes / 2**30,
        "planned peak GiB": plan.peak_bytes / 2**30,
    }


class _Residual(nn.Module):
    """Residual MLP blocks of width 1,024, and a loss."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.head(x)
        return result.square().mean()


def measure_residual(depth: int) -> dict[str, Any]:
    gpu = GPUS["h100"]
    with torch.device("meta"):
        model, x = _Residual(depth), torch.empty(16384, 1024)
    problem, tracing = _timed(
        lambda: traced_problem(model, x, device="cuda:h100", cost_model=gpu_cost_model(gpu))
    )
    row: dict[str, Any] = {"blocks": depth, "nodes": len(problem), "trace s": tracing}
    for name, link in (("plan s", None), ("plan with offload s", described_link(gpu))):
        planner = Planner(read_again(problem), link=link)
        _, row[name] = _timed(lambda planner=planner: planner.plan(0.3))
    return row


def plot(rows: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5))
    for key, label in (
        ("extraction s", "Dynamo and AOTAutograd"),
        ("front s", "ours: all plans"),
        ("partition s", "ours: one plan, and the split"),
        ("torch's partition s", "torch: one plan, and the split"),
    ):
        points = [(row["nodes"], row[key]) for row in rows if key in row]
        axis.plot(*zip(*points, strict=True), "o-", label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("nodes of the joint graph")
    axis.set_ylabel("seconds")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--llama", type=int, nargs="*", default=[], metavar="LAYERS")
    parser.add_argument("--residual", type=int, nargs="*", default=[], metavar="BLOCKS")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    rows: list[dict[str, Any]] = before.get("rows", [])
    llamas = {row["layers"]: row for row in before.get("llama", [])}
    for num_layers in arguments.llama:
        llamas[num_layers] = measure_llama(num_layers)
    residual = {row["blocks"]: row for row in before.get("residual", [])}
    for depth in arguments.residual:
        residual[depth] = measure_residual(depth)
    saved = {
        "machine": machine(),
        "rows": rows,
        "llama": [llamas[key] for key in sorted(llamas)],
        "residual": [residual[key] for key in sorted(residual)],
    }
    FILE.write_text(json.dumps(saved, indent=1) + "\n")
    for name in ("llama", "residual"):
        print(tabulate(saved[name], headers="keys", floatfmt=".2f"))
    for depth in arguments.depths:
        rows = [row for row in rows if row["blocks"] != depth]
        rows.append(measure(depth, with_torch=not arguments.no_torch))
        rows.sort(key=lambda row: int(row["blocks"]))
        FILE.write_text(json.dumps({**saved, "rows": rows}, indent=1) + "\n")
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    plot(rows)


if __name__ == "__main__":
    main()
