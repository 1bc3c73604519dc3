"""Compare the predictions of precision reports with measurements.

Two small models are trained for a while. Then a report predicts the damage of each computation of
each matmul, and each is measured alone: the change of the loss with one forward computation
rounded, and the error of the gradient with one backward computation rounded. Random halves of the
computations are exempted as well, and the change that this makes is predicted and measured.

Rounding to nearest draws its errors by chance: a grid at another place gives others. The damage of
one computation to the loss is measured in one step, as the report predicts it. Changes that lists
of exemptions make are means over places of the grid (``grid="moving"``) that the report did not
use. Their noise floor is the standard error of this mean, the median over the lists.
``--training`` compares sets of equal FLOPs in trainings: the report's set, and the first block and
the readout. Units follow, as with ``UnitScaleCallback``, since a report measures units of its own.

    python benchmarks/precision_ledger.py
    python benchmarks/precision_ledger.py --training
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from scipy.stats import spearmanr
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.demo_step import DemoLoss
from benchmarks.low_precision_training import endless_batches, take_new_units
from benchmarks.measure import RESULTS, machine
from benchmarks.small_models import ResNetLoss
from examples.text import TextDataModule
from lightning_unitscale.callbacks.matmul_units import RecalibrationSchedule
from lightning_unitscale.matmuls.computations import Exemption
from lightning_unitscale.matmuls.matmul_formats import SimulateFormat
from lightning_unitscale.precision.ledger import Key
from lightning_unitscale.precision.measured_step import Effort, num_places
from lightning_unitscale.precision.meter import Meter, metering
from lightning_unitscale.precision.report import PrecisionReport
from lightning_unitscale.transforms import lossless_unit_scale, simulate_format

FORMATS = ("E4M3FN", "E2M3FN", "E2M1FN", "MXFP8_E4M3", "NVFP4")
STEPS = {"GPT": 200, "ResNet": 60}  # of training before the report
# Of the trainings: the blocks, the steps, that of the report, and how many losses are averaged.
SEEDS, DEPTH, TRAINING_STEPS, REPORT_STEP, LAST = 3, 4, 200, 50, 20
TRAINING_FORMAT = "E2M1FN"
# What is exempt. Weights that differ by a millionth show what is chance.
AGAIN, NUDGE = ", again", 1.0 + 1e-6
TRAININGS = ("FP32", "first and last", "report", "nothing")
TRAININGS += tuple(name + AGAIN for name in TRAININGS[1:3])
NUM_LISTS = 30
EFFORT = Effort(directions=64, pairs=32)
NUM_GRIDS = EFFORT.pairs  # places of the grid, for the loss
PLACES = num_places(EFFORT, is_moving=True)  # for the gradient
# Places that the report does not use, for lists.
OTHER_GRIDS = range(NUM_GRIDS, 3 * NUM_GRIDS)
OTHER_PLACES = range(NUM_GRIDS, NUM_GRIDS + PLACES)
Batches = Callable[[int], tuple[Tensor, Tensor]]


def gpt(seed: int = 0, depth: int = 2) -> tuple[nn.Module, Batches]:
    """The demo's GPT, small, on the text of Python's standard library."""
    module = DemoLoss(width=64, depth=depth, num_heads=2, seed=seed)
    data = TextDataModule(context=64, batch_size=8, max_bytes=2**20, seed=seed + 1)
    data.prepare_data()
    data.setup("fit")
    source = endless_batches(data)
    seen: list[tuple[Tensor, Tensor]] = []

    def batch(index: int) -> tuple[Tensor, Tensor]:
        while len(seen) <= index:
            seen.append(next(source))
        return seen[index]

    return module, batch


def resnet(seed: int = 0) -> tuple[nn.Module, Batches]:
    """A ResNet of four blocks on noisy images of ten classes."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(seed))

    def batch(index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + index + 1)
        classes = torch.randint(10, (32,), generator=generator)
        noise = torch.randn(32, 3, 16, 16, generator=generator)
        return patterns[classes] + 1.5 * noise, classes

    return ResNetLoss((16, 32)), batch


MODELS = {"GPT": gpt, "ResNet": resnet}


