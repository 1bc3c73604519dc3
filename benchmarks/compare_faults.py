"""Inject faults into trainings, and check whether ``compare`` names their modules.

Each fault begins at a random step in a random module of a small GPT: a perturbed weight, a result
or a gradient in a wrong scale, a dropped term, a clipping format, in FP8 also a stale unit. The
faulty run starts from weights 1e-6 apart, in FP32 or in FP8 (``simulate="fp8"``). It is compared
with a run in FP32. Clean pairs differ in the same ways, but for the fault.

A fault counts as found if the named module is the one whose weight, result, gradient, sum or unit
is wrong. Another ``--seed`` makes other models, data and faults, and is kept beside the others.

Run: ``python benchmarks/compare_faults.py --seed 0``
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.demo_step import DemoLoss
from benchmarks.measure import RESULTS, machine
from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach
from lightning_unitscale.quantize import quantize
from lightning_unitscale.tensorboard.divergence import find_divergence
from lightning_unitscale.tensorboard.history import RunScales, read_run

STEPS, LEARNING_RATE, APART = 8, 1e-3, 1e-6
KINDS = ("weight", "result", "gradient", "dropped term", "clipping format")
# Puts a fault into a model and its callback, before a step.
Fault = Callable[[nn.Module, UnitScaleCallback | None], None]


def train(
    folder: Path, seed: int, precision: str, apart: float, fault: tuple[int, Fault] | None = None
) -> RunScales:
    """Train a small GPT for a few steps, each of them sampled, and read its event file."""
    torch.manual_seed(seed)
    model = DemoLoss(width=32, depth=2, num_heads=2)
    torch.manual_seed(seed)
    for parameter in model.parameters():  # DemoLoss has the same weights for every seed
        if parameter.ndim > 1:
            parameter.data += 0.05 * torch.randn(parameter.shape)
    other = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters() if apart else ():
        parameter.data += apart * torch.randn(parameter.shape, generator=other)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    unit_scale = UnitScaleCallback(simulate="fp8", recalibrate=None) if precision == "fp8" else None
    monitor = ScaleMonitor(every_n_steps=1, on_violation=None, tensorboard_tabs="scales")
    callbacks = [monitor] if unit_scale is None else [unit_scale, monitor]
    data = torch.Generator().manual_seed(seed)
    with attach(model, optimizer, callbacks=callbacks, log_dir=folder):
        for step in range(STEPS):
            if fault is not None and step == fault[0]:
                fault[1](model, unit_scale)
            tokens = torch.randint(256, (4, 33), generator=data).square() // 256  # low bytes first
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return read_run(folder)


def make_fault(kind: str, dice: random.Random) -> tuple[str, Fault]:
    """Return the module at fault and what puts the fault into a model."""
    block = f"gpt.blocks.{dice.randrange(2)}"
    layers = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    path = f"{block}.{dice.choice(layers)}"
    if kind in ("weight", "result", "gradient") and dice.random() < 0.2:
        path = dice.choice((f"{block}.attention_norm", f"{block}.mlp_norm", "gpt.norm"))
    if kind == "dropped term":
        path = block
    make: Callable[[str, random.Random], Fault] = {
        "weight": _weight, "result": _result, "gradient": _gradient, "dropped term": _dropped,
        "clipping format": _clipped, "stale unit": _stale,
    }[kind]  # fmt: skip
    return path, make(path, dice)


def _weight(path: str, dice: random.Random) -> Fault:
    factor, noise = dice.choice(((1.25, 0.0), (0.8, 0.0), (1.0, 0.5), (1.0, 1.0)))
    seed = dice.randrange(2**31)

    def fault(model: nn.Module, _: object) -> None:
        weight = model.get_submodule(path).weight
        with torch.no_grad():
            size = weight.square().mean().sqrt() * noise
            generator = torch.Generator().manual_seed(seed)
            weight.mul_(factor).add_(size * torch.randn(weight.shape, generator=generator))

    return fault


def _result(path: str, dice: random.Random) -> Fault:
    factor = dice.choice((0.5, 0.8, 1.25, 2.0))
    return _hooked(path, lambda result: result * factor)


def _gradient(path: str, dice: random.Random) -> Fault:
    factor = dice.choice((0.25, 0.5, 2.0, 4.0))

    def scaled(result: Tensor) -> Tensor:
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * factor)
        return result

    return _hooked(path, scaled)


def _dropped(path: str, dice: random.Random) -> Fault:
    which = dice.randrange(4)

    def fault(model: nn.Module, _: object) -> None:
        block: Any = model.get_submodule(path)

        def forward(x: Tensor) -> Tensor:
            attended = block.attention(block.attention_norm(x))
            x = (attended, x, x + attended, x + attended)[which]
            hidden = block.mlp(block.mlp_norm(x))
            return (x + hidden, x + hidden, hidden, x)[which]

        block.forward = forward

    return fault


def _clipped(path: str, dice: random.Random) -> Fault:
    name, log2_scale = dice.choice((("E4M3FN", 9), ("E2M1FN", 2), ("E2M1FN", 3), ("E5M2", 17)))

    def rounded(result: Tensor) -> Tensor:
        factor = 2.0**log2_scale / result.detach().square().mean().sqrt()
        shown = quantize(result.detach() * factor, name, saturate=True) / factor
        return result + (shown - result).detach()

    return _hooked(path, rounded)


def _stale(path: str, dice: random.Random) -> Fault:
    role, shift = dice.choice((*((role, 12) for role in ("input", "weight")), ("", 20)))
    shift *= dice.choice((1, -1))
    name = f"{path}.linear:{role}" if role else f"{path}.linear"

    def fault(_: nn.Module, callback: UnitScaleCallback | None) -> None:
        assert callback is not None
        units = callback._matmuls._units
        pair = units.gauge.pair(name)
        if role:
            pair = replace(pair, log2_sigma=pair.log2_sigma + shift)
        else:
            pair = replace(pair, log2_gamma=pair.log2_gamma + shift)
        units.set_gauge(units.gauge.updated({name: pair}))

    return fault


def _hooked(path: str, change: Callable[[Tensor], Tensor]) -> Fault:
    def fault(model: nn.Module, _: object) -> None:
        model.get_submodule(path).register_forward_hook(lambda *call: change(call[2]))

    return fault


def trial(
    seed: int, kind: str, precision: str, folder: Path, plain: RunScales
) -> dict[str, object]:
    """Compare a clean run in FP32 with a run that may have a fault."""
    dice = random.Random(f"{seed} {kind} {precision}")
    expected, fault = ("", None) if kind == "clean" else make_fault(kind, dice)
    # Units are there from the second step on.
    step = dice.randrange(kind == "stale unit", STEPS)
    # A format is a difference of its own; the weights are apart in both.
    faulty = train(folder, seed, precision, APART, None if fault is None else (step, fault))
    found = find_divergence(plain, faulty)
    if kind == "clean":
        is_right = not found.diverged
    else:
        is_right = found.diverged and found.module == expected
    return {
        "seed": seed, "kind": kind, "precision": precision, "expected": expected, "step": step,
        "found": found.module, "found_step": found.step, "tensor": found.tensor,
        "direction": found.direction, "right": is_right,
    }  # fmt: skip


def measure(seed: int, number: int, precisions: Sequence[str]) -> list[dict[str, object]]:
    """Run all trials: ``number`` faults and as many clean pairs for each precision."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(number):
            own = 1000 * seed + index
            plain = train(Path(folder, f"{index}"), own, "fp32", 0.0)
            for precision in precisions:
                kinds = KINDS if precision == "fp32" else (*KINDS, "stale unit")
                for kind in ("clean", kinds[index % len(kinds)]):
                    run = Path(folder, f"{index}_{precision}_{kind}")
                    results.append(trial(own, kind, precision, run, plain))
                    if not results[-1]["right"]:
                        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=100, help="faults, and clean pairs, each")
    parser.add_argument("--precision", choices=("fp32", "fp8"), help="only these faulty runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning_unitscale").setLevel(logging.WARNING)
    precisions = (options.precision,) if options.precision else ("fp32", "fp8")
    results = measure(options.seed, options.number, precisions)
    rows = []
    for precision in precisions:
        for kind in ("clean", *KINDS, "stale unit"):
            own = [one for one in results if (one["precision"], one["kind"]) == (precision, kind)]
            if own:
                right = sum(bool(one["right"]) for one in own)
                rows.append((f"FP32 against {precision.upper()}", kind, len(own), right))
    print(tabulate(rows, headers=("runs", "fault", "pairs", "right")))
    path = RESULTS / "compare_faults.json"
    seeds = json.loads(path.read_text())["seeds"] if path.exists() else {}
    seeds[str(options.seed)] = {"machine": machine(), "results": results}
    path.write_text(json.dumps({"seeds": seeds}, indent=1) + "\n")
    print(f"Written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


if __name__ == "__main__":
    main()
