"""Pipelines on CPU processes: ``python -m tests.pipeline.engine_run FOLDER MODEL:SCHEDULE ...``.

Run it once per rank. Every rank compares its stages' gradients with those of microbatch accumulation
in one process, which it runs by itself, and writes the differences to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import datetime
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_unitscale.pipeline import PipelineRunner, pipeline
from lightning_unitscale.pipeline.schedules import find_schedule
from tests.pipeline.models import MODELS, Case

NUM_MICROBATCHES = 8


def batch_of(case: Case) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The microbatches, and the whole batch that they make."""
    microbatches = [case.kwargs() for _ in range(NUM_MICROBATCHES)]
    whole = tree_map(
        lambda *one: torch.cat(one) if isinstance(one[0], Tensor) else one[0], *microbatches
    )
    return microbatches, whole


def compare(model: str, schedule: str) -> dict[str, Any]:
    """Run two accumulated steps and one of validation; returns the differences on this rank."""
    torch.manual_seed(5)
    case = MODELS[model]()
    microbatches, whole = batch_of(case)
    found = find_schedule(schedule)
    per_rank = 1 if found.placement == "single" else 2
    num_stages = per_rank * dist.get_world_size()
    spec = case.spec(num_stages)
    if num_stages not in (2, 4):
        raise ValueError("the models have three cuts")
    pipe = pipeline(case.module, (), microbatches[0], split_spec=spec)
    runner = PipelineRunner(pipe, schedule, num_microbatches=NUM_MICROBATCHES)

    expected = []
    for _ in range(2):
        losses = [_loss(case.module(**one)) for one in microbatches]
        for one in losses:
            (one / NUM_MICROBATCHES).backward()
        expected += [one.item() for one in losses]
    own = runner.named_parameters()
    gradients = {name: one.grad for name, one in case.module.named_parameters()}
    case.module.zero_grad()

    results = [runner.step(**whole) for _ in range(2)]
    differences = {}
    for name, one in own.items():
        assert (one.grad is None) == (gradients[name] is None), f"{name}: {one.grad}"
        if one.grad is not None:
            differences[name] = (one.grad - gradients[name]).abs().max().item()
    case.module.zero_grad()
    evaluated = runner.eval(**whole)
    assert all(one.grad is None for one in own.values())
    report = {
        "stages": runner.stage_indices,
        "gradients": {name: value for name, value in differences.items() if value},
        "largest": max((one.abs().max().item() for one in gradients.values() if one is not None)),
        "losses": None,
    }
    if runner.is_last:
        steps = [_loss(one).item() for result in results for one in result or []]
        forward = [_loss(one).item() for one in evaluated or []]
        report["losses"] = [
            abs(one - other) for one, other in zip(steps, expected, strict=True)
        ] + [abs(one - other) for one, other in zip(forward, expected, strict=False)]
    return report


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def main(folder: Path, *runs: str) -> None:
    """Run all of the pairs in one process group."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    reports = {one: compare(*one.split(":")) for one in runs}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