def train(
    module: nn.Module, batches: Batches, steps: range, recalibrates: bool = False
) -> list[float]:
    """Train by AdamW, and return the losses. Units may follow, as the callback's do."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    schedule = RecalibrationSchedule("auto" if recalibrates else None)
    losses = []
    for index in steps:
        if schedule.measures_at(index):
            take_new_units(module, batches(index))
        optimizer.zero_grad()
        loss = module(*batches(index))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(meter: Meter, report: PrecisionReport, format: str) -> dict[str, Any]:
    """Predicted and measured damage of each computation on its own."""
    pairs: dict[str, list[tuple[float, float]]] = {"loss": [], "mean loss": [], "gradient": []}
    for row in report.rows_of(format):
        key = (row.name, row.computation)
        if row.is_forward:
            changes = loss_changes(meter, format, lambda other, key=key: other == key)
            pairs["loss"].append((row.loss_change, changes[0]))
            pairs["mean loss"].append((row.lasting, statistics.mean(changes)))
        else:
            error = meter.gradient_error(format, lambda other, key=key: other == key, PLACES)
            pairs["gradient"].append((row.lasting, error))
    return {
        kind: {
            "spearman": float(spearmanr(*zip(*values, strict=True)).statistic),
            "computations": len(values),
            "pairs": values,
        }
        for kind, values in pairs.items()
    }


def lists(meter: Meter, report: PrecisionReport, format: str) -> list[dict[str, Any]]:
    """What random exemptions change, predicted and measured, for loss and gradient."""
    rows = report.rows_of(format)
    generator, found = random.Random(0), []
    everything = loss_changes(meter, format, lambda _: True, OTHER_GRIDS)
    whole = meter.gradient_errors(format, lambda _: True, OTHER_PLACES)
    for _ in range(NUM_LISTS):
        exempt = frozenset((row.name, row.computation) for row in rows if generator.random() < 0.5)

        def is_rounded(key: Key, exempt: frozenset[Key] = exempt) -> bool:
            return key not in exempt

        rest = loss_changes(meter, format, is_rounded, OTHER_GRIDS)
        changes = [before - after for before, after in zip(everything, rest, strict=True)]
        errors = meter.gradient_errors(format, is_rounded, OTHER_PLACES)
        falls = [before - after for before, after in zip(whole, errors, strict=True)]
        predicted = report.predicted_gain(tuple(exempt), format)
        found.append(
            {
                "exempt": sorted(exempt),
                "loss": statistics.mean(changes),
                "loss_noise": standard_error(changes),
                "loss_predicted": predicted.loss_change,
                "gradient": root_mean_square(whole) - root_mean_square(errors),
                "gradient_noise": standard_error(falls),
                "gradient_predicted": predicted.gradient_error,
            }
        )
    return found


def loss_changes(
    meter: Meter,
    format: str,
    is_rounded: Callable[[Key], bool],
    places: range = range(NUM_GRIDS),
) -> list[float]:
    """The change of the loss at several places of the grid."""
    changes = []
    for place in places:
        meter.move_grids(place)
        changes.append(meter.loss_change(format, is_rounded))
    meter.move_grids(0)
    return changes


def standard_error(values: Sequence[float]) -> float:
    """Of the values' mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def root_mean_square(values: Sequence[float]) -> float:
    """As a report averages errors of the gradient over places."""
    return math.hypot(*values) / math.sqrt(len(values))


