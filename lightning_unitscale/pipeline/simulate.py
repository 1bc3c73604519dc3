"""When each stage does what, under 1F1B: from seconds per stage to a timeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH = 96


@dataclass(frozen=True)
class Work:
    """One pass of one microbatch through one stage.

    Attributes:
        stage: The stage.
        microbatch: The microbatch.
        forward: Whether it is the forward pass.
        start: Seconds from the start of the step.
        end: Seconds from the start of the step.
    """

    stage: int
    microbatch: int
    forward: bool
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of the pipeline.

    Attributes:
        work: All passes.
        num_stages: Stages, each on a device of its own.
    """

    work: tuple[Work, ...]
    num_stages: int

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return max(one.end for one in self.work)

    @property
    def bubble(self) -> float:
        """Fraction of the devices' time in which they wait."""
        busy = sum(one.end - one.start for one in self.work)
        return 1 - busy / (self.num_stages * self.seconds)

    def picture(self) -> str:
        """A row per stage: a digit where a microbatch goes forward, a letter where backward."""
        rows = []
        for stage in range(self.num_stages):
            row = ["."] * _WIDTH
            for one in self.work:
                if one.stage == stage:
                    first = round(one.start / self.seconds * _WIDTH)
                    last = max(first + 1, round(one.end / self.seconds * _WIDTH))
                    mark = (
                        str(one.microbatch % 10)
                        if one.forward
                        else chr(ord("a") + one.microbatch % 26)
                    )
                    row[first:last] = mark * (min(last, _WIDTH) - first)
            rows.append(f"stage {stage} |{''.join(row)}|")
        return "\n".join(rows)


def simulate_1f1b(
    forward_seconds: Sequence[float], backward_seconds: Sequence[float], num_microbatches: int
) -> Timeline:
    """The timeline of one step, with nothing lost between the stages.

    Args:
        forward_seconds: Of one microbatch, for each stage.
        backward_seconds: Of one microbatch, for each stage.
        num_microbatches: Microbatches of the step, at least as many as stages.

    References:
        Narayanan et al. (2019), "PipeDream: Generalized Pipeline Parallelism for DNN Training",
        section 3.2.
    """
    num_stages = len(forward_seconds)
    orders = [order_of_1f1b(stage, num_stages, num_microbatches) for stage in range(num_stages)]
    ended: dict[tuple[int, int, bool], float] = {}
    free = [0.0] * num_stages
    work: list[Work] = []
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                microbatch, forward = order[0]
                needed = _needed(stage, microbatch, forward, num_stages)
                if needed is not None and needed not in ended:
                    break
                start = max(free[stage], ended[needed] if needed else 0.0)
                seconds = forward_seconds[stage] if forward else backward_seconds[stage]
                free[stage] = ended[stage, microbatch, forward] = start + seconds
                work.append(Work(stage, microbatch, forward, start, start + seconds))
                order.pop(0)
    return Timeline(tuple(work), num_stages)


def order_of_1f1b(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[int, bool]]:
    """What a stage does under 1F1B: each microbatch, and whether it goes forward.

    As many forward passes as stages follow, then backward and forward in turn.
    """
    ahead = min(num_microbatches, num_stages - stage)
    order = [(microbatch, True) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        order.append((microbatch, False))
        if ahead + microbatch < num_microbatches:
            order.append((ahead + microbatch, True))
    return order


def _needed(
    stage: int, microbatch: int, forward: bool, num_stages: int
) -> tuple[int, int, bool] | None:
    """The pass that must have ended before."""
    if forward:
        return (stage - 1, microbatch, True) if stage else None
    last = stage == num_stages - 1
    return (stage, microbatch, True) if last else (stage + 1, microbatch, False)
