"""Pipelines on CPU processes: ``python -m tests.pipeline.engine_run FOLDER RANKS MODEL:SCHEDULE``.

The parent captures each model once, but for those whose cuts are planned: the profiler runs their
backward pass, and who has run one cannot fork. Then it forks the ranks. Every rank runs microbatch
accumulation by itself, compares its stages' gradients with those, and the results on the rank of
the last stage, and writes the differences to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_unitscale.pipeline import Pipe, PipelineRunner, balanced_split, pipeline
from lightning_unitscale.pipeline.schedules import find_schedule
from tests.pipeline.models import MODELS

NUM_MICROBATCHES = 8


@dataclass(frozen=True)
class Expected:
    """Return the results of two accumulated steps and a validation in one process."""

    losses: list[float]
    forward: list[float]
    gradients: dict[str, Tensor | None]


@dataclass
class Prepared:
    """A captured model and its batch."""

    pipe: Pipe
    module: nn.Module
    microbatches: list[dict[str, Any]]

    @property
    def whole(self) -> dict[str, Any]:
        """The microbatches as one batch."""
        return tree_map(
            lambda *one: torch.cat(one) if isinstance(one[0], Tensor) else one[0],
            *self.microbatches,
        )

    @cached_property
    def expected(self) -> Expected:
        """The model in one process; run in a rank, since backward passes prevent a fork."""
        losses = []
        for _ in range(2):
            step = [_loss(self.module(**one)) for one in self.microbatches]
            for one in step:
                (one / NUM_MICROBATCHES).backward()
            losses += [one.item() for one in step]
        gradients = {name: one.grad for name, one in self.module.named_parameters()}
        self.module.zero_grad()
        with torch.no_grad():
            # Without gradients attention may run another kernel.
            forward = [_loss(self.module(**one)).item() for one in self.microbatches]
        return Expected(losses, forward, gradients)


def prepare(model: str, num_stages: int) -> Prepared:
    """Capture a model."""
    torch.manual_seed(5)
    case = MODELS[model]()
    microbatches = [case.kwargs() for _ in range(NUM_MICROBATCHES)]
    # Cuts that a person would choose, and where there are more of them, those of the profiler.
    chosen: dict[str, Any] = {"split_spec": case.spec(num_stages)}
    if is_planned(num_stages):
        chosen = {"split_policy": balanced_split(num_stages)}
    pipe = pipeline(case.module, (), microbatches[0], **chosen)
    return Prepared(pipe, case.module, microbatches)


def compare(one: Prepared, schedule: str) -> dict[str, Any]:
    """The differences on this rank."""
    alone = one.expected
    runner = PipelineRunner(one.pipe, schedule, num_microbatches=NUM_MICROBATCHES)
    own = runner.named_parameters()
    results = [runner.step(**one.whole) for _ in range(2)]
    differences = {}
    for name, parameter in own.items():
        expected = alone.gradients[name]
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is not None and expected is not None:
            differences[name] = (parameter.grad - expected).abs().max().item()
    for parameter in own.values():
        parameter.grad = None
    evaluated = runner.eval(**one.whole)
    assert all(parameter.grad is None for parameter in own.values())
    report: dict[str, Any] = {
        "stages": runner.stage_indices,
        "num_gradients": len(differences),
        "has_gradient": sorted(differences),
        "in_several_stages": sorted(one.pipe.shared_parameters()),
        "gradients": {name: value for name, value in differences.items() if value},
        "losses": None,
    }
    if runner.is_last:
        steps = [_loss(each).item() for result in results for each in result or []]
        forward = [_loss(each).item() for each in evaluated or []]
        pairs = [*zip(steps, alone.losses, strict=True), *zip(forward, alone.forward, strict=True)]
        report["losses"] = [abs(found - expected) for found, expected in pairs]
    return report


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output["loss"]


def num_stages_of(schedule: str, num_ranks: int) -> int:
    """Stages of a schedule: two on each rank where it can have several."""
    return num_ranks if find_schedule(schedule).placement == "single" else 2 * num_ranks


def is_planned(num_stages: int) -> bool:
    """Check whether there are too many stages to choose the cuts by hand."""
    return num_stages > 4


def run_rank(folder: Path, rank: int, num_ranks: int, runs: list[tuple[str, str, Any]]) -> None:
    """Run all of the pairs in one process group, and write the reports."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    reports = {
        f"{model}:{schedule}": compare(
            one or prepare(model, num_stages_of(schedule, num_ranks)), schedule
        )
        for model, schedule, one in runs
    }
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


def main(folder: Path, num_ranks: int, *runs: str) -> int:
    """Prepare, fork, and wait for the ranks; returns how many failed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pairs = [tuple(one.split(":")) for one in runs]
    wanted = {(model, num_stages_of(schedule, num_ranks)) for model, schedule in pairs}
    prepared = {key: prepare(*key) for key in sorted(wanted) if not is_planned(key[1])}
    given = [(m, s, prepared.get((m, num_stages_of(s, num_ranks)))) for m, s in pairs]
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            try:
                run_rank(folder, rank, num_ranks, given)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
