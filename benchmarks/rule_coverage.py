"""Measure unit scaling by rules of published architectures.

For every architecture of ``model_zoo.py`` and of ``own_architectures.py``: whether the rules run,
eager and under Inductor, and after one batch at initialization the share of all operands of matrix
matmuls within a factor 2 of RMS 1, and of all gradients of matmul outputs within a factor 4, read
off the operators that torch executes. Beside it the model as it is, and the ``unit-scaling``
package's ``unit_scale``. Gradients are checked against those of the same function without any
factor on a gradient: they must be equal but for a power of two for each parameter, bit for bit.
Each architecture gets its rules in three processes, whose strings have other hashes, and the graphs
must be the same ones.

    python benchmarks/rule_coverage.py                # all of them, one table, one JSON file
    python benchmarks/rule_coverage.py GPT-2 BERT     # some
    python benchmarks/rule_coverage.py --core         # the twenty, and our own
    python benchmarks/rule_coverage.py --inductor     # compiled as well: a minute for each
    python benchmarks/rule_coverage.py --graphs       # the graphs of three processes alone
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from tabulate import tabulate
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from benchmarks.architectures import (
    Operands,
    Step,
    equal_bits,
    first_line,
    machine,
    observe_step,
    run_step,
    seed_everything,
)
from benchmarks.model_zoo import CORE, ZOO
from benchmarks.own_architectures import OWN
from lightning_unitscale.capture.module_steps import ModuleSteps, matmuls_of, steps_of
from lightning_unitscale.rules.rewrite import RuleRewrite
from lightning_unitscale.rules.unit_weights import ParameterGradients
from lightning_unitscale.transforms import compile as compile_graphs
from lightning_unitscale.transforms import unit_scale

RESULTS = Path(__file__).parent / "results" / "rule_coverage.json"
OPERANDS_WITHIN, GRADIENTS_WITHIN = 2.0, 4.0
NUM_PROCESSES = 3
ALL: Mapping[str, Callable[[], tuple[nn.Module, Mapping[str, Any]]]] = {**ZOO, **OWN}


@dataclass
class Share:
    """Shares of operands and of arriving gradients that are near RMS 1, and their numbers."""

    operands: float = 0.0
    gradients: float = 0.0
    num_operands: int = 0
    num_gradients: int = 0


@dataclass
class Coverage:
    """Results for one architecture."""

    name: str
    plain: Share | None = None
    rules_alone: Share | None = None
    ours: Share | None = None
    reference: Share | str = "not run"
    inductor: str = "not run"
    gradients_exact: bool = False
    graphs: list[str] = field(default_factory=list)  # a digest for each process
    residuals: int = 0
    origins: dict[str, int] | None = None
    parameters: dict[str, int] | None = None
    error: str = ""


def near(rms: Iterable[tuple[str, float]], within: float) -> tuple[float, int]:
    """Share within a factor of 1; tensors that are zero everywhere have no scale."""
    values = [value for _, value in rms if value != 0.0]
    good = sum(1 / within <= value <= within for value in values)
    return (good / len(values) if values else 1.0), len(values)


def share_of(observed: Operands) -> Share:
    operands, num_operands = near([*observed.forward, *observed.stored], OPERANDS_WITHIN)
    gradients, num_gradients = near(observed.gradients, GRADIENTS_WITHIN)
    return Share(operands, gradients, num_operands, num_gradients)


def examine(name: str, *, inductor: bool) -> Coverage:
    """The plain model, the rules alone, the rules with units for gradients, and the reference."""
    torch._dynamo.reset()
    result = Coverage(name)
    model, inputs = ALL[name]()
    try:
        result.plain = share_of(observe_step(model, inputs))
        model, inputs = ALL[name]()
        scaled = unit_scale(model)
        seed_everything()
        ours = run_step(scaled, inputs)
        result.ours = share_of(observe_step(scaled, inputs))
        steps = steps_of(scaled)
        assert steps is not None
        compiled = compile_graphs(scaled) if inductor else None
        (rules,) = (
            graph_pass for graph_pass in steps.passes if isinstance(graph_pass, RuleRewrite)
        )
        (units,) = (
            graph_pass for graph_pass in steps.passes if isinstance(graph_pass, ParameterGradients)
        )
        result.origins = dict(Counter(decision.origin for decision in rules.plan.values()))
        result.residuals = result.origins.get("residual", 0)
        result.parameters = dict(Counter(param.action for param in rules.plan.parameters.values()))
        # The same function with plain autograd: no pass but the rules, no hook on a parameter.
        matmuls_of(scaled).detach()
        units.settle()
        units.remove()
        steps.passes = [rules]
        steps.steps["forward"].invalidate()
        alone = run_step(scaled, inputs)
        result.rules_alone = share_of(observe_step(scaled, inputs))
        result.gradients_exact = equal_bits(ours.loss, alone.loss) and all(
            ours.gradients[fqn] is None
            if gradient is None
            else equal_bits(gradient * 2.0 ** units.log2_factors.get(fqn, 0), _of(ours, fqn))
            for fqn, gradient in alone.gradients.items()
        )
        if compiled is not None:
            result.inductor = _inductor(compiled, inputs, ours)
    except Exception as error:
        result.error = first_line(f"{type(error).__name__}: {error}")[:200]
        return result
    result.reference = reference(name)
    return result


def rewritten(steps: ModuleSteps) -> str:
    """All graphs as the rules have rewritten them, and the rules' report."""
    texts = [
        str(region.graph)
        for step in steps.steps.values()
        for graph in step.graphs
        for region in graph.rewritten().regions()
    ]
    texts += [graph_pass.report() for graph_pass in steps.passes]
    # Some functions are printed with their address.
    return re.sub("0x[0-9a-f]+", "", "\n".join(texts))


