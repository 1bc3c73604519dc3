"""Predicted and measured peaks of rematerialization plans of published architectures.

    python benchmarks/plan_prediction.py             # the architectures of the zoo's core
    python benchmarks/plan_prediction.py GPT-2 Swin  # some

Every architecture of ``model_zoo.CORE``, at sixteen times the zoo's batch so that activations
outweigh parameters, in FP32 with its dropout on. Its training step is planned to five budgets: the
default plan's peak, two thirds and one third of the way down to the floor, the floor, and
``"min_cut"``. Each plan then runs: the measured peak is the allocator's, over the second step's
forward and backward pass, and loss, gradients, buffers and the generator's state have to be those
of the default partition bit for bit. Results are kept in the JSON file model by model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.measure import RESULTS, machine
from benchmarks.model_zoo import CORE, ZOO
from lightning_unitscale.memory.real_memory import PeakMeter
from lightning_unitscale.remat import Planner, RematPartitioner, RematPlan, aot_backend
from tests.helpers import same_bits

FILE = RESULTS / "plan_prediction.json"
MIB = 2**20
TIMES_BATCH = 16


class Subject:
    """A model in training mode whose step can be run again and again from the same start."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, inputs = ZOO[name]()
        batch = next(len(value) for value in inputs.values() if isinstance(value, Tensor))
        self.inputs = {
            key: value.repeat(TIMES_BATCH, *[1] * (value.dim() - 1))
            if isinstance(value, Tensor) and value.dim() and len(value) == batch
            else value
            for key, value in inputs.items()
        }
        self._start = {key: value.clone() for key, value in self.model.state_dict().items()}
        with torch.no_grad():
            self.model(**self.inputs)  # some warn in their first call, which breaks the graph

    def compiled(self, partitioner: RematPartitioner) -> Callable[[], Tensor]:
        torch._dynamo.reset()
        # A function of its own for each partitioner: Dynamo's cache is per code.
        run = torch.compile(loss_of(self.model), backend=aot_backend(partitioner))
        return lambda: run(self.inputs)

    def step(self, loss: Callable[[], Tensor]) -> dict[str, Tensor]:
        """All that a step leaves behind."""
        self._restore()
        value = loss()
        value.backward()
        found = {"loss": value.detach(), "generator": torch.get_rng_state()}
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                found[f"gradient of {name}"] = param.grad
        found |= {f"buffer {name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        return found

    def measured_peak(self, loss: Callable[[], Tensor]) -> int:
        self._restore()
        meter = PeakMeter(torch.device("cpu"))
        meter.start()
        model = self.model
        meter.mark([list(model.parameters()), list(model.buffers()), list(self.inputs.values())])
        loss().backward()
        peak = meter.stop()
        assert peak is not None
        return peak

    def _restore(self) -> None:
        self.model.load_state_dict(self._start)
        self.model.zero_grad()
        # Some draw by numpy or Python: which layers to drop, what to mask.
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)


def loss_of(model: nn.Module) -> Callable[[Mapping[str, Any]], Tensor]:
    namespace: dict[str, Any] = {"model": model}
    exec("def step(inputs):\n    return model(**inputs).loss", namespace)
    step: Callable[[Mapping[str, Any]], Tensor] = namespace["step"]
    return step


def budgets_of(planner: Planner) -> dict[str, int | str]:
    top, floor = planner.default.peak_bytes, planner.floor.peak_bytes
    between = {"2/3": floor + 2 * (top - floor) // 3, "1/3": floor + (top - floor) // 3}
    return {"default": top, **between, "floor": floor, "min_cut": "min_cut"}


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    names = [name for name in expected if name not in found]
    return names + [
        key
        for key, value in found.items()
        if key not in expected or not same_bits(value, expected[key])
    ]


def examine(name: str) -> list[dict[str, Any]]:
    subject = Subject(name)
    graphs: list[RematPlan] = []
    step = subject.compiled(RematPartitioner("default", on_plan=graphs.append))
    reference = {key: value.clone() for key, value in subject.step(step).items()}
    if len(graphs) != 1:
        # Peaks are predicted per graph; that no bit changes holds for all of them together.
        planned: dict[str, int | str] = {"min_cut": "min_cut"}
    else:
        planned = budgets_of(Planner(graphs[0].problem))
    rows = []
    for label, budget in planned.items():
        plans: list[RematPlan] = []
        step = subject.compiled(RematPartitioner(budget, on_plan=plans.append))
        wrong = differing(subject.step(step), reference)
        row: dict[str, Any] = {"model": name, "budget": label, "graphs": len(plans)}
        if len(plans) == 1:
            predicted, measured = plans[0].peak_bytes, subject.measured_peak(step)
            row["predicted MiB"] = round(predicted / MIB, 3)
            row["measured MiB"] = round(measured / MIB, 3)
            row["error %"] = round(100 * (predicted / measured - 1), 4)
            if isinstance(budget, int):
                row["within budget"] = predicted <= budget
        row["nodes"] = sum(len(plan.problem) for plan in plans)
        row["run again"] = sum(len(plan.again) for plan in plans)
        row["same bits"] = not wrong
        if wrong:
            row["differing"] = wrong[:5]
        rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each architecture."""
    found = []
    for name in dict.fromkeys(row["model"] for row in rows):
        own = {row["budget"]: row for row in rows if row["model"] == name}
        peaks = {key: row["measured MiB"] for key, row in own.items() if "measured MiB" in row}
        errors = [abs(row["error %"]) for row in own.values() if "error %" in row]
        found.append(
            {
                "model": name,
                "graphs": next(iter(own.values()))["graphs"],
                "nodes": next(iter(own.values()))["nodes"],
                **{f"{key}, MiB": value for key, value in peaks.items()},
                "largest error %": max(errors, default=None),
                "same bits": all(row["same bits"] for row in own.values()),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="architectures of the zoo; its core by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known: list[dict[str, Any]] = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    for name in arguments.models or CORE:
        rows = examine(name)
        print(tabulate(rows, headers="keys"), flush=True)
        known = [row for row in known if row["model"] != name] + rows
        FILE.write_text(json.dumps({"machine": machine(), "rows": known}, indent=1) + "\n")
    print("\n" + tabulate(summary(known), headers="keys", missingval=""))


if __name__ == "__main__":
    main()
