"""Kill one rank of a pipeline before a random step (``kill -9``), repeatedly.

Each time all ranks must end by themselves, well before the strategy's timeout, and a new run that
goes on from the last checkpoint must have the losses of an uninterrupted run.

    python benchmarks/pipeline_failures.py                # ten times, on two processes
    python benchmarks/pipeline_failures.py --times 2 --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tabulate import tabulate

from benchmarks.measure import RESULTS, machine
from tests.distributed.launch import codes_of_ranks, run_ranks
from tests.pipeline.long_run import KILL_EPOCH_STEPS, KILL_EPOCHS

RUN = "tests.pipeline.long_run"
RESULT = "pipeline_failures.json"
SCHEDULES = ("1F1B", "GPipe", "ZBVZeroBubble", "InterleavedZeroBubble")
# Of the ranks; what they wait for a rank that is gone should be far less.
TIMEOUT_SECONDS = 60.0


def losses_of(folder: Path) -> list[float]:
    """The losses that the first rank has written."""
    found: list[float] = torch.load(folder / "killed-0.pt", weights_only=False)["losses"]
    return found


def one_time(root: Path, num_ranks: int, schedule: str, rank: int, step: int) -> dict[str, Any]:
    """Kill a rank, go on from the last checkpoint, and say what came out."""
    killed, resumed = root / "killed", root / "resumed"
    for folder in (killed, resumed):
        folder.mkdir(parents=True)
    common = (str(num_ranks), schedule)
    codes, _ = codes_of_ranks(
        RUN, killed, *common, f"killed@{rank}:{step}", num_ranks=num_ranks, timeout=600
    )
    # The last that a rank writes is the traceback with which it ends.
    ended = max((killed / f"{rank}.txt").stat().st_mtime for rank in range(num_ranks))
    checkpoints = sorted(killed.glob("*.ckpt"))
    resume_from = str(checkpoints[-1]) if checkpoints else ""
    case = f"killed={resume_from}"
    run_ranks(RUN, resumed, *common, case, num_ranks=num_ranks, timeout=600)
    return {
        "schedule": schedule,
        "rank": rank,
        "step": step,
        "codes": " ".join(map(str, codes)),
        "seconds to the end": ended - (killed / "now").stat().st_mtime,
        "resumed from epoch": len(checkpoints),
        "losses": losses_of(resumed),
    }


def main() -> int:
    """Print and write the table; returns whether a run has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows = []
    failed = False
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        whole: dict[str, list[float]] = {}
        for number in range(options.times):
            schedule = SCHEDULES[number % len(SCHEDULES)]
            if schedule not in whole:
                folder = root / schedule
                folder.mkdir()
                arguments = (str(options.ranks), schedule, "killed")
                run_ranks(RUN, folder, *arguments, num_ranks=options.ranks, timeout=600)
                whole[schedule] = losses_of(folder)
            rank = draw.randrange(options.ranks)
            step = draw.randrange(1, KILL_EPOCHS * KILL_EPOCH_STEPS)
            row = one_time(root / str(number), options.ranks, schedule, rank, step)
            losses = row.pop("losses")
            expected = whole[schedule][-len(losses) :]
            row["loss difference"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            codes = [int(code) for code in row["codes"].split()]
            all_ended = codes.pop(rank) == -signal.SIGKILL and set(codes) == {1}
            in_time = row["seconds to the end"] < TIMEOUT_SECONDS
            failed |= not (all_ended and in_time and row["loss difference"] == 0.0)
            rows.append(row)
            print(tabulate(rows, headers="keys", floatfmt=".3g"), flush=True)
    about = machine()
    RESULTS.mkdir(exist_ok=True)
    content = {"title": __doc__.splitlines()[0], "machine": about, "rows": rows}
    (RESULTS / RESULT).write_text(json.dumps(content, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