def digest(steps: ModuleSteps) -> str:
    return hashlib.sha256(rewritten(steps).encode()).hexdigest()[:16]


def digest_of(name: str) -> str:
    """Digest of an architecture's graphs after one step, or how it failed."""
    torch._dynamo.reset()
    try:
        model, inputs = ALL[name]()
        scaled = unit_scale(model)
        run_step(scaled, inputs)
        steps = steps_of(scaled)
        assert steps is not None
        return digest(steps)
    except Exception as error:
        return type(error).__name__


def digests_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Digests of each architecture's graphs, one from each process."""
    digests: dict[str, list[str]] = {name: [] for name in names}
    for seed in range(1, NUM_PROCESSES + 1):
        command = [sys.executable, "-W", "ignore", __file__, "--digest", *names]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        for name, line in zip(names, ended.stdout.splitlines(), strict=True):
            digests[name].append(line)
    return digests


def _of(step: Step, fqn: str) -> Tensor:
    gradient = step.gradients[fqn]
    assert gradient is not None
    return gradient


def _inductor(compiled: nn.Module, inputs: Mapping[str, Any], eager: Step) -> str:
    """Relative difference of the loss, and of all gradients as one vector, under Inductor."""
    try:
        # With eager's random numbers, dropout drops the same elements.
        with inductor_config.patch(fallback_random=True):
            other = run_step(compiled, inputs)
    except Exception as error:
        return f"{type(error).__name__}"
    difference = squared = 0.0
    for fqn, gradient in eager.gradients.items():
        if gradient is not None:
            difference += float((_of(other, fqn).double() - gradient.double()).square().sum())
            squared += float(gradient.double().square().sum())
    loss = float((other.loss - eager.loss).abs() / eager.loss.abs())
    return f"{loss:.0e}, {(difference / squared) ** 0.5:.0e}"


def reference(name: str) -> Share | str:
    """The same shares for the ``unit-scaling`` package, or how it failed."""
    from unit_scaling.transforms import unit_scale as their_unit_scale

    torch._dynamo.reset()
    try:
        model, inputs = ALL[name]()
        return share_of(observe_step(their_unit_scale(copy.deepcopy(model)), inputs))
    except Exception as error:
        return type(error).__name__


def table(results: list[Coverage]) -> str:
    """One row per architecture."""

    def shown(share: Share | str | None) -> tuple[str, str]:
        if isinstance(share, Share):
            return f"{share.operands:.0%}", f"{share.gradients:.0%}"
        return (share or "-"), ""

    rows: list[tuple[object, ...]] = []
    for result in results:
        if result.error:
            rows.append((result.name, result.error))
            continue
        rows.append(
            (
                result.name,
                *shown(result.plain),
                *shown(result.reference),
                *shown(result.rules_alone),
                *shown(result.ours),
                "yes" if result.gradients_exact else "NO",
                "yes" if len(set(result.graphs)) == 1 else "NO",
                result.inductor,
                result.residuals,
                (result.origins or {}).get("calibrated", 0),
                (result.parameters or {}).get("left", 0),
            )
        )
    headers = (
        "architecture", "plain: operands", "gradients", "unit-scaling: operands", "gradients",
        "rules alone: operands", "gradients", "ours: operands", "gradients", "gradients exact",
        "same graphs", "Inductor: loss, gradient", "residuals", "calibrated", "parameters left",
    )  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def summary(results: list[Coverage]) -> str:
    """Medians and worst cases over the architectures that ran."""
    ran = [result for result in results if result.ours is not None and not result.error]
    same = sum(
        len(result.graphs) == NUM_PROCESSES and len(set(result.graphs)) == 1 for result in ran
    )
    lines = [
        f"{len(ran)} of {len(results)} architectures run, {same} with the same graphs in "
        f"{NUM_PROCESSES} processes."
    ]
    for what in ("plain", "rules_alone", "ours"):
        shares = [share for result in ran if (share := getattr(result, what)) is not None]
        if shares:
            operands = [share.operands for share in shares]
            gradients = [share.gradients for share in shares]
            lines.append(
                f"{what}: operands median {statistics.median(operands):.0%}, worst "
                f"{min(operands):.0%}; gradients median {statistics.median(gradients):.0%}, worst "
                f"{min(gradients):.0%}"
            )
    theirs = sum(isinstance(result.reference, Share) for result in results)
    lines.append(f"unit-scaling 0.3.5 runs on {theirs} of {len(results)}.")
    return "\n".join(lines)


def _from_json(row: dict[str, Any]) -> Coverage:
    shares = {
        name: Share(**row[name]) if isinstance(row[name], dict) else row[name]
        for name in ("plain", "rules_alone", "ours", "reference")
    }
    return Coverage(**{**row, **shares})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument(
        "--core", action="store_true", help="the twenty that are promised, and ours"
    )
    parser.add_argument("--inductor", action="store_true", help="compile each of them as well")
    parser.add_argument("--graphs", action="store_true", help="compare the graphs alone")
    parser.add_argument("--digest", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = arguments.names or [*(CORE if arguments.core else ZOO), *OWN]
    if arguments.digest:
        for name in names:
            print(digest_of(name), flush=True)
        return
    earlier = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
    known = {row["name"]: _from_json(row) for row in earlier}
    for name in () if arguments.graphs else names:
        result = examine(name, inductor=arguments.inductor)
        if not arguments.inductor and name in known:
            result.inductor = known[name].inductor  # what was compiled in an earlier run is kept
        known[name] = result
        print(name, result.error or result.ours, flush=True)
    for name, digests in digests_of(names).items():
        known[name].graphs = digests
    results = [known[name] for name in ALL if name in known]
    print(table(results))
    print(summary(results))
    document = {**machine(), "results": [asdict(result) for result in results]}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