def within(found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return how many changes above ten times the noise floor are within 20 % of the prediction."""
    result: dict[str, Any] = {}
    for kind in ("loss", "gradient"):
        # The median, since the standard error of a few grids is itself uncertain.
        floor = statistics.median(one[f"{kind}_noise"] for one in found)
        above = [one for one in found if abs(one[kind]) > 10 * floor]
        result |= {
            f"{kind}_floor": floor,
            f"{kind}_above": len(above),
            f"{kind}_within": sum(_is_near(one[f"{kind}_predicted"], one[kind]) for one in above),
        }
    return result


def _is_near(predicted: float, measured: float) -> bool:
    return abs(predicted - measured) <= 0.2 * abs(measured)


def predict(name: str, steps: int, formats: Sequence[str]) -> dict[str, Any]:
    """Train a model, and compare the report with measurements at its last weights."""
    torch.manual_seed(0)
    module, batches = MODELS[name]()
    losses, batch = train(module, batches, range(steps)), batches(steps)
    result: dict[str, Any] = {"steps": steps, "loss": losses[-1]}
    for format in formats:
        own = SimulateFormat(format, format, grid="moving")
        with metering(module, batch, {}, (format,), own=own) as meter:
            report = meter.report(EFFORT)
            changes = lists(meter, report, format)
            result[format] = {
                "exemptions": {"lists": changes, **within(changes)},
                "cost_steps": report.cost_steps,
                "together": vars(report.together[format]),
                "predicted": vars(report.predicted(format)),
                "alone": alone(meter, report, format),
            }
        print(name, format, summary_row(result[format]), flush=True)
    return result


def summary_row(found: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of a format's row."""
    one, exemptions = found["alone"], found["exemptions"]
    return (
        f"{one['loss']['spearman']:.2f}",
        f"{one['mean loss']['spearman']:.2f}",
        f"{one['gradient']['spearman']:.2f}",
        f"{exemptions['loss_floor']:.1e}",
        f"{exemptions['loss_within']} of {exemptions['loss_above']}",
        f"{exemptions['gradient_floor']:.1e}",
        f"{exemptions['gradient_within']} of {exemptions['gradient_above']}",
    )


def first_and_last(report: PrecisionReport) -> tuple[Exemption, ...]:
    """All computations of the first block and of the head. Norms are no matmuls."""
    return tuple(
        (row.name, row.computation)
        for row in report.rows_of()
        if row.module.startswith(("gpt.blocks.0", "gpt.head"))
    )


def flops_of(report: PrecisionReport, exempt: Sequence[Exemption]) -> int:
    """FLOPs of some computations."""
    chosen = set(exempt)
    return sum(r.flops for r in report.rows_of() if (r.name, r.computation) in chosen)


def best_of(report: PrecisionReport, budget: int) -> tuple[Exemption, ...]:
    """The report's choices, from the smallest set to larger ones, that fit in a budget of FLOPs."""
    chosen: list[Exemption] = []
    for step in range(200, -1, -1):
        for each in report.smallest_exemption(step / 200):
            if each not in chosen and flops_of(report, [*chosen, each]) <= budget:
                chosen.append(each)
    return tuple(chosen)


def choose(seed: int) -> dict[str, Any]:
    """Return sets of equal FLOPs, from a report on a model that is trained for a while in FP32."""
    module, batches = gpt(seed, DEPTH)
    train(module, batches, range(REPORT_STEP))
    own = SimulateFormat(TRAINING_FORMAT, TRAINING_FORMAT, grid="moving")
    with metering(module, batches(REPORT_STEP), {}, (TRAINING_FORMAT,), own=own) as meter:
        report = meter.report(Effort(directions=16, pairs=8))
    usual = first_and_last(report)
    sets = {"first and last": usual, "report": best_of(report, flops_of(report, usual))}
    whole = sum(row.flops for row in report.rows_of())
    shares = {name: flops_of(report, exempt) / whole for name, exempt in sets.items()}
    return {"sets": sets, "FLOPs": shares, "losses": {}}


def trainings(runs: dict[str, Any], write: Callable[[], None]) -> None:
    """Train with each set exempt, and with none, from the same weights on the same batches."""
    for name, seed in itertools.product(TRAININGS, range(SEEDS)):
        found = runs.setdefault(str(seed), None) or choose(seed)
        runs[str(seed)] = found
        if name in found["losses"]:
            continue
        module, batches = gpt(seed, DEPTH)
        if name.endswith(AGAIN):
            module.load_state_dict({key: each * NUDGE for key, each in module.state_dict().items()})
        module = lossless_unit_scale(module, *batches(0))
        if name != "FP32":
            exempt = found["sets"].get(name.removesuffix(AGAIN), ())
            both = TRAINING_FORMAT, TRAINING_FORMAT
            module = simulate_format(module, *both, grid="moving", exempt=list(map(tuple, exempt)))
        losses = train(module, batches, range(TRAINING_STEPS), recalibrates=True)
        found["losses"][name] = statistics.mean(losses[-LAST:])
        print(seed, name, f"{found['losses'][name]:.4f}", flush=True)
        write()


def training_table(runs: dict[str, Any]) -> str:
    """Return the final losses of each seed, and their means."""
    rows = [
        (seed, *(run["losses"][name] for name in TRAININGS), *run["FLOPs"].values())
        for seed, run in runs.items()
    ]
    means = [statistics.mean(column) for column in list(zip(*rows, strict=True))[1:]]
    headers = ("seed", *TRAININGS, "FLOPs, first and last", "FLOPs, report")
    return tabulate([*rows, ("mean", *means)], headers, floatfmt=".4f")


def main() -> None:
    """Measure, print tables and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS[:3]), choices=FORMATS)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "precision_ledger.json")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results["machine"] = machine()
    if options.training:
        runs = results.setdefault("training", {})
        trainings(runs, lambda: write(options.output, results))
        print(training_table(runs))
    else:
        for name in options.models:
            results.setdefault(name, {}).update(predict(name, STEPS[name], options.formats))
        rows = [
            (name, format, *summary_row(results[name][format]))
            for name in options.models
            for format in options.formats
        ]
        headers = ("model", "format", "order, loss", "order, mean loss", "order, gradient")
        lists_of = ("floor, loss", "within 20 %", "floor, gradient", "within 20 %")
        print(tabulate(rows, (*headers, *lists_of)))
    write(options.output, results)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the numbers so far."""
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
