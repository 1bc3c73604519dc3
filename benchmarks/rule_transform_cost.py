"""Time of the rules before the first step, from 8 to 512 transformer blocks.

CPU time that Dynamo takes to capture the model, and that the transform adds to it: finding
residual adds and roles, deciding, and rewriting, without the eager steps in which it measures. Peak
memory is that of Python's own objects while the transform works. The ``unit-scaling`` package's
transform runs beside it, in the same process.

    python benchmarks/rule_transform_cost.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tabulate import tabulate

from benchmarks.demo_step import DemoLoss, demo_batch
from benchmarks.measure import RESULTS, machine
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.rollback import restoring
from lightning_unitscale.rules.build_plan import Recorder
from lightning_unitscale.rules.decide import Decider
from lightning_unitscale.rules.plan import RuleOptions, RulePlan, key
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.roles import find_structure, plan_parameters

DEPTHS = (8, 16, 32, 64, 128, 256, 512)
PLOT = Path(__file__).parent.parent / "docs" / "images" / "rule_transform_cost.png"


def ours(depth: int) -> dict[str, float]:
    """Seconds of capture and of the transform, and MiB that the transform takes at its peak."""
    torch._dynamo.reset()
    model, batch = DemoLoss(width=16, depth=depth, num_heads=2), demo_batch(1, 16)
    steps = ModuleSteps(model, ("forward",))
    rules = RuleRewrite()
    steps.add_pass(rules)
    steps.attach("benchmark")
    step = steps.steps["forward"]
    recorder = Recorder()
    start = time.process_time()
    with restoring(model):
        step.rehearse(recorder, *batch)
    first = time.process_time() - start
    start = time.process_time()
    with restoring(model):
        step.rehearse(Recorder(), *batch)
    # The second run is captured already.
    capture = first - (time.process_time() - start)

    def transform() -> tuple[int, int]:
        flow = recorder.result()
        structure = find_structure(flow)
        parameters = plan_parameters(structure, init_weights=True)
        decider = Decider(structure, parameters, RuleOptions(), lambda node: None)
        for node in flow.nodes:
            decider.before(node)
        decisions = {key("forward", name): decision for name, decision in decider.decisions.items()}
        rules.plan = RulePlan(decisions, parameters)
        return len(flow.nodes), len(structure.residuals)

    start = time.process_time()
    num_nodes, num_residuals = transform()
    planned = time.process_time() - start
    step.invalidate()
    step(*batch)
    rewritten = sum(record.seconds for record in steps.records)
    tracemalloc.start()
    transform()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_residuals == 2 * depth
    return {
        "nodes": num_nodes,
        "capture s": capture,
        "transform s": planned + rewritten,
        "of capture": (planned + rewritten) / capture,
        "MiB": memory / 2**20,
    }


def theirs(depth: int) -> str:
    """Seconds of the reference's transform and its first forward pass, or how it fails."""
    from unit_scaling.transforms import unit_scale

    torch._dynamo.reset()
    model, batch = DemoLoss(width=16, depth=depth, num_heads=2), demo_batch(1, 16)
    start = time.process_time()
    try:
        unit_scale(model)(*batch)
    except (Exception, RecursionError) as error:
        cause = error.__cause__ or error
        return type(cause).__name__
    return f"{time.process_time() - start:.2f}"


def plot(rows: list[dict[str, object]]) -> None:
    """Seconds and MiB over the number of blocks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    blocks = [int(str(row["blocks"])) for row in rows]
    for name in ("capture s", "transform s"):
        left.plot(blocks, [float(str(row[name])) for row in rows], "o-", label=name[:-2])
    left.set_ylabel("seconds")
    left.legend()
    right.plot(blocks, [float(str(row["MiB"])) for row in rows], "o-")
    right.set_ylabel("MiB of the transform")
    for axis in (left, right):
        axis.set_xlabel("transformer blocks")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[dict[str, object]] = []
    for depth in arguments.depths:
        reference = theirs(depth) if depth <= 128 else "-"
        rows.append({"blocks": depth, **ours(depth), "unit-scaling": reference})
        print(rows[-1], flush=True)
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    document = {**machine(), "rows": rows}
    (RESULTS / "rule_transform_cost.json").write_text(json.dumps(document, indent=1) + "\n")
    plot(rows)


if __name__ == "__main__":
    main()
