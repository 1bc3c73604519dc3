"""Find torch's schedules by name, and simulate when each of their actions runs."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import networkx as nx

from lightning_unitscale.arguments import check_count, shown

_WIDTH = 96


@dataclass(frozen=True)
class Work:
    """One pass of one microbatch through one stage."""

    stage: int
    microbatch: int
    forward: bool
    # In seconds from the start of the step.
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """All passes of a step, with each stage on its own device."""

    work: tuple[Work, ...]
    num_stages: int

    @property
    def seconds(self) -> float:
        """Return the length of the step."""
        return max(work.end for work in self.work)

    @property
    def bubble(self) -> float:
        """Return the fraction of the devices' time that is idle."""
        busy = sum(work.end - work.start for work in self.work)
        return 1 - busy / (self.num_stages * self.seconds)

    def picture(self) -> str:
        """Draw a row per stage: digits are forward passes, letters are backward passes."""
        rows = [["."] * _WIDTH for _ in range(self.num_stages)]
        for work in self.work:
            first = round(work.start / self.seconds * _WIDTH)
            last = min(_WIDTH, max(first + 1, round(work.end / self.seconds * _WIDTH)))
            marks = string.digits if work.forward else string.ascii_lowercase
            rows[work.stage][first:last] = marks[work.microbatch % len(marks)] * (last - first)
        return "\n".join(f"stage {stage} |{''.join(row)}|" for stage, row in enumerate(rows))


def simulate_1f1b(
    forward_seconds: Sequence[float], backward_seconds: Sequence[float], num_microbatches: int
) -> PipelineTimeline:
    """Return the timeline of one step, without any delay between the stages.

    References:
        Narayanan et al. (2019), "PipeDream: Generalized Pipeline Parallelism for DNN Training",
        section 3.2.
    """
    num_stages = len(forward_seconds)
    # Edges lead from a pass of a stage and a microbatch to the passes that wait for it.
    passes = nx.DiGraph()
    for stage in range(num_stages):
        order = order_of_1f1b(stage, num_stages, num_microbatches)
        nx.add_path(passes, [(stage, *one) for one in order])
        for microbatch in range(num_microbatches):
            if stage + 1 < num_stages:
                passes.add_edge((stage, microbatch, True), (stage + 1, microbatch, True))
                passes.add_edge((stage + 1, microbatch, False), (stage, microbatch, False))
            else:
                passes.add_edge((stage, microbatch, True), (stage, microbatch, False))
    ended: dict[tuple[int, int, bool], float] = {}
    work: list[Work] = []
    for one in nx.topological_sort(passes):
        stage, microbatch, forward = one
        start = max((ended[before] for before in passes.predecessors(one)), default=0.0)
        ended[one] = start + (forward_seconds if forward else backward_seconds)[stage]
        work.append(Work(stage, microbatch, forward, start, ended[one]))
    return PipelineTimeline(tuple(work), num_stages)


def order_of_1f1b(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[int, bool]]:
    """Return the passes of a stage under 1F1B: the microbatch, and whether it is forward."""
    # First one forward pass for this and each later stage, then alternately backward and forward.
    ahead = min(num_microbatches, num_stages - stage)
    order = [(microbatch, True) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        order.append((microbatch, False))
        if ahead + microbatch < num_microbatches:
            order.append((ahead + microbatch, True))
    return order


Placement = Literal["single", "loop", "v"]


@dataclass(frozen=True)
class Schedule:
    """An order in which microbatches pass through the stages.

    Attributes:
        name: Its name in ``torch.distributed.pipelining``.
        placement: ``"single"``: one stage per rank. ``"loop"``: rank ``r`` of ``P`` has the stages
            ``r``, ``r + P``, ... ``"v"``: it has the stages ``r`` and ``2 P - 1 - r``.
    """

    name: str
    placement: Placement

    def stages_of(self, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        """Return the stages of a rank, in ascending order."""
        if self.placement == "v":
            return (rank, 2 * num_ranks - 1 - rank)
        return tuple(range(rank, num_stages, num_ranks))

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return the rank of a stage."""
        if self.placement == "v" and stage >= num_ranks:
            return 2 * num_ranks - 1 - stage
        return stage % num_ranks

    def num_in_flight(self, stage: int, num_stages: int, num_microbatches: int) -> int | None:
        """Return the number of microbatches with saved values in a stage, ``None`` if unknown."""
        if self.name == "1F1B":
            return min(num_microbatches, num_stages - stage)
        return num_microbatches if self.name == "GPipe" else None

    def check(self, num_stages: int, num_ranks: int, num_microbatches: int) -> None:
        """Raise a ``ValueError`` if the schedule cannot run with these numbers."""
        check_count("num_microbatches", num_microbatches)
        expected = {"single": num_ranks, "v": 2 * num_ranks}.get(self.placement)
        if expected is not None and num_stages != expected:
            per_rank = "one stage" if self.placement == "single" else "two stages"
            raise ValueError(
                f"num_stages={num_stages}: {self.name} runs {per_rank} on each of the {num_ranks} "
                f"ranks. Expected {expected} stages. Cut the module into as many, or choose "
                "another schedule."
            )
        if num_stages < num_ranks or num_stages % num_ranks:
            raise ValueError(
                f"num_stages={num_stages}: the {num_ranks} ranks cannot have as many each. "
                f"Expected a multiple of {num_ranks} stages."
            )
        if self.name in ("1F1B", "DualPipeV") and num_microbatches < num_stages:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {self.name} keeps {num_stages} stages busy "
                f"with a microbatch each. Expected at least {num_stages} microbatches. Use more of "
                "them, or another schedule, such as GPipe."
            )
        rounds = max(1, num_microbatches // num_ranks)
        if self.name.startswith("Interleaved") and num_microbatches % rounds:
            raise ValueError(
                f"num_microbatches={num_microbatches}: {self.name} runs them in {rounds} equal "
                f"rounds on {num_ranks} ranks. Expected a multiple of {num_ranks}."
            )


_PLACEMENTS: dict[str, Placement] = {
    "GPipe": "single",
    "1F1B": "single",
    "Interleaved1F1B": "loop",
    "LoopedBFS": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
SCHEDULES = {name: Schedule(name, placement) for name, placement in _PLACEMENTS.items()}
"""The schedules by torch's own names, with the placement of their stages on ranks."""


def find_schedule(name: str) -> Schedule:
    """Return the schedule with this name, in upper or lower case."""
    for schedule_name, schedule in SCHEDULES.items():
        if str(name).lower() == schedule_name.lower():
            return schedule
    raise ValueError(
        f"schedule={shown(name)}: unknown. Expected one of {', '.join(SCHEDULES)}. Pass "
        "'1F1B' if you are not sure."
    )
